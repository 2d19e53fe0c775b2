"""Sequences that stay under older weights: how many versions are kept, and who waits for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from headrace.base.types.messages.engine import GenerateRequest, ScoreTokens
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, joined, make_engine, request, run

Dir = Callable[[str], Path]
PROMPT = list(range(3, 23))


def pinned(number: int, max_new_tokens: int = 40) -> GenerateRequest:
    return msgspec.structs.replace(request(number, PROMPT, max_new_tokens=max_new_tokens, seed=number), pinned=True)


def world(directory: Path, buffer: Path, **settings: object) -> tuple[NativeEngine, Weights]:
    config = ModelConfig(path=str(directory))
    engine, weights = make_engine(config, **settings), Weights(config, buffer)
    weights.send(engine, 0)
    return engine, weights


def test_only_so_many_older_versions_are_kept_and_the_next_one_waits(model_dir: Dir, tmp_path: Path) -> None:
    engine, weights = world(model_dir("qwen3"), tmp_path / "buffer", max_pinned_versions=2, flush_tokens=1)
    each = sum(tensor.numel() * tensor.element_size() for tensor in engine._pins._tensors)
    stamps: dict[int, set[int]] = {}
    for version in range(1, 8):
        engine.add(pinned(version))
        engine.add(request(100 + version, PROMPT, max_new_tokens=2))
        engine.step()
        assert engine.stats().pinned_bytes <= 2 * each
        weights.send(engine, version)
    assert engine.stats().waiting == 5
    for number, chunks in run(engine).items():
        stamps[number] = set(joined(chunks).versions_T.tolist())
    assert [len(stamps[number]) for number in range(1, 8)] == [1] * 7
    assert engine.stats().pinned_bytes == engine.stats().waiting == 0


def test_a_pinned_newcomer_waits_for_the_end_of_a_stream_and_does_not_hurry_it(
    model_dir: Dir, tmp_path: Path
) -> None:  # fmt: skip
    engine, weights = world(model_dir("qwen3"), tmp_path / "buffer", max_sequences=4, stream_steps=6)
    engine.add(request(0, PROMPT, max_new_tokens=40))
    engine.step()
    engine.add(pinned(1, 5))
    engine.add(request(2, PROMPT, max_new_tokens=5))
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.STREAM)
    for _ in range(4):
        engine.step()
        assert not engine.take_swaps()
    assert engine.stats().running == 2
    chunks = run(engine)
    assert set(joined(chunks[1]).versions_T.tolist()) == {1}


def test_a_stream_ends_where_nothing_but_pinned_newcomers_is_left(model_dir: Dir, tmp_path: Path) -> None:
    engine, weights = world(model_dir("qwen3"), tmp_path / "buffer", stream_steps=50)
    engine.add(request(0, PROMPT, max_new_tokens=3))
    engine.step()
    engine.add(pinned(1, 3))
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.STREAM)
    assert set(joined(run(engine)[1]).versions_T.tolist()) == {1}


def test_pinned_sequences_survive_that_the_memory_is_given_back(model_dir: Dir, tmp_path: Path) -> None:
    engine, weights = world(model_dir("qwen3"), tmp_path / "buffer")
    alone = joined(run(engine, [pinned(0)])[0]).ids_T.tolist()
    engine.add(pinned(0))
    engine.step()
    weights.scale(1.5)
    weights.send(engine, 1)
    engine.pause(release=True)
    assert not engine._cache.layers
    engine.resume()
    assert joined(run(engine)[0]).ids_T.tolist() == alone


def test_a_score_amid_an_exchange_is_that_of_the_new_weights(model_dir: Dir, tmp_path: Path) -> None:
    engine, weights = world(model_dir("qwen3"), tmp_path / "buffer", stream_steps=8)
    asked = ScoreTokens(call=0, ids_T=np.arange(3, 20, dtype=np.int32))
    engine.add(request(0, PROMPT, max_new_tokens=30))
    engine.step()
    old = engine.score(asked)
    weights.scale(1.3)
    weights.stage(engine, 1)
    engine.commit(1, Interrupt.STREAM)
    engine.step()
    amid = engine.score(asked)
    assert [report.version for report in engine.take_swaps()] == [1]
    assert np.array_equal(amid, engine.score(asked))
    assert not np.allclose(amid, old)


def test_a_score_makes_room_in_the_cache_and_takes_no_memory_of_its_own(model_dir: Dir, tmp_path: Path) -> None:
    engine, _ = world(model_dir("qwen3"), tmp_path / "buffer", cache_tokens=96, max_sequences=4)
    expected = {number: joined(run(engine, [request(number, [3, number], seed=number)])[number]) for number in (4, 5)}
    scored = ScoreTokens(call=0, ids_T=np.arange(3, 3 + 30, dtype=np.int32).repeat(3)[:90])
    before = engine.score(scored)
    for number in (4, 5):
        engine.add(request(number, [3, number], seed=number))
    engine.step()
    np.testing.assert_allclose(engine.score(scored), before, atol=1e-5)
    assert engine.stats().preempted > 0
    chunks = run(engine)
    for number in (4, 5):
        assert joined(chunks[number]).ids_T.tolist() == expected[number].ids_T.tolist()
    engine._pool.check([])
    assert torch.isfinite(engine._cache.layers[0][0]).all()
