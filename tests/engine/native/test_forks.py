"""Sequences that begin where others were, and sequences that stay under the weights they began with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import RequestError
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, StaleFork
from headrace.base.types.weights import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, alone, joined, make_engine, request, run
from tests.models.kinds import plain

Pair = tuple[NativeEngine, Weights]
PROMPT = list(range(3, 25))


@pytest.fixture
def pair(model_dir: Callable[[str], Path], tmp_path: Path) -> Pair:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, fork_memory=2), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    return engine, weights


def fork(
    request_id: int, parent: int, at: int, stale: StaleFork = StaleFork.REFUSE, **sampling: object
) -> GenerateRequest:
    made = request(request_id, [], **sampling)
    return msgspec.structs.replace(made, fork=ForkRequest(parent=parent, at=at, stale=stale))


def test_a_fork_of_a_running_sequence_shares_its_blocks_and_goes_its_own_way(
    pair: Pair, model_dir: Callable[[str], Path]
) -> None:
    engine = pair[0]
    engine.add(request(0, PROMPT, max_new_tokens=20, seed=1))
    for _ in range(10):
        engine.step()
    used = engine.stats().cache_blocks_used
    engine.add(fork(1, 0, 6, seed=2, max_new_tokens=8))
    engine.step()
    assert engine.stats().cached_tokens == len(PROMPT) + 6 - 1
    assert engine.stats().cache_blocks_used <= used + 2
    results = run(engine)
    reference = plain(model_dir("qwen3"))
    parent = alone(reference, request(0, PROMPT, max_new_tokens=20, seed=1))
    assert joined(results[0]).ids_T.tolist() == parent
    expected = alone(reference, request(1, PROMPT + parent[:6], max_new_tokens=8, seed=2))
    assert joined(results[1]).ids_T.tolist() == expected


def test_an_ended_sequence_can_be_forked_while_it_is_remembered(pair: Pair) -> None:
    engine = pair[0]
    whole = joined(run(engine, [request(0, PROMPT, max_new_tokens=20, seed=1)])[0]).ids_T.tolist()
    again = joined(run(engine, [fork(1, 0, 5, seed=1, max_new_tokens=15)])[1]).ids_T.tolist()
    assert again == whole[5:]
    deeper = joined(run(engine, [fork(2, 1, 4, seed=1, max_new_tokens=11)])[2]).ids_T.tolist()
    assert deeper == whole[9:]
    with pytest.raises(RequestError, match="forks request 0, which is neither"):
        engine.add(fork(3, 0, 5))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (fork(1, 7, 0), "forks request 7"),
        (fork(1, 0, 21), "has sampled 20"),
        (fork(1, 0, -1), "at=-1"),
        (msgspec.structs.replace(fork(1, 0, 3), prompt_ids_T=np.array([3], np.int32)), "prompt of 1 tokens of its own"),
    ],
)
def test_a_fork_of_what_is_not_there_is_refused(pair: Pair, bad: GenerateRequest, reason: str) -> None:
    run(pair[0], [request(0, PROMPT, max_new_tokens=20)])
    with pytest.raises(RequestError, match=reason):
        pair[0].add(bad)


def test_a_fork_says_what_shall_become_of_a_cache_of_other_weights(pair: Pair) -> None:
    engine, weights = pair
    engine.add(request(0, PROMPT, max_new_tokens=30))
    for _ in range(10):
        engine.step()
    weights.scale(1.1)
    weights.send(engine, 1)
    with pytest.raises(RequestError, match="not of version 1"):
        engine.add(fork(1, 0, 8))
    engine.add(fork(2, 0, 8, StaleFork.RECOMPUTE))
    engine.step()
    assert engine.stats().cached_tokens == 0
    engine.add(fork(3, 0, 8, StaleFork.REUSE))
    engine.step()
    assert engine.stats().cached_tokens == len(PROMPT) + 7
    logprobs = {number: joined(chunks).logprobs_T[0] for number, chunks in run(engine).items()}
    assert logprobs[2] != logprobs[3]


@pytest.mark.parametrize("mode", [Interrupt.INFLIGHT, Interrupt.STREAM])
def test_a_fork_that_refuses_other_weights_fails_if_they_come_while_it_waits(
    mode: Interrupt, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, max_sequences=1), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    engine.add(request(0, PROMPT, max_new_tokens=20))
    for _ in range(10):
        engine.step()
    engine.add(fork(1, 0, 8))
    engine.add(fork(2, 0, 8, StaleFork.RECOMPUTE))
    weights.stage(engine, 1)
    engine.commit(1, mode)
    results = run(engine)
    (refused,) = results[1]
    assert (refused.error_kind, len(refused.tokens), refused.stop_reason) == ("RequestError", 0, None)
    assert "request 1 forks request 0, whose cache is not of" in refused.error
    assert "set stale to" in refused.error
    assert (len(joined(results[0])), len(joined(results[2]))) == (20, 10)
    assert engine.stats().waiting == engine.stats().cache_blocks_used == 0


@pytest.mark.parametrize("stale", [StaleFork.RECOMPUTE, StaleFork.REUSE])
def test_a_fork_that_waits_over_a_commit_says_by_its_versions_what_computed_it(
    stale: StaleFork, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, max_sequences=2), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    engine.add(request(0, PROMPT, max_new_tokens=30))
    engine.add(request(5, [3], max_new_tokens=12))
    for _ in range(10):
        engine.step()
    engine.add(fork(1, 0, 8, stale))
    engine.step()
    assert engine.stats().waiting == 1
    weights.scale(1.1)
    weights.send(engine, 1)
    results = run(engine)
    assert set(joined(results[1]).versions_T) == {1}
    assert set(joined(results[0]).versions_T) == {0, 1}
    assert engine.stats().cached_tokens == (len(PROMPT) + 7 if stale is StaleFork.REUSE else 0)


@pytest.mark.parametrize("mode", list(Interrupt))
def test_a_pinned_sequence_never_notices_a_commit(
    mode: Interrupt, pair: Pair, model_dir: Callable[[str], Path]
) -> None:
    engine, weights = pair
    asked = request(0, PROMPT, max_new_tokens=20, seed=4)
    engine.add(msgspec.structs.replace(asked, pinned=True))
    engine.add(request(1, PROMPT, max_new_tokens=20, seed=5))
    for _ in range(6):
        engine.step()
    for version in (1, 2):
        weights.scale(1.2)
        weights.stage(engine, version)
        engine.commit(version, mode)
        engine.step()
        if not engine.take_swaps():
            break
    assert engine._pins.num_bytes > 0
    tokens = joined(run(engine)[0])
    assert tokens.ids_T.tolist() == alone(plain(model_dir("qwen3")), asked)
    assert set(tokens.versions_T) == {0}
    assert engine._pins.num_bytes == 0


def test_fork_of_an_answer_that_a_string_ended_goes_on_to_the_next_one(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine = make_engine(config, decode=lambda ids: "".join(chr(60 + token) for token in ids))
    Weights(config, tmp_path / "buffer").send(engine, 0)
    free = joined(run(engine, [request(0, PROMPT, max_new_tokens=30, seed=1)])[0]).ids_T.tolist()
    string = "".join(chr(60 + token) for token in free[6:9])
    parent = run(engine, [request(1, PROMPT, max_new_tokens=30, seed=1, stop=(string,))])[1]
    at = len(joined(parent))
    assert at <= 9
    forked = request(2, [], max_new_tokens=30 - at, seed=1, stop=(string,))
    child = run(engine, [msgspec.structs.replace(forked, fork=ForkRequest(parent=1, at=at))])[2]
    assert len(joined(child)) > 1
    assert joined(child).ids_T.tolist() == free[at : at + len(joined(child))]


@pytest.mark.parametrize("at", [1, 5, 10, 11, 20, 26])
def test_forks_of_an_ended_sequence_compute_nothing_but_what_they_sample(
    at: int, pair: Pair, model_dir: Callable[[str], Path]
) -> None:
    engine = pair[0]
    whole = joined(run(engine, [request(0, PROMPT, max_new_tokens=40, seed=1)])[0]).ids_T.tolist()
    before = engine.stats()
    forks = [fork(number, 0, at, seed=number, max_new_tokens=12) for number in range(1, 6)]
    results = run(engine, [msgspec.structs.replace(one, pinned=True) for one in forks])
    after = engine.stats()
    prefilled = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    assert prefilled == len(forks)  # the last token that is kept, out of which the first new one comes
    assert after.generated_tokens - before.generated_tokens == 12 * len(forks)
    reference = plain(model_dir("qwen3"))
    for number in range(1, 6):
        expected = alone(reference, request(number, PROMPT + whole[:at], max_new_tokens=12, seed=number))
        tokens = joined(results[number])
        assert tokens.ids_T.tolist() == expected
        assert set(tokens.versions_T) == {0}
    assert engine.stats().cache_blocks_used == 0


def test_forks_behind_the_last_whole_block_of_an_ended_sequence_compute_what_it_had_begun(pair: Pair) -> None:
    engine = pair[0]
    whole = joined(run(engine, [request(0, PROMPT, max_new_tokens=40, seed=1)])[0]).ids_T.tolist()
    before = engine.stats()
    again = joined(run(engine, [fork(1, 0, 35, seed=1, max_new_tokens=5)])[1]).ids_T.tolist()
    after = engine.stats()
    assert again == whole[35:]
    assert after.cached_tokens - before.cached_tokens == 48  # of 57: three blocks


def test_a_fork_of_an_ended_sequence_whose_blocks_were_taken_computes_them_again(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    config = ModelConfig(path=str(model_dir("qwen3")))
    engine, weights = make_engine(config, cache_tokens=96), Weights(config, tmp_path / "buffer")
    weights.send(engine, 0)
    whole = joined(run(engine, [request(0, PROMPT, max_new_tokens=40, seed=1)])[0]).ids_T.tolist()
    run(engine, [request(1, range(5, 35), max_new_tokens=60, seed=2)])  # needs every block
    before = engine.stats().cached_tokens
    again = joined(run(engine, [fork(2, 0, 5, seed=1, max_new_tokens=35)])[2]).ids_T.tolist()
    assert again == whole[5:]
    assert engine.stats().cached_tokens == before
