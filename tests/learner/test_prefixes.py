"""What samples begin with is computed once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.types.batch import Batch
from headrace.learner.logits import TokenLogprobs, split_model
from headrace.learner.packing import Packing, Unit, plan
from headrace.learner.tree import PrefixTrees
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PLAN, PackedPlan
from tests.learner.builders import VOCAB_SIZE, Setup, assert_close, gradients, random_batch, tiny
from tests.learner.trees import forest, kept, naive_rows, routed_alike

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


SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
RANK = {"rank": 4}
CASES: dict[str, tuple[dict[str, object], Callable[[Batch], Batch], dict[str, object]]] = {
    "dense": ({}, kept, {}),
    "windows": ({"extra": WINDOWS}, kept, {}),
    "sinks": ({"kind": "gpt_oss", "extra": SINKS}, lambda batch: routed_alike(batch, 2, 4), {}),
    "experts": ({"kind": "qwen3_moe", "extra": EXPERTS}, lambda batch: routed_alike(batch, 2, 4), {}),
    "adapter": ({}, kept, {"lora": RANK}),
}


@pytest.mark.parametrize("budget", [45, 10_000])
@pytest.mark.parametrize("case", CASES)
def test_gradient_of_trees_is_that_of_computing_every_sample_whole(tmp_path, case, budget):
    """Turns, forks, siblings and what is alike by accident, six levels deep."""
    spec, change, settings = CASES[case]
    setup = Setup(model_dir=tiny(tmp_path / "model", **spec), **settings)
    shared, apart = (
        replace(setup, config={"tokens_per_microbatch": budget, "share_prefixes": share}).learner()
        for share in (True, False)
    )
    batch = change(forest())
    rows = sum(len(micro.places_R) for micro in shared._forward.pack(batch, batch.mask_N))
    assert rows < (0.9 if budget == 45 else 0.6) * batch.num_tokens
    np.testing.assert_allclose(shared.logprobs(batch), apart.logprobs(batch), atol=1e-5)
    one, other = shared.forward_backward(batch), apart.forward_backward(batch)
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)
    assert_close(gradients(shared), gradients(apart))


def test_trees_give_the_same_gradient_where_layers_are_computed_again(tmp_path):
    setup, found = Setup(model_dir=tiny(tmp_path / "model")), []
    for recompute in (False, True):
        learner = replace(setup, config={"share_prefixes": True, "memory": {"recompute": recompute}}).learner()
        learner.forward_backward(forest())
        found.append(gradients(learner))
    assert_close(*found)


def test_log_pi_of_trees_has_the_bits_of_whole_samples_in_a_deterministic_model(tmp_path):
    """Gradients have not: torch sums a weight's over the rows of a pass, which are others."""
    setup = Setup(model_dir=tiny(tmp_path / "model"), deterministic=True)
    shared, apart = (replace(setup, config={"share_prefixes": share}).learner() for share in (True, False))
    batch = kept(forest())
    assert shared.logprobs(batch).tobytes() == apart.logprobs(batch).tobytes()
    shared.forward_backward(batch)
    apart.forward_backward(batch)
    assert_close(gradients(shared), gradients(apart))


def test_agents_share_the_tokens_of_their_own_samples_alone(tmp_path):
    """Two agents with adapters of their own, on one forest: each computes its own tree."""
    setup = Setup(model_dir=tiny(tmp_path / "model"), lora={"rank": 4})
    batch = forest()
    agents_N = np.repeat(np.arange(15, dtype=np.int32) % 2, batch.lengths_S)
    batch = msgspec.structs.replace(batch, agents=("", "critic"), agents_N=agents_N)
    learner = setup.learner()
    for agent in (0, 1):
        own_N = batch.mask_N & (agents_N == agent)
        micros = replace(setup, config={"share_prefixes": True}).learner()._forward.pack(batch, own_N)
        assert all((micro.samples_K % 2 == agent).all() for micro in micros)
        assert any(micro.rows_M is not None for micro in micros)
    assert len(learner._forward.pack(batch, batch.mask_N)) == 1


@pytest.mark.parametrize("pairs", [False, True])
def test_groups_that_stay_whole_share_what_is_their_own(tmp_path, pairs):
    learner = Setup(model_dir=tiny(tmp_path / "model"), config={"share_prefixes": True}).learner()
    batch = forest()
    (micro,) = learner._forward.pack(batch, batch.mask_N, pairs=pairs)
    groups = [np.flatnonzero(batch.groups_S == group).tolist() for group in range(3)]
    apart = sum(naive_rows(batch, group) for group in groups)
    assert len(micro.places_R) == (apart if pairs else naive_rows(batch, range(15))) < batch.num_tokens


def test_tokens_are_shared_by_themselves_where_that_saves_a_tenth(tmp_path):
    learner, batch = Setup(model_dir=tiny(tmp_path / "model")).learner(), alike()
    assert any(micro.rows_M is not None for micro in learner._forward.pack(batch, batch.mask_N))
    seconds_S = np.cumsum(batch.lengths_S) - batch.lengths_S + 1
    ids_N = batch.ids_N.copy()
    ids_N[seconds_S] = np.arange(len(seconds_S))  # from the second token on all are different
    hardly = msgspec.structs.replace(batch, ids_N=ids_N)
    assert set(PrefixTrees(hardly).make_unit(np.arange(3)).shared_K.tolist()) == {0, 1}
    assert all(micro.rows_M is None for micro in learner._forward.pack(hardly, hardly.mask_N))


def test_gradient_is_the_same_to_ten_digits_in_float64(tmp_path):
    """In an architecture that does nothing in float32 on the way."""
    directory = tiny(tmp_path / "model", kind="gpt_neox", intermediate_size=48)
    model = load_model(ModelConfig(path=str(directory))).double()
    batch = forest()
    lengths = batch.lengths_S.astype(np.int64)
    found = []
    for units in ([PrefixTrees(batch).make_unit(np.arange(15))], [Unit.apart(np.arange(15))]):
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
    assert rows == naive_rows(batch, range(15)) < 0.6 * all_rows
    for name, gradient in shared.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-10, atol=1e-10 * float(apart[name].abs().max()))
