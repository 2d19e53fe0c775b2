"""A learner computes the same with flex attention as in padded rows, and says before it starts what it cannot do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.footprint import LearnerSizes, levers
from headrace.learner.memory import compute_sizes
from headrace.learner.parallel import context
from headrace.learner.parallel.context import ContextPlan, Pieces
from headrace.models import ModelConfig, load_model
from headrace.models.attention import PackedPlan, Rule
from headrace.models.packed import PADDED
from headrace.models.packed.flex import written_out
from headrace.models.packed.kinds import AttentionKind
from tests.learner.builders import Setup, assert_close, gradients, random_batch
from tests.learner.trees import forest
from tests.models.kinds import tiny

NAMES = ("gpt_oss", "gemma2", "gemma3_text", "qwen3", "mistral", "llama4_text")
"""Sinks and windows; soft caps and windows; windows in some layers; none of them; windows in all; chunks."""


@pytest.mark.parametrize("name", NAMES)
def test_flex_attention_gives_the_gradients_of_padded_rows(name: str, tmp_path: Path) -> None:
    setup = Setup(model_dir=tiny(tmp_path / name, name), config={"tokens_per_microbatch": 60})
    for batch, share in ((random_batch(), False), (forest(), True)):
        padded, flex = (
            replace(setup, config={**setup.config, "attention": attention, "share_prefixes": share}).learner()
            for attention in ("padded", "flex")
        )
        assert flex._forward.attention.name == "flex"
        np.testing.assert_allclose(flex.logprobs(batch), padded.logprobs(batch), atol=1e-5)
        for learner in (padded, flex):
            learner.forward_backward(batch)
        assert_close(gradients(flex), gradients(padded))


def test_recomputed_and_offloaded_layers_give_the_same_gradient(tmp_path: Path) -> None:
    setup = Setup(model_dir=tiny(tmp_path / "model", "gpt_oss"), config={"attention": "flex"})
    expected = setup.learner()
    expected.forward_backward(random_batch())
    for setting in ("recompute", "offload_activations"):
        learner = replace(setup, config={"attention": "flex", "memory": {setting: True}}).learner()
        learner.forward_backward(random_batch())
        assert_close(gradients(learner), gradients(expected))


def test_a_critic_attends_as_the_policy_does(tmp_path: Path) -> None:
    algo = {"bundle": "grpo", "advantage": {"kind": "gae", "gamma": 1.0, "lam": 0.9}}
    setup = Setup(model_dir=tiny(tmp_path / "model", "gemma2"), algo=algo)
    padded, flex = (replace(setup, config={"attention": each}).learner() for each in ("padded", "flex"))
    assert flex._auxiliary[0]._attention.name == "flex"
    one, other = (learner.train(random_batch()).metrics for learner in (padded, flex))
    assert one["value_loss"] == pytest.approx(other["value_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [{}, {"window": 5}, {"chunk": 4}, {"softcap": 2.0, "window": 9}, {"sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0])}],
    ids=str,
)
def test_ranks_of_one_context_attend_to_the_keys_of_all(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array([7, 1, 12, 3])
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(23, heads, 8, generator=rng, dtype=torch.float64) for heads in (4, 2, 2))
    rule = Rule(layer=0, scale=0.6, **given)
    expected = PackedPlan(lengths).attend(query, key, value, rule)
    for rank in range(3):
        monkeypatch.setattr(context.dist, "get_rank", lambda group, own=rank: own)
        pieces = Pieces(23, 3)
        plan = ContextPlan(lengths, pieces, None, torch.device("cpu"), written_out)  # type: ignore[arg-type]
        mine = pieces.get_indices(rank)
        mine_N = np.concatenate([mine, np.zeros(pieces.per_rank - len(mine), np.int64)])
        gathered = iter([key, value])
        monkeypatch.setattr(plan, "_gather", lambda part, whole=gathered: next(whole))
        found = plan.attend(query[mine_N], key[mine_N], value[mine_N], rule)
        torch.testing.assert_close(found[: len(mine)], expected[mine], atol=1e-6, rtol=0)
        assert not found[len(mine) :].any()


def test_flex_attention_of_a_deterministic_model_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.attention='flex' with model.deterministic"):
        Setup(model_dir=model_dir, deterministic=True, config={"attention": "flex"}).learner()
    assert Setup(model_dir=model_dir, deterministic=True).learner()._forward.attention.name == "deterministic"


def test_a_model_with_an_indexer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be computed on cpu: an indexer chooses the tokens"):
        Setup(model_dir=tiny(tmp_path / "model", "deepseek_v32"), config={"attention": "flex"}).learner()


def test_what_writes_the_scores_out_is_said(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "headrace")
    for attention, said in (("auto", []), ("padded", []), ("flex", ["attention is flex: the scores are written out"])):
        caplog.clear()
        Setup(model_dir=model_dir, config={"attention": attention}).learner()
        # threads that other tests have left behind may log beside it
        ours = [record for record in caplog.records if record.name.startswith("headrace")]
        assert [record.getMessage()[:45] for record in ours] == said


def sizes_with(model_dir: Path, change: Callable[[AttentionKind], AttentionKind], **config: Any) -> LearnerSizes:
    kind = AttentionKind(
        heads=4, kv_heads=2, key_size=16, value_size=16, dtype=torch.bfloat16, scale=0.25, window=None, chunk=None,
        softcap=None, has_sinks=False, indexed=False,
    )  # fmt: skip
    attention = replace(PADDED, layers=(change(kind), change(kind)))
    settings = LearnerConfig.model_validate({"tokens_per_microbatch": 1000, "share_prefixes": False, **config})
    return replace(compute_sizes(load_model(ModelConfig(path=str(model_dir))), settings, attention), on_host=False)


def test_scores_are_part_of_what_settings_free(model_dir: Path) -> None:
    def with_sinks(kind: AttentionKind) -> AttentionKind:
        return replace(kind, has_sinks=True)

    flex = "learner.attention = 'flex'"
    plain = sizes_with(model_dir, lambda kind: kind, attention="padded")
    sinks = sizes_with(model_dir, with_sinks, attention="padded")
    heads = sinks.shape.heads
    assert (plain.score_bytes(), sinks.score_bytes()) == (0, 2 * heads * 4 * 1000**2)
    one_layer = sinks.score_bytes(1)  # kept by both layers, and once more in the backward pass of a layer
    # without scores, the peak is at another moment of the step, in which a little more is held than beside the scores
    apart = sinks.footprint().total_bytes - plain.footprint().total_bytes
    assert levers(sinks)[flex] == pytest.approx(apart, rel=0.001)
    assert 2.9 * one_layer < apart <= 3 * one_layer
    tokens = "learner.tokens_per_microbatch = 500 (every sample must fit)"
    assert levers(sinks)[tokens] == pytest.approx(levers(plain)[tokens] + 3 / 4 * 3 * one_layer, rel=0.02)
    assert flex not in levers(plain)
    assert flex not in levers(sizes_with(model_dir, with_sinks))  # auto has failed
    recomputing, plain = (
        sizes_with(model_dir, change, attention="padded", memory={"recompute": True})
        for change in (with_sinks, lambda kind: kind)
    )
    apart = recomputing.footprint().total_bytes - plain.footprint().total_bytes
    assert levers(recomputing)[flex] == pytest.approx(apart, rel=0.001)
    assert 1.9 * one_layer < apart <= 2 * one_layer
