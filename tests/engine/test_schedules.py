"""Whatever joins, leaves, forks, is preempted or committed, and whenever: a request gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.models import ModelConfig
from tests.engine.harness import Weights, make_engine
from tests.engine.schedules import Life
from tests.models.kinds import plain


def life(directory: Path, buffer: Path, seed: int) -> Life:
    """Small in every way: rows, tokens of a step, and a cache in which four sequences do not fit."""
    config = ModelConfig(path=str(directory))
    rng = np.random.default_rng(seed)
    engine = make_engine(
        config,
        max_sequences=int(rng.integers(3, 7)),
        max_step_tokens=int(rng.integers(6, 40)),
        flush_tokens=int(rng.integers(1, 8)),
        cache_tokens=96,
        stream_steps=int(rng.integers(1, 5)),
    )
    weights = Weights(config, buffer)
    weights.send(engine, 0)
    return Life(engine=engine, weights=weights, reference=plain(directory))


def many(directory: Path, buffer: Path, seed: int, num_lives: int) -> int:
    """So many random schedules on one engine; how often a sequence was preempted."""
    world = life(directory, buffer, seed)
    for number in range(num_lives):
        rng = np.random.default_rng([seed, number])
        world.live(rng, int(rng.integers(10, 60)))
        world.check()
    return world.engine.stats().preempted


@pytest.mark.parametrize(("kind", "seed"), [("qwen3", 0), ("gemma3_text", 1), ("qwen3", 2)])
def test_random_schedules_change_no_token(
    kind: str, seed: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    assert many(model_dir(kind), tmp_path / "buffer", seed, 12) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_random_schedules_change_no_token(
    seed: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    assert many(model_dir(("qwen3", "llama", "gemma3_text")[seed % 3]), tmp_path / "buffer", 100 + seed, 50) > 0
