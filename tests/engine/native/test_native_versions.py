"""A token carries the version whose weights computed it, and a commit stops nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from headrace.base.errors import WeightsError
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, joined, make_engine, request, run
from tests.models.kinds import plain

Pair = tuple[NativeEngine, Weights]


@pytest.fixture
def pair(model_dir: Callable[[str], Path], tmp_path: Path) -> Pair:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, max_sequences=4), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    return engine, weights


@torch.inference_mode()
def greedy_with_swap(models: list[torch.nn.Module], prompt: list[int], counts: list[int]) -> list[int]:
    """Greedy tokens of transformers, ``counts[i]`` of them by ``models[i]``, over one cache that is kept."""
    cache, fed, sampled = DynamicCache(), prompt, []
    for model, count in zip(models, counts, strict=True):
        for _ in range(count):
            output = model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
            fed = [int(output.logits[0, -1].argmax())]
            sampled += fed
    return sampled


def test_running_sequences_go_on_under_the_new_weights_with_their_cache(
    pair: Pair, model_dir: Callable[[str], Path]
) -> None:
    engine, weights = pair
    prompts = {0: [3, 4, 5], 1: [9]}
    for number, prompt in prompts.items():
        engine.add(request(number, prompt, max_new_tokens=20, temperature=0.0))
    for _ in range(8):
        engine.step()
    weights.scale(1.2)
    weights.stage(engine, 1)
    engine.commit(1)
    (report,) = engine.take_swaps()
    assert (report.version, report.carried_over, report.restarted) == (1, 2, 0)
    assert 0 <= report.gap_s < 0.5
    engine.add(request(2, [3, 4, 5], max_new_tokens=20, temperature=0.0))
    results = run(engine)

    old, new = plain(model_dir("qwen3")), plain(model_dir("qwen3"))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.2)
    for number, prompt in prompts.items():
        tokens = joined(results[number])
        assert tokens.versions_T.tolist() == [0] * 8 + [1] * 12
        assert tokens.ids_T.tolist() == greedy_with_swap([old, new], prompt, [8, 12])
    assert joined(results[2]).versions_T.tolist() == [1] * 20
    assert joined(results[2]).ids_T.tolist() == greedy_with_swap([new], prompts[0], [20])


def test_staging_alone_changes_nothing(pair: Pair) -> None:
    engine, weights = pair
    before = joined(run(engine, [request(0, [3, 4], max_new_tokens=15)])[0])
    weights.scale(1.5)
    weights.stage(engine, 1)
    after = joined(run(engine, [request(1, [3, 4], max_new_tokens=15)])[1])
    assert np.array_equal(before.logprobs_T, after.logprobs_T)
    assert set(after.versions_T) == {0}
    engine.commit(1)
    committed = joined(run(engine, [request(2, [3, 4], max_new_tokens=15)])[2])
    assert not np.array_equal(before.logprobs_T, committed.logprobs_T)


def test_engine_uses_the_weights_it_was_sent_not_those_it_was_built_with(pair: Pair, tmp_path: Path) -> None:
    engine, weights = pair
    weights.scale(0.7)
    weights.send(engine, 1)
    weights.model.save_pretrained(tmp_path / "saved")
    sent = plain(tmp_path / "saved")
    tokens = joined(run(engine, [request(0, [3, 4], max_new_tokens=15, temperature=0.0)])[0])
    assert tokens.ids_T.tolist() == greedy_with_swap([sent], [3, 4], [15])


def test_refused_commit_leaves_version_and_weights_as_they_were(pair: Pair) -> None:
    engine, _ = pair
    with pytest.raises(WeightsError, match="commit of version 5"):
        engine.commit(5)
    tokens = joined(run(engine, [request(0, [3, 4], max_new_tokens=3)])[0])
    assert tokens.versions_T.tolist() == [0, 0, 0]
    assert engine.stats().version == 0
