"""A group that runs in one call: the same episodes as one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import ComponentDied, RequestError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, TokenChunk
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import NO_TOKENS, IntColumn, Tokens
from headrace.engine import SiblingRequest
from headrace.engine.base import OnSiblingChunks
from headrace.rollout import EpisodeLimits, EpisodeRunner
from headrace.rollout.agents import Agents
from headrace.rollout.environments import SingleTurn
from headrace.rollout.siblings import SiblingRunner
from headrace.testing import FakeEngine, lognormal_lengths

TASK = Task(row_index=0, row={}, prompt="?", prompt_ids_T=np.array([5, 6], np.int32))


class Together(FakeEngine):
    """Samples siblings in one call, by the streams of a fake engine."""

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        async def one(index: int, sibling: SiblingRequest) -> None:
            async for chunk in self.generate(prompt_ids_T, sibling.sampling, sibling.options):
                await on_chunks([(index, chunk)])

        self._stats = type(self._stats)(version=3)
        self.requests = list(siblings)
        async with asyncio.TaskGroup() as group:
            for index, sibling in enumerate(siblings):
                group.create_task(one(index, sibling))


class Scripted(Together):
    """Sends what it was told, one list of chunks after the other."""

    def __init__(self, *arrivals: Sequence[tuple[int, TokenChunk]]) -> None:
        super().__init__()
        self.arrivals = arrivals

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        for arrived in self.arrivals:
            await asyncio.sleep(1.0)
            await on_chunks(arrived)
        await asyncio.sleep(1000.0)


def chunk(*ids: int, version: int = 3, **more: Any) -> TokenChunk:
    tokens = Tokens(ids_T=ids, logprobs_T=[-0.5] * len(ids), versions_T=[version] * len(ids))
    return TokenChunk(tokens=tokens, **more)


def runner(engine: FakeEngine, **settings: Any) -> EpisodeRunner:
    sampling = Sampling(max_new_tokens=64, temperature=0.7)
    given = {"env": SingleTurn(), "on_tokens": lambda _: None, **settings}
    return EpisodeRunner(engine=engine, sampling=sampling, run_seed=3, **given)


async def run_group(made: EpisodeRunner, size: int) -> list[list[EpisodeGraph]]:
    """The episodes of group 7, as they end."""
    together = SiblingRunner.from_runner(made)
    assert together is not None
    ended: list[list[EpisodeGraph]] = []

    async def take(episodes: Sequence[EpisodeGraph]) -> None:
        ended.append(list(episodes))

    await together.run(7, size, TASK, take)
    return ended


def test_group_has_the_same_episodes_as_if_each_had_run_by_itself() -> None:
    def engine() -> Together:
        return Together(length=lognormal_lengths(20, 1.0, 100))

    async def alone(made: EpisodeRunner, parts: list[TokenChunk]) -> list[EpisodeGraph]:
        made.engine._stats = type(made.engine._stats)(version=3)
        return [await made.run(EpisodeKey(7, place), TASK) for place in range(6)]

    limits = EpisodeLimits(max_context=50, max_tokens=40)
    apart, parts, turns = [], [], []
    for single in (True, False):
        parts.append([])
        turns.append([])
        made = runner(
            engine(),
            limits=limits,
            on_part=parts[-1].append,
            on_turn=lambda key, ids_T, turn: turns[-1].append((key, ids_T.tolist(), turn)),
        )
        found = run_virtual(alone(made, parts[-1]) if single else run_group(made, 6))
        apart.append(found if single else [episode for episodes in found for episode in episodes])
    by_key = [sorted(map(repr, episodes)) for episodes in apart]
    assert by_key[0] == by_key[1]
    assert sorted(map(repr, turns[0])) == sorted(map(repr, turns[1]))
    assert sorted(map(repr, parts[0])) == sorted(map(repr, parts[1]))
    assert {len(episode.turns[1].tokens) for episode in apart[0]} > {40}


def test_answers_that_end_together_are_passed_on_together_and_void_tokens_are_not_kept() -> None:
    stop = {"stop_reason": StopReason.STOP}
    first = [(0, chunk(7)), (1, chunk(8, 9, **stop)), (2, chunk(1, **stop))]
    engine = Scripted(first, [(0, chunk(4, version=4, lost="restarted")), (0, chunk(5, version=4, **stop))])
    ended = run_virtual(run_group(runner(engine, timeout_s=500.0), 4))
    assert [[episode.key.place for episode in episodes] for episodes in ended] == [[1, 2], [0], [3]]
    assert ended[1][0].turns[1].tokens.ids_T.tolist() == [4, 5]
    late = ended[2][0]
    assert (late.status, late.cause) == (EpisodeStatus.FAILED, "env_timeout: not over after env.timeout_s=500.0 s")


def test_answer_that_the_engine_refuses_or_cannot_go_on_with_fails_alone() -> None:
    refused = TokenChunk(tokens=NO_TOKENS).with_error(RequestError("too long", remedy="shorten it"))
    broken = chunk(9).with_error(RequestError("its cache is gone", remedy="look"))
    arrivals = [(0, refused), (1, chunk(1)), (1, replace_error(broken)), (2, chunk(3, stop_reason=StopReason.LENGTH))]
    turns: list[EpisodeKey] = []
    made = runner(Scripted(arrivals), timeout_s=50.0, on_turn=lambda key, *_: turns.append(key))
    (ended,) = run_virtual(run_group(made, 3))
    causes = ["request_refused: too long", "engine_failed: its cache is gone", ""]
    assert [episode.cause for episode in ended] == causes
    assert [episode.turns[1].untrained for episode in ended] == ["cut_off", "cut_off", ""]
    assert turns == [EpisodeKey(7, 2)]


def replace_error(broken: TokenChunk) -> TokenChunk:
    """The last chunk of a sequence that fails holds no tokens."""
    return TokenChunk(tokens=NO_TOKENS, error=broken.error, error_kind=broken.error_kind)


def test_episode_that_could_not_be_taken_before_the_time_limit_is_passed_on_after_it() -> None:
    engine = Scripted([(0, chunk(7, stop_reason=StopReason.STOP))])
    together = SiblingRunner.from_runner(runner(engine, timeout_s=10.0))
    assert together is not None
    room, ended = asyncio.Semaphore(0), list[str]()

    async def take(episodes: Sequence[EpisodeGraph]) -> None:
        await room.acquire()
        ended.extend(f"{episode.key} {episode.status}" for episode in episodes)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(together.run(7, 2, TASK, take))
            await asyncio.sleep(60.0)
            room.release()

    run_virtual(main())
    assert ended == ["7.0 finished", "7.1 failed"]


def test_death_of_the_engine_is_raised() -> None:
    class Dead(Together):
        async def generate_siblings(self, *_: object) -> None:
            raise ComponentDied("engine was killed", remedy="look")

    with pytest.raises(ComponentDied, match="engine was killed"):
        run_virtual(run_group(runner(Dead()), 2))


def test_groups_run_one_by_one_where_an_episode_is_more_than_an_answer_of_the_policy() -> None:
    class Longer:
        begins_with_prompt = True

    frozen = Agents(engines={"policy": FakeEngine()})
    made = runner(Together())
    for other in ({"env": Longer()}, {"retries": 1}, {"agents": frozen}, {"engine": FakeEngine()}):
        assert SiblingRunner.from_runner(replace(made, **other)) is None
    assert SiblingRunner.from_runner(made) is not None
