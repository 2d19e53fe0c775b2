"""What becomes of running sequences, and of their versions, in every mode of a commit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.errors import WeightsError
from headrace.base.types.episode import TokenChunk
from headrace.base.types.versions import mixed_version
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, joined, make_engine, request, run
from tests.models.kinds import plain

Pair = tuple[NativeEngine, Weights]
PROMPT = [3, 4, 5, 6]


@pytest.fixture
def pair(model_dir: Callable[[str], Path], tmp_path: Path) -> Pair:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine = make_engine(config, max_sequences=4, stream_steps=3)
    weights = Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    return engine, weights


@torch.inference_mode()
def greedy(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    """The most likely tokens, each by a whole pass: nothing cached."""
    sampled: list[int] = []
    for _ in range(count):
        sampled.append(int(model(input_ids=torch.tensor([ids + sampled]), use_cache=False).logits[0, -1].argmax()))
    return sampled


def models(directory: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    old, new = plain(directory), plain(directory)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.2)
    return old, new


def begin(pair: Pair, steps: int = 8, **settings: object) -> list[TokenChunk]:
    """One greedy sequence of 20 tokens, ``steps`` of them sampled; then version 1 is staged."""
    engine, weights = pair
    engine.add(request(0, PROMPT, max_new_tokens=20, temperature=0.0, **settings))
    chunks = [chunk for _ in range(steps) for chunk in engine.step()]
    weights.scale(1.2)
    weights.stage(engine, 1)
    return chunks


@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT_RECOMPUTE, Interrupt.ABORT_RESUME, Interrupt.SLEEP])
def test_sequences_go_on_from_their_tokens_under_a_context_of_the_new_weights(
    mode: Interrupt, pair: Pair, model_dir: Callable[[str], Path]
) -> None:
    begin(pair)
    if mode is Interrupt.SLEEP:
        pair[0].pause(release=True)
    pair[0].commit(1, mode)
    (report,) = pair[0].take_swaps()
    assert (report.version, report.mode, report.carried_over, report.restarted) == (1, mode, 1, 0)
    assert report.recomputed_tokens == (0 if mode is Interrupt.SLEEP else 11)
    tokens = joined(run(pair[0])[0])
    old, new = models(model_dir("qwen3"))
    first = greedy(old, PROMPT, 8)
    assert tokens.ids_T.tolist() == first + greedy(new, PROMPT + first, 12)
    assert tokens.versions_T.tolist() == [0] * 8 + [1] * 12


def test_retried_sequences_lose_their_tokens_and_say_so(pair: Pair, model_dir: Callable[[str], Path]) -> None:
    engine = pair[0]
    begin(pair)
    engine.commit(1, Interrupt.ABORT_RETRY)
    (report,) = engine.take_swaps()
    assert (report.carried_over, report.restarted, report.wasted_tokens) == (0, 1, 8)
    chunks = run(engine)[0]
    assert not chunks[0].lost, "its reader had no token of it yet"
    assert joined(chunks).ids_T.tolist() == greedy(models(model_dir("qwen3"))[1], PROMPT, 20)
    assert set(joined(chunks).versions_T) == {1}
    assert (engine.stats().restarted, engine.stats().wasted_tokens) == (1, 8)


def test_a_reader_that_has_tokens_of_a_retried_sequence_is_told_to_forget_them(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, flush_tokens=3), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    before = begin((engine, weights))
    assert sum(len(chunk.tokens.ids_T) for chunk in before) == 6
    engine.commit(1, Interrupt.ABORT_RETRY)
    chunks = run(engine)[0]
    assert [bool(chunk.lost) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert len(joined(chunks)) == 20


def test_draining_finishes_what_runs_and_starts_nothing(pair: Pair) -> None:
    engine = pair[0]
    begin(pair)
    engine.add(request(1, PROMPT, max_new_tokens=3))
    engine.step()
    engine.add(request(2, PROMPT, max_new_tokens=3))
    engine.commit(1, Interrupt.DRAIN)
    assert engine.take_swaps() == []
    results = run(engine)
    (report,) = engine.take_swaps()
    assert (report.mode, report.carried_over, report.wasted_tokens) == (Interrupt.DRAIN, 0, 0)
    assert report.waited_s > report.gap_s
    assert {number: set(joined(chunks).versions_T) for number, chunks in results.items()} == {0: {0}, 1: {0}, 2: {1}}


def test_a_batch_barrier_lets_those_finish_that_waited_before_it(pair: Pair) -> None:
    engine = pair[0]
    begin(pair)
    for number in range(1, 6):
        engine.add(request(number, PROMPT, max_new_tokens=3))
    engine.commit(1, Interrupt.BATCH)
    engine.add(request(6, PROMPT, max_new_tokens=3))
    results = run(engine)
    versions = {number: set(joined(chunks).versions_T) for number, chunks in results.items()}
    assert versions == {**{number: {0} for number in range(6)}, 6: {1}}


def test_streaming_spreads_the_exchange_over_steps_and_marks_their_tokens(pair: Pair) -> None:
    engine = pair[0]
    begin(pair)
    engine.commit(1, Interrupt.STREAM)
    assert engine.take_swaps() == []
    tokens = joined(run(engine)[0])
    assert tokens.versions_T.tolist() == [0] * 8 + [mixed_version(0)] * 2 + [1] * 10
    (report,) = engine.take_swaps()
    assert (report.mode, report.version, report.carried_over) == (Interrupt.STREAM, 1, 1)
    assert engine.stats().version == 1


@pytest.mark.parametrize("mode", list(Interrupt))
def test_a_commit_to_an_idle_engine_is_done_at_once(mode: Interrupt, pair: Pair) -> None:
    pair[1].stage(pair[0], 1)
    pair[0].commit(1, mode)
    (report,) = pair[0].take_swaps()
    assert (report.version, report.mode, pair[0].stats().version) == (1, mode, 1)


def test_a_second_commit_is_refused_while_one_is_pending(pair: Pair) -> None:
    engine, weights = pair
    begin(pair)
    engine.commit(1, Interrupt.DRAIN)
    with pytest.raises(WeightsError, match="has not ended"):
        engine.commit(2)
    run(engine)
    weights.stage(engine, 2)
    engine.commit(2)
    assert [report.version for report in engine.take_swaps()] == [1, 2]


def test_a_paused_engine_stands_still_and_a_released_one_has_no_cache(pair: Pair) -> None:
    engine = pair[0]
    before = run(engine, [request(9, PROMPT, max_new_tokens=12, seed=5)])[9]
    engine.add(request(1, PROMPT, max_new_tokens=12, seed=5))
    for _ in range(4):
        engine.step()
    engine.pause(release=True)
    assert not engine.has_work()
    assert engine.step() == []
    assert engine._cache.layers == []
    engine.resume()
    assert joined(run(engine)[1]).ids_T.tolist() == joined(before).ids_T.tolist()


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python it takes."""
    count, before = 0, sys.gettrace()

    def trace(_frame: object, event: str, _argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT, Interrupt.INFLIGHT_RECOMPUTE, Interrupt.STREAM])
