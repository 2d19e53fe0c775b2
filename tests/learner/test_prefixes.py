"""What siblings begin with is computed once, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.batch import Batch
from headrace.base.types.recorded import Routing
from headrace.learner.logits import TokenLogprobs, split_model
from headrace.learner.packing import MicroBatch, Packing, Unit, plan, siblings
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PLAN, PackedPlan
from tests.learner.builders import VOCAB_SIZE, Setup, assert_close, gradients, random_batch, tiny

PROMPT = 6


def alike(num_samples: int = 9, seed: int = 0) -> Batch:
    """Three samples to a group, which begin with the same :data:`PROMPT` tokens, of which the second sample of the
    batch carries the last as a loss token of its own."""
    batch = random_batch(num_samples=num_samples, seed=seed)
    lengths = batch.lengths_S + PROMPT
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCAB_SIZE, (num_samples, PROMPT))[batch.groups_S]
    starts = np.cumsum(batch.lengths_S) - batch.lengths_S

    def before(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
        own = np.split(column, starts[1:])
        return np.concatenate([np.concatenate(pair) for pair in zip(rows, own, strict=True)]).astype(column.dtype)

    zeros = np.zeros((num_samples, PROMPT))
    mask = before(batch.mask_N, zeros)
    mask[lengths[0] + PROMPT - 1] = True
    return msgspec.structs.replace(
        batch,
        lengths_S=lengths,
        ids_N=before(batch.ids_N, prompts),
        mask_N=mask,
        logprobs_N=np.where(mask, -1.5, 0).astype(np.float32),
        versions_N=np.where(mask, 0, -1).astype(np.int32),
        advantages_N=np.repeat(rng.normal(size=num_samples), lengths).astype(np.float32),
    )


@pytest.mark.parametrize("budget", [45, 10_000])
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}])
def test_gradient_is_that_of_computing_every_sample_whole(tmp_path, budget, extra):
    setup = Setup(model_dir=tiny(tmp_path / "model", extra=extra))
    shared, apart = (
        replace(setup, config={"tokens_per_microbatch": budget, "share_prefixes": share}).learner()
        for share in (True, False)
    )
    batch = alike()
    np.testing.assert_allclose(shared.logprobs(batch), apart.logprobs(batch), atol=1e-5)
    one, other = shared.forward_backward(batch), apart.forward_backward(batch)
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)
    assert_close(gradients(shared), gradients(apart))


def test_prefixes_are_shared_by_themselves_where_that_saves_a_tenth_of_the_tokens(tmp_path):
    learner, batch = Setup(model_dir=tiny(tmp_path / "model")).learner(), alike()
    assert any(micro.rows_M is not None for micro in learner._forward.cut(batch, batch.mask_N))
    seconds_S = np.cumsum(batch.lengths_S) - batch.lengths_S + 1
    ids_N = batch.ids_N.copy()
    ids_N[seconds_S] = np.arange(len(seconds_S))  # from the second token on all are different
    hardly = msgspec.structs.replace(batch, ids_N=ids_N)
    assert {unit.prefix for unit in siblings(hardly, np.arange(9), 10_000)} == {1}
    assert all(micro.rows_M is None for micro in learner._forward.cut(hardly, hardly.mask_N))


def test_gradient_is_the_same_to_ten_digits_in_float64(tmp_path):
    """In an architecture that does nothing in float32 on the way."""
    directory = tiny(tmp_path / "model", kind="gpt_neox", intermediate_size=48)
    model = load_model(ModelConfig(path=str(directory))).double()
    batch = alike()
    lengths = batch.lengths_S.astype(np.int64)
    found = []
    for units in (siblings(batch, np.arange(9), 10_000), [Unit(samples=np.arange(9))]):
        (micro,) = plan(lengths, units, Packing(budget=10_000))[0]
        flat = PackedPlan(micro.lengths_K, rows_T=micro.rows_M)
        ids = torch.from_numpy(batch.ids_N[micro.places_R].astype(np.int64))
        inputs = {"input_ids": ids[None], "position_ids": flat.positions_N[None], PLAN: flat}
        loss = np.flatnonzero(batch.mask_N)
        before = loss - 1 if micro.rows_M is None else micro.rows_M[loss - 1]
        logprobs, entropy, _ = TokenLogprobs(split_model(model, inputs), 7, temperature=0.9, entropy_gradient=True)(
            inputs, torch.from_numpy(before), torch.from_numpy(batch.ids_N[loss].astype(np.int64))
        )
        model.zero_grad()
        (logprobs * torch.linspace(-1, 1, len(loss)) + entropy).sum().backward()
        found.append((len(ids), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (rows, shared), (all_rows, apart) = found
    assert rows <= all_rows - 6 * PROMPT
    for name, gradient in shared.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-10, atol=1e-10 * float(apart[name].abs().max()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 9), st.integers(20, 60))
def test_every_token_has_a_row_of_its_own_position_and_prefixes_have_one(lengths, prefix, budget):
    lengths_S = np.array(lengths, np.int64) + prefix
    units = [Unit(samples=np.arange(len(lengths))[::2], prefix=prefix), Unit(samples=np.arange(len(lengths))[1::2])]
    micro = MicroBatch.of([unit for unit in units if len(unit.samples)], lengths_S)
    assert micro.lengths_K.tolist() == lengths_S.tolist()
    rows = np.arange(lengths_S.sum()) if micro.rows_M is None else micro.rows_M
    flat = PackedPlan(micro.lengths_K, rows_T=micro.rows_M)
    assert flat.positions_N[torch.from_numpy(rows)].tolist() == micro.positions_M().tolist()
    assert sorted(set(rows.tolist())) == list(range(len(micro.places_R)))
    assert len(micro.places_R) == lengths_S.sum() - prefix * max(0, len(units[0].samples) - 1)


def test_siblings_share_no_more_than_tokens_experts_and_budget_allow():
    batch = alike()
    everyone = np.arange(9)
    assert [(unit.samples.tolist(), unit.prefix >= PROMPT) for unit in siblings(batch, everyone, 10_000)] == [
        ([0, 1, 2], True),
        ([3, 4, 5], True),
        ([6, 7, 8], True),
    ]
    budget = int(batch.lengths_S.max())
    for unit in siblings(batch, everyone, budget):
        assert unit.num_rows(batch.lengths_S.astype(np.int64)) <= budget
    ids = batch.ids_N.copy()
    ids[batch.lengths_S[0] + 2] += 1 if ids[2] == 0 else -1
    assert siblings(msgspec.structs.replace(batch, ids_N=ids), everyone, 10_000)[0].prefix == 2
    experts = np.zeros((batch.num_tokens, 1, 2), np.uint8) + np.arange(2, dtype=np.uint8)
    experts[batch.lengths_S[0] + 4] = [1, 0]
    routing = Routing(known_T=np.ones(batch.num_tokens, bool), experts_RLK=experts)
    assert siblings(msgspec.structs.replace(batch, routing=routing), everyone, 10_000)[0].prefix == 4
