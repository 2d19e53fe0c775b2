"""Speculation: every answer, and all that is recorded of it, is what it would be without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt
from headrace.engine import EngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.speculation import Speculation
from headrace.models import ModelConfig, load_model
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import kernels
from headrace.models.paged import IMPLEMENTATIONS
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.transports import make_receiver
from tests.engine.native.alone import Alone, decode
from tests.engine.native.harness import MAX_CONTEXT, ManualClock, Weights, joined, make_engine, request, run
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


def compared(
    directory: Path, buffer: Path, seed: int, speculation: str = "history", peaked: float = PEAKED
) -> Compared:
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
        speculation=speculation,
        draft_tokens=int(rng.integers(1, 20)),
        history_tokens=1024,
    )
    weights = Weights(config, buffer)
    weights.scale(peaked)
    weights.send(engine, 0)
    twin = make_engine(config, decode=decode, max_sequences=2)
    weights.stage(twin, 0)
    twin.commit(0)
    return Compared(engine=engine, weights=weights, reference=weights.model, clock=clock, twin=twin, rng=rng)


def many(directory: Path, buffer: Path, seed: int, num_lives: int, **settings: Any) -> None:
    """So many random schedules on one engine, before some of which its index is damaged."""
    world = compared(directory, buffer, seed, **settings)
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
    many(model_dir(kind), tmp_path / "buffer", seed, 5)


@needs_kernels
@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_random_schedules_change_no_bit(seed: int, model_dir: Dir, tmp_path: Path) -> None:
    many(model_dir(("qwen3", "llama", "gemma3_text", "qwen3_moe")[seed % 4]), tmp_path / "buffer", 100 + seed, 50)


def fed(directory: Path, buffer: Path, *, speculation: str, **settings: object) -> tuple[NativeEngine, Weights]:
    config = ModelConfig(path=str(directory), deterministic=True)
    engine, weights = make_engine(config, speculation=speculation, **settings), Weights(config, buffer)
    weights.scale(PEAKED)
    weights.send(engine, 0)
    return engine, weights


def visit(engine: NativeEngine, requests: Iterable[GenerateRequest]) -> dict[int, Tokens]:
    return {number: joined(chunks) for number, chunks in run(engine, requests).items()}


@needs_kernels
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT, Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME])
def test_tokens_around_a_commit_are_those_of_a_sequence_alone_that_is_committed_to_at_the_same_token(
    mode: Interrupt, model_dir: Dir, tmp_path: Path
) -> None:
    directory = model_dir("qwen3")
    engine, weights = fed(directory, tmp_path / "b", speculation="history", draft_tokens=5)
    prompts = [COMMON[:9], COMMON[3:15], COMMON[5:8]]
    first = [request(n, prompt, max_new_tokens=40, temperature=0.5, seed=n) for n, prompt in enumerate(prompts)]
    second = [
        request(10 + n, prompt, max_new_tokens=40, temperature=0.5, seed=50 + n) for n, prompt in enumerate(prompts)
    ]
    visit(engine, first)
    for one in second:
        engine.add(one)
    chunks = [chunk for _ in range(7) for chunk in engine.step()]
    weights.scale(1.1)
    weights.stage(engine, 1)
    engine.commit(1, mode)
    while engine.has_work():
        chunks += engine.step()
    assert engine.stats().accepted_tokens > 10
    for one in second:
        found = joined([chunk for chunk in chunks if chunk.request_id == one.request_id])
        num_old = int((found.versions_T == 0).sum())
        assert 0 < num_old < 40
        alone, again = fed(directory, tmp_path / f"b{one.request_id}", speculation="off", max_sequences=1)
        again.scale(1.1)
        alone.add(one)
        parts: list[TokenChunk] = []
        while alone.stats().generated_tokens < num_old:
            parts += alone.step()
        again.stage(alone, 1)
        alone.commit(1, mode)
        while alone.has_work():
            parts += alone.step()
        expected = joined(parts)
        assert bits(found) == bits(expected)
        assert found.versions_T.tolist() == expected.versions_T.tolist()


@needs_kernels
@pytest.mark.usefixtures("eager")
def test_a_draft_that_is_longer_than_the_context_ends_with_it(model_dir: Dir, tmp_path: Path) -> None:
    prompt = [*COMMON, *COMMON, *COMMON, *COMMON][: MAX_CONTEXT - 16]
    asked = [
        request(n, prompt, max_new_tokens=16, temperature=temperature, seed=seed)
        for n, (temperature, seed) in enumerate([(0.0, 0), (0.0, 1), (0.5, 2), (0.5, 3), (0.5, 3)])
    ]
    found = []
    for speculation in ("off", "history"):
        buffer = tmp_path / speculation
        engine, _ = fed(model_dir("qwen3"), buffer, speculation=speculation, draft_tokens=64, cache_tokens=MAX_CONTEXT)
        found.append([bits(visit(engine, [one])[one.request_id]) for one in asked])
    assert found[0] == found[1]
    assert engine.stats().accepted_tokens > 20


class Alternating:
    """A structure in which ids are even and odd in turn."""

    def __init__(self) -> None:
        self._parity = 0

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.arange(40) % 2 == self._parity

    def accept(self, token: int) -> None:
        assert token % 2 == self._parity
        self._parity = 1 - self._parity


@needs_kernels
@pytest.mark.usefixtures("eager")
def test_structures_penalties_and_likeliest_entries_follow_drafted_tokens(model_dir: Dir, tmp_path: Path) -> None:
    kinds: list[dict[str, object]] = [
        {"structure": "alternating", "record_kept": True},
        {"structure": "alternating", "temperature": 0.0, "record_kept": True},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "record_top": 3},
        {"record_top": 5, "top_p": 0.9, "record_kept": True},
    ]
    found = []
    for speculation in ("off", "history"):
        config = ModelConfig(path=str(model_dir("qwen3")), deterministic=True)
        model, weights = load_model(config), Weights(config, tmp_path / speculation)
        engine = NativeEngine(
            model, EngineConfig(speculation=speculation, draft_tokens=6), max_context=MAX_CONTEXT,
            receiver=make_receiver(Route(), weight_tensors(model)), clock=RealClock(), decode=decode,
            masks=lambda description: Alternating(),
        )  # fmt: skip
        weights.scale(PEAKED)
        weights.send(engine, 0)
        for turn in range(3):
            asked = [
                request(
                    100 * turn + n, COMMON[:7], max_new_tokens=30, **{"temperature": 0.5, **kind, "seed": n + turn // 2}
                )
                for n, kind in enumerate(kinds)
            ]
            chunks = run(engine, asked)
            for number, parts in chunks.items():
                top = [part.top for part in parts if part.top is not None]
                entries = [column.tobytes() for one in top for column in (one.ids_TK, one.logs_TK, one.logprobs_T)]
                found.append((number, bits(joined(parts)), b"".join(entries)))
    half = len(found) // 2
    assert sorted(found[:half]) == sorted(found[half:])
    stats = engine.stats()
    assert stats.generated_tokens / 4 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("attention", ["compiled", "reference"])
def test_a_drafted_token_whose_numbers_are_not_finite_spoils_nothing(
    attention: str, model_dir: Dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention == "reference":  # which reads blocks whole, with weights of zero
        monkeypatch.delitem(IMPLEMENTATIONS, "compiled")
    config = ModelConfig(path=str(model_dir("qwen3")))
    weights, bad = Weights(config, tmp_path / "b"), 17
    with torch.no_grad():
        weights.model.get_input_embeddings().weight[bad] = torch.nan
    engine = make_engine(config, speculation="history", draft_tokens=6)
    weights.send(engine, 0)
    asked = [request(n, COMMON[:5], max_new_tokens=30, temperature=0.0, logit_bias={bad: -100.0}) for n in (0, 1)]
    (expected,) = visit(engine, asked[:1]).values()
    ids_P = speculation_of(engine).history._ids_P
    ids_P[: 8 + 30][10::3] = bad
    before = engine.stats()
    (found,) = visit(engine, asked[1:]).values()
    after = engine.stats()
    assert found.ids_T.tolist() == expected.ids_T.tolist()
    assert (after.drafted_tokens, after.accepted_tokens) == (6, 0)
    assert after.steps - before.steps == 31  # a pass that gave nothing, and no draft any more


def test_sequences_whose_own_numbers_are_not_finite_fail_with_drafts_as_without(model_dir: Dir, tmp_path: Path) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    ends = []
    for speculation in ("off", "history"):
        engine, weights = make_engine(config, speculation=speculation), Weights(config, tmp_path / speculation)
        weights.send(engine, 0)
        asked = [request(n, COMMON[:5], max_new_tokens=30, temperature=0.0) for n in range(3)]
        whole = visit(engine, asked[:1])[0].ids_T.tolist()
        rare = next(token for token in whole[5:] if token not in [*COMMON[:5], *whole[:5]])
        with torch.no_grad():
            weights.model.get_input_embeddings().weight[rare] = torch.nan
        weights.send(engine, 1)
        for one in asked[1:]:
            chunks = run(engine, [one])[one.request_id]
            ends.append((Tokens.concat([chunk.tokens for chunk in chunks]).ids_T.tolist(), chunks[-1].error))
    assert ends[0] == ends[2]
    assert ends[1] == ends[3]
    assert ends[0][1]


@needs_kernels
def test_an_answer_that_repeats_an_earlier_one_takes_fewer_passes_and_leaves_the_same_blocks(
    model_dir: Dir, tmp_path: Path
) -> None:
    engine, _ = fed(model_dir("qwen3"), tmp_path / "b", speculation="history")
    asked = [request(n, COMMON[:7], max_new_tokens=60, temperature=0.0) for n in (0, 1)]
    first = visit(engine, asked[:1])[0]
    before = engine.stats()
    second = visit(engine, asked[1:])[1]
    after = engine.stats()
    assert bits(second) == bits(first)
    accepted = after.accepted_tokens - before.accepted_tokens
    assert after.steps - before.steps == 60 - accepted
    assert accepted >= 40
    continued = request(2, [*COMMON[:7], *second.ids_T[:50]], max_new_tokens=1)
    visit(engine, [continued])
    assert engine.stats().cached_tokens - after.cached_tokens == 48
    assert engine.facts()["history_bytes"] > 10**6


def test_models_and_servers_that_cannot_speculate_are_refused_by_name(model_dir: Dir) -> None:
    with pytest.raises(ConfigError, match=r"engine\.speculation='history': layers \[0.*carry a state"):
        make_engine(ModelConfig(path=str(model_dir("qwen3_5_text"))), speculation="history")
    with pytest.raises(ValueError, match=r"engine\.speculation='history' is of engine\.kind='native'"):
        EngineConfig(kind="vllm", speculation="history")