def test_the_gap_of_a_commit_is_no_longer_where_more_wait_and_more_is_cached(
    mode: Interrupt, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, max_sequences=2, cache_tokens=8192), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    found = []
    for version, (cached, waiting) in enumerate(((2, 3), (30, 500)), start=1):
        base = 10_000 * version
        for number in range(cached):
            run(engine, [request(base + number, [3 + number] * 40, max_new_tokens=2)])
        for number in range(waiting):
            engine.add(request(base + 100 + number, PROMPT, max_new_tokens=20))
        engine.step()
        assert engine._pool.cached == 2 * cached
        weights.stage(engine, version)
        found.append(lines_of(lambda version=version: engine.commit(version, mode)))
        engine.abort(range(base, base + 1000))
        engine.take_swaps()
    assert found[0] == found[1]


@pytest.mark.parametrize("commits", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_commits_under_load_lose_and_repeat_no_token(
    commits: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("llama")))
    engine, weights = make_engine(config, max_sequences=4, flush_tokens=5), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    alone = [joined(run(engine, [request(seed, PROMPT, max_new_tokens=15, seed=seed)])[seed]) for seed in range(7)]
    chunks: dict[int, list[TokenChunk]] = {}
    modes = [mode for mode in Interrupt if mode is not Interrupt.ABORT_RETRY]
    version, waiting, number = 0, False, 0
    while version < commits or engine.has_work():
        while version < commits and engine.stats().running + engine.stats().waiting < 6:
            engine.add(request(number, PROMPT, max_new_tokens=15, seed=number % 7))
            number += 1
        if version < commits and not waiting:
            version += 1
            weights.stage(engine, version)
            engine.commit(version, modes[version % len(modes)])
            waiting = True
        for chunk in engine.step():
            chunks.setdefault(chunk.request_id, []).append(chunk)
        waiting = waiting and not engine.take_swaps()
    assert sorted(chunks) == list(range(number))
    for one, parts in chunks.items():
        tokens = joined(parts)
        assert tokens.ids_T.tolist() == alone[one % 7].ids_T.tolist()
        np.testing.assert_allclose(tokens.logprobs_T, alone[one % 7].logprobs_T, atol=1e-4)
