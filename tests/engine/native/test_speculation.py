"""Speculation: every answer, and all that is recorded of it, is what it would be without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, SequenceFailed
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.speculation import Speculation
from headrace.models import ModelConfig, load_model
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_receiver
from tests.engine.native.alone import Alone, decode
from tests.engine.native.harness import MAX_CONTEXT, ManualClock, Weights, collect, joined, make_engine, request, run
from tests.engine.native.schedules import COMMON, Asked, Life, pooled

Dir = Callable[[str], Path]
PEAKED = 2.2
"""What all weights are multiplied by, so that the likeliest tokens are drawn often, but not always."""
needs_kernels = pytest.mark.skipif(isinstance(kernels(), Unavailable), reason="no kernels here")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is taken, as if further tokens of a pass cost nothing."""
    monkeypatch.setattr("headrace.engine.native.speculation.PASS_COST", 1e9)


def speculation_of(engine: NativeEngine) -> Speculation:
    assert engine._speculation is not None
    return engine._speculation


def damage(engine: NativeEngine, rng: np.random.Generator) -> None:
    """Overwrite the index with what no answer could have left there."""
    history = speculation_of(engine).history
    for array, values in (
        (history._ids_P, rng.integers(-5, 60, 64)),
        (history._chances_P, np.array([0.0, 1.0, np.nan, np.inf, -3.0, 0.9, 0.5], np.float32)),
        (history._places_S, rng.integers(-(2**31), 2**31, 64)),
    ):
        at = rng.random(array.shape) < rng.choice([0.01, 0.5])
        array[at] = rng.choice(values, int(at.sum()))


def bits(tokens: Tokens) -> list[bytes]:
    """Everything that is recorded of them but their versions."""
    kept, routing, entropies = tokens.kept, tokens.routing, tokens.entropies_T
    columns: list[npt.NDArray[np.generic]] = [tokens.ids_T, tokens.logprobs_T]
    columns += [] if kept is None else [kept.ids_E, kept.sizes_T]
    columns += [] if entropies is None else [entropies]
    columns += [] if routing is None else [routing.known_T[:-1], routing.experts_RLK[: int(routing.known_T[:-1].sum())]]
    return [column.tobytes() for column in columns]


@dataclass
class Compared(Life):
    """A life with speculation, whose answers are held against those of an engine without, which has one sequence at a
    time. Requests for the same prompt come with several seeds."""

    twin: NativeEngine | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    known: dict[tuple[tuple[int, ...], int, int], tuple[Tokens, Alone]] = field(default_factory=dict)

    def add(self, which: int, pinned: bool) -> None:
        made = pooled(which, self.next_id, pinned=pinned, routed=self._routed)
        seed = made.sampling.seed + 100 * int(self.rng.integers(3))
        made = msgspec.structs.replace(made, sampling=msgspec.structs.replace(made.sampling, seed=seed))
        given = made.prompt_ids_T.tolist()
        self._add(made, given, len(given))

    def check(self) -> None:
        for request_id, asked in self.asked.items():
            found = self.tokens(request_id)
            if len(found):
                assert bits(found) == bits(self.expected(asked)[0][: len(found)]), (request_id, asked)
        super().check()

    def alone(self, asked: Asked) -> Alone:
        return self.expected(asked)[1]

    def expected(self, asked: Asked) -> tuple[Tokens, Alone]:
        key = tuple(asked.given), asked.num_prompt, asked.request.sampling.seed
        if key not in self.known:
            assert self.twin is not None
            begun, sampling = asked.given[asked.num_prompt :], asked.request.sampling
            again = GenerateRequest(
                request_id=0,
                prompt_ids_T=np.array(asked.given[: asked.num_prompt], np.int32),
                answer_ids_T=np.array(begun, np.int32) if begun else None,
                sampling=msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens + len(begun)),
            )
            chunks = run(self.twin, [again])[0]
            found = joined(chunks)
            whole = request(1, [*asked.given, *found.ids_T[:-1]], max_new_tokens=1, record_routing=self._routed)
            routing = run(self.twin, [whole])[1][0].prompt_routing
            reason = chunks[-1].stop_reason
            assert reason is not None
            alone = Alone(
                ids=found.ids_T.tolist(),
                logprobs=found.logprobs_T.tolist(),
                kept=[] if found.kept is None else [span.tolist() for span in found.kept.spans()],
                experts_TLK=np.zeros((0, 0, 0), np.int64) if routing is None else np.sort(routing.experts_RLK, axis=-1),
                stop_reason=reason,
            )
            self.known[key] = found, alone
        return self.known[key]


def compared(directory: Path, buffer: Path, seed: int) -> Compared:
    """Small in every way, so that sequences are preempted, and drafts find no room."""
    config = ModelConfig(path=str(directory), deterministic=True)
    rng, clock = np.random.default_rng(seed), ManualClock()
    engine = make_engine(
        config,
        clock=clock,
        decode=decode,
        max_sequences=int(rng.integers(3, 7)),
        max_step_tokens=int(rng.integers(8, 60)),
        flush_tokens=int(rng.integers(1, 8)),
        cache_tokens=96,
        stream_steps=int(rng.integers(1, 5)),
        speculation="history",
        draft_tokens=int(rng.integers(1, 20)),
        history_tokens=1024,
    )
    weights = Weights(config, buffer)
    weights.scale(PEAKED)
    weights.send(engine, 0)
    twin = make_engine(config, decode=decode, max_sequences=2)
    weights.stage(twin, 0)
    twin.commit(0)
    return Compared(engine=engine, weights=weights, reference=weights.model, clock=clock, twin=twin, rng=rng)


def many(directory: Path, buffer: Path, seed: int, num_lives: int) -> None:
    """So many random schedules on one engine, before some of which its index is damaged."""
    world = compared(directory, buffer, seed)
    for number in range(num_lives):
        rng = np.random.default_rng([seed, number])
        if rng.random() < 0.2:
            damage(world.engine, rng)
        world.live(rng, int(rng.integers(10, 60)))
        world.check()
    stats = world.engine.stats()
    assert stats.preempted > 0
    assert stats.generated_tokens / 20 < stats.accepted_tokens < stats.drafted_tokens


@needs_kernels
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("kind", "seed"), [("qwen3", 0), ("gemma3_text", 1), ("qwen3_moe", 2)])
def test_random_schedules_change_no_bit(kind: str, seed: int, model_dir: Dir, tmp_path: Path) -> None:
    many(model_dir(kind), tmp_path / "buffer", seed, 20)


@needs_kernels
@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_random_schedules_change_no_bit(seed: int, model_dir: Dir, tmp_path: Path) -> None:
    many(model_dir(("qwen3", "llama", "gemma3_text", "qwen3_moe")[seed % 4]), tmp_path / "buffer", 100 + seed, 50)
