"""Whatever joins and leaves, and whenever, a sequence is the one it would have been alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import GenerateRequest
from headrace.engine.native import NativeEngine
from headrace.models import ModelConfig
from tests.engine.native.harness import Weights, alone, joined, make_engine, ready_engine, request, run
from tests.models.kinds import plain

POOL = 14
ROWS = 4
FLUSH = 5


def pooled(which: int, request_id: int) -> GenerateRequest:
    rng = np.random.default_rng(which)
    return request(
        request_id,
        rng.integers(3, 40, rng.integers(1, 20)),
        max_new_tokens=int(rng.integers(1, 16)),
        temperature=(1.0, 0.0, 0.8)[which % 3],
        seed=which,
        stop_ids=tuple(range(3, 3 + which)),
    )


@dataclass
class World:
    """One engine that lives through all examples, and what each pooled request gives alone."""

    engine: NativeEngine
    weights: Weights
    expected: Callable[[int], list[int]]
    version: int = 0
    next_id: int = 0
    asked: dict[int, int] = field(default_factory=dict)
    """Pool number of each request of this example."""
    chunks: dict[int, list[TokenChunk]] = field(default_factory=dict)

    def add(self, which: int) -> None:
        self.engine.add(pooled(which, self.next_id))
        self.asked[self.next_id] = which
        self.next_id += 1

    def keep(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)

    def commit(self) -> None:
        self.version += 1
        self.weights.send(self.engine, self.version)


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text"])
def world(
    request: pytest.FixtureRequest, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> World:
    directory = model_dir(request.param)
    reference = plain(directory)
    config = ModelConfig(path=str(directory))
    made = World(
        engine=make_engine(config, max_sequences=ROWS, max_step_tokens=24, flush_tokens=FLUSH),
        weights=Weights(config, tmp_path_factory.mktemp("buffer") / "weights"),
        expected=cache(lambda which: alone(reference, pooled(which, 0))),
    )
    made.weights.send(made.engine, 0)
    return made


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, POOL - 1)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("commit"), st.just(0)),
)


@settings(max_examples=40)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=30))
def test_any_schedule_gives_every_sequence_its_own_tokens(world: World, actions: list[tuple[str, int]]) -> None:
    world.engine.abort(range(world.next_id))  # what a failed example left
    world.asked, world.chunks = {}, {}
    before, aborted = world.engine.stats(), set()
    for action, value in actions:
        if action == "add":
            world.add(value)
        elif action == "commit":
            world.commit()
        elif action == "abort" and world.asked:
            victim = list(world.asked)[value % len(world.asked)]
            last = world.engine.abort([victim, -7])
            aborted |= {chunk.request_id for chunk in last}
            world.keep(last)
        else:
            for _ in range(value):
                world.keep(world.engine.step())
            assert world.engine.stats().running <= ROWS
    while world.engine.has_work():
        world.keep(world.engine.step())

    num_sampled = 0
    for request_id, which in world.asked.items():
        chunks, expected = world.chunks[request_id], world.expected(which)
        tokens = joined(chunks)
        num_sampled += len(tokens)
        assert all(len(chunk.tokens.ids_T) == FLUSH for chunk in chunks[:-1])
        assert np.all(np.diff(tokens.versions_T) >= 0)
        if request_id in aborted:
            assert chunks[-1].stop_reason == StopReason.ABORTED
            assert tokens.ids_T.tolist() == expected[: len(tokens)]
        else:
            stopped = expected[-1] in pooled(which, 0).sampling.stop_ids
            assert chunks[-1].stop_reason == (StopReason.STOP if stopped else StopReason.LENGTH)
            assert tokens.ids_T.tolist() == expected
    after = world.engine.stats()
    assert after.generated_tokens - before.generated_tokens == num_sampled
    assert after.running == after.waiting == 0


def test_requests_join_in_order_as_rows_and_prompt_tokens_allow(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", max_sequences=3, max_step_tokens=10)
    lengths = [6, 4, 1, 30, 2, 2]
    for number, length in enumerate(lengths):
        engine.add(request(number, range(3, 3 + length), max_new_tokens=3))
    seen = []
    while engine.has_work():
        engine.step()
        seen.append((engine.stats().running, engine.stats().waiting, engine.stats().prompt_tokens))
    # 6+4 fill the first step; then the 1, as there are three rows; two free up after step 3
    assert seen[:3] == [(2, 4, 10), (3, 3, 11), (1, 3, 11)]
    # the long one goes in pieces of 9, 10, 10 and 1; with the last piece there is room for the last two
    assert seen[3:6] == [(1, 2, 41)] * 3
    assert seen[6] == (3, 0, 45)


def test_tokens_leave_at_every_flush_and_nothing_is_sent_twice(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = ready_engine(model_dir("qwen3"), tmp_path / "buffer", flush_tokens=4)
    chunks = run(engine, [request(0, [3, 4], max_new_tokens=10)])[0]
    assert [len(chunk.tokens.ids_T) for chunk in chunks] == [4, 4, 2]
    assert [chunk.stop_reason for chunk in chunks] == [None, None, StopReason.LENGTH]
