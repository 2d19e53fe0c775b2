"""Whatever joins, leaves, forks, is preempted or committed, and whenever: a request gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.versions import mixed_version, oldest
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.alone import decode, sample_alone
from tests.engine.native.harness import ManualClock, Weights, collect, joined, make_engine, request
from tests.engine.native.schedules import POOL, Life, pooled
from tests.models.kinds import plain


def life(directory: Path, buffer: Path, seed: int) -> Life:
    """Small in every way: rows, tokens of a step, and a cache in which four sequences do not fit."""
    config = ModelConfig(path=str(directory))
    rng, clock = np.random.default_rng(seed), ManualClock()
    engine = make_engine(
        config,
        clock=clock,
        decode=decode,
        max_sequences=int(rng.integers(3, 7)),
        max_step_tokens=int(rng.integers(6, 40)),
        flush_tokens=int(rng.integers(1, 8)),
        cache_tokens=96,
        stream_steps=int(rng.integers(1, 5)),
    )
    weights = Weights(config, buffer)
    weights.send(engine, 0)
    return Life(engine=engine, weights=weights, reference=plain(directory), clock=clock)


def many(directory: Path, buffer: Path, seed: int, num_lives: int) -> None:
    """So many random schedules on one engine, in which everything that can happen to a sequence has happened."""
    world = life(directory, buffer, seed)
    for number in range(num_lives):
        rng = np.random.default_rng([seed, number])
        world.live(rng, int(rng.integers(10, 60)))
        world.check()
    assert world.engine.stats().preempted > 0
    assert set(world.ends) == {StopReason.STOP, StopReason.LENGTH, StopReason.ABORTED, StopReason.DEADLINE}
    assert len(set(world.modes)) >= len(Interrupt) - 1


@pytest.mark.parametrize(("kind", "seed"), [("qwen3", 0), ("gemma3_text", 1), ("qwen3_moe", 2)])
def test_random_schedules_change_no_token(
    kind: str, seed: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    many(model_dir(kind), tmp_path / "buffer", seed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_random_schedules_change_no_token(
    seed: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    many(model_dir(("qwen3", "llama", "gemma3_text", "qwen3_moe")[seed % 4]), tmp_path / "buffer", 100 + seed, 50)


@dataclass
class Versions:
    """An engine whose every version has weights of its own, and a model of each."""

    engine: NativeEngine
    weights: Weights
    models: list[torch.nn.Module]
    pending: bool = False
    given: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each request its place in the pool and the version it came under; −1 while weights were exchanged."""
    chunks: dict[int, list[TokenChunk]] = field(default_factory=dict)

    def commit(self, mode: Interrupt, directory: Path) -> None:
        if self.pending:
            return
        self.weights.scale(1.15 if len(self.models) % 2 else 1 / 1.15)
        made = plain(directory)
        made.load_state_dict(self.weights.model.state_dict())
        self.models.append(made)
        self.weights.stage(self.engine, len(self.models) - 1)
        self.pending = True
        self.engine.commit(len(self.models) - 1, mode)
        self.keep([])

    def add(self, which: int) -> None:
        number = len(self.given)
        self.engine.add(pooled(which, number))
        self.given[number] = which, -1 if self.pending else len(self.models) - 1

    def keep(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)
        self.pending = self.pending and not self.engine.take_swaps()

    def live(self, mode: Interrupt, directory: Path, rng: np.random.Generator) -> None:
        for _ in range(40):
            action = rng.choice(["add", "add", "step", "step", "commit"])
            if action == "add":
                self.add(int(rng.integers(POOL)))
            elif action == "commit":
                self.commit(mode, directory)
            for _ in range(rng.integers(0, 5)):
                self.keep(self.engine.step())
        while self.engine.has_work():
            self.keep(self.engine.step())

    def check(self, mode: Interrupt) -> int:
        """How many tokens were held against those of the weights that their stamps name."""
        compared = 0
        for number, (which, came) in self.given.items():
            tokens = joined(self.chunks[number])
            stamps = tokens.versions_T.tolist()
            assert np.all(np.diff(oldest(tokens.versions_T)) >= 0)
            first = stamps[0]
            if mode is Interrupt.STREAM:
                if first != came:  # weights changed under its prompt
                    continue
            else:
                assert set(stamps) == {first}
                assert first >= came
            same = stamps.count(first)
            asked = pooled(which)
            given = asked.prompt_ids_T.tolist()
            expected = sample_alone(self.models[first], asked.sampling, given, len(given)).ids
            assert tokens.ids_T.tolist()[:same] == expected[:same]
            assert len(stamps) == len(expected) or same < len(stamps)
            compared += same
        return compared


@pytest.mark.parametrize("mode", [Interrupt.DRAIN, Interrupt.BATCH, Interrupt.STREAM])
def test_tokens_are_those_of_the_weights_whose_version_they_carry(
    mode: Interrupt, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = model_dir("qwen3")
    made = life(directory, tmp_path / "buffer", 3)
    world = Versions(engine=made.engine, weights=made.weights, models=[made.reference])
    world.live(mode, directory, np.random.default_rng(7))
    assert len(world.models) > 4
    assert world.check(mode) > 30


def test_a_token_of_a_mix_is_that_of_the_very_mix_that_its_step_saw(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = model_dir("qwen3")
    config = ModelConfig(path=str(directory))
    engine, weights = make_engine(config, stream_steps=4), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    passes: list[dict[str, torch.Tensor]] = []
    engine._model.register_forward_pre_hook(
        lambda model, _: passes.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    )
    engine.add(request(0, [5, 6, 7], max_new_tokens=12, temperature=0.0))
    for _ in range(4):
        engine.step()
    weights.scale(1.3)
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.STREAM)
    tokens = joined(collect(engine.step, engine.has_work)[0])
    assert set(tokens.versions_T) == {0, mixed_version(0), 1}
    reference, cache, fed, expected = plain(directory), DynamicCache(), [5, 6, 7], []
    with torch.inference_mode():
        for state in passes:
            reference.load_state_dict(state)
            output = reference(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
            fed = [int(output.logits[0, -1].argmax())]
            expected += fed
    assert tokens.ids_T.tolist() == expected
