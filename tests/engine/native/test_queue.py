"""Who waits, for how long, and how many may."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import ConfigError, EngineFull, RequestError, SequenceFailed
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine import RequestOptions
from headrace.launch.inprocess import LocalEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import ManualClock, Weights, joined, make_engine, ready_engine, request, run

Dir = Callable[[str], Path]


def test_ten_thousand_requests_may_wait_in_little_memory(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", max_sequences=2)
    tracemalloc.start()
    for number in range(10_000):
        engine.add(request(number, [3, 4, 5], max_new_tokens=4))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 30e6
    assert engine.stats().waiting == 10_000
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 9_998)
    chunks = engine.abort(range(5, 10_000))
    assert len(chunks) == 9_995
    assert {chunk.stop_reason for chunk in chunks} == {StopReason.ABORTED}
    assert sorted(run(engine)) == [0, 1, 2, 3, 4]


def test_memory_of_the_cache_that_nothing_is_written_to_is_not_taken(model_dir: Dir, tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", cache_tokens=2**21)
    assert engine.stats().cache_bytes == 2**29
    run(engine, [request(0, [3, 4, 5])])
    assert psutil.Process().memory_info().rss - before < 2**28
    assert all(pool.data_ptr() % 64 == 0 for pair in engine._cache.layers for pool in pair)


def test_a_cache_that_the_free_memory_does_not_hold_is_refused(model_dir: Dir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cache_tokens=1073741824 needs \d+ bytes .* are free"):
        ready_engine(model_dir("qwen3"), tmp_path / "buffer", cache_tokens=2**30)


def test_one_request_too_many_is_refused_with_the_limit(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", max_waiting=3)
    for number in range(3):
        engine.add(request(number, [3]))
    with pytest.raises(EngineFull, match=r"engine\.max_waiting=3"):
        engine.add(request(3, [3]))
    engine.step()
    engine.add(request(3, [3]))
    assert sorted(run(engine)) == [0, 1, 2, 3]


def test_a_request_that_no_empty_cache_could_hold_is_refused(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", cache_tokens=32)
    with pytest.raises(RequestError, match="exceed the cache of 32 tokens"):
        engine.add(request(0, [3] * 20, max_new_tokens=14))
    assert len(joined(run(engine, [request(1, [3] * 20, max_new_tokens=13)])[1])) == 13


def test_time_is_up_for_who_runs_and_for_who_waits(model_dir: Dir, tmp_path: Path) -> None:
    config, clock = ModelConfig(path=str(model_dir("qwen3"))), ManualClock()
    engine = make_engine(config, clock=clock, max_sequences=1)
    Weights(config, tmp_path / "buffer").send(engine, 0)
    for number, deadline_s in enumerate((5.0, 3.0, None)):
        engine.add(msgspec.structs.replace(request(number, [3], max_new_tokens=20), deadline_s=deadline_s))
    chunks = []
    while engine.has_work():
        chunks += engine.step()
        clock.time_s += 1.0
    ended = {chunk.request_id: (chunk.stop_reason, len(chunk.tokens.ids_T)) for chunk in chunks}
    assert ended == {1: (StopReason.DEADLINE, 0), 0: (StopReason.DEADLINE, 5), 2: (StopReason.LENGTH, 20)}


def test_a_deadline_passes_while_the_engine_stands_still_and_nobody_calls_it(model_dir: Dir, tmp_path: Path) -> None:
    core = ready_engine(model_dir("qwen3"), tmp_path / "buffer")

    async def run() -> StopReason | None:
        async with asyncio.timeout(20), LocalEngine(core, clock=RealClock()) as engine:
            await engine.pause()
            options = RequestOptions(deadline_s=0.05)
            stream = engine.generate(np.array([3], np.int32), Sampling(max_new_tokens=20), options)
            return [chunk.stop_reason async for chunk in stream][-1]

    assert asyncio.run(run()) is StopReason.DEADLINE


def test_higher_priority_joins_first(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", max_sequences=1)
    for number, priority in enumerate((0, 5, 1)):
        engine.add(msgspec.structs.replace(request(number, [3], max_new_tokens=2), priority=priority))
    assert list(run(engine)) == [1, 2, 0]


def test_preempted_sequences_lose_nothing(model_dir: Dir, tmp_path: Path) -> None:
    roomy = ready_engine(model_dir("qwen3"), tmp_path / "one")
    narrow = ready_engine(model_dir("qwen3"), tmp_path / "two", cache_tokens=64, max_sequences=4)
    requests = [request(number, [3 + number] * 10, max_new_tokens=40, seed=number) for number in range(4)]
    expected, found = run(roomy, requests), run(narrow, requests)
    assert narrow.stats().preempted > 0 == roomy.stats().preempted
    for number in range(4):
        assert joined(found[number]).ids_T.tolist() == joined(expected[number]).ids_T.tolist()
    assert narrow.stats().generated_tokens == 160


def test_a_group_computes_its_prompt_once(model_dir: Dir, tmp_path: Path) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer")
    run(engine, [request(number, range(3, 38), seed=number) for number in range(4)])
    assert engine.stats().cached_tokens == 3 * 32
    run(engine, [request(9, range(3, 38))])
    assert engine.stats().cached_tokens == 4 * 32


def test_no_prefix_outlives_its_weights(model_dir: Dir, tmp_path: Path) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    run(engine, [request(0, range(3, 38))])
    weights.send(engine, 1)
    run(engine, [request(1, range(3, 38))])
    assert engine.stats().cached_tokens == 0


def test_a_refusal_keeps_its_kind_on_its_way_to_who_asked() -> None:
    chunk = TokenChunk(request_id=3, tokens=Tokens.observed([]), error="full; wait")
    for kind in (EngineFull, RequestError, SequenceFailed):
        with pytest.raises(RequestError) as raised:
            msgspec.structs.replace(chunk, error_kind=kind.__name__).raise_error()
        assert (type(raised.value), raised.value.problem, raised.value.remedy) == (kind, "full", "wait")
