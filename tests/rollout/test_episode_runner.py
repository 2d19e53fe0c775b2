"""One episode: token for token what the engine sampled, from a seed of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import BudgetSpent, ComponentDied, RequestError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import paths
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.rollout import EpisodeRunner
from headrace.rollout.environments import AttemptOutcome, OpenEpisode, SingleTurn
from headrace.rollout.environments.base import LAST
from headrace.rollout.history import prompt_digest
from headrace.rollout.runner import episode_seed
from headrace.testing import FakeEngine

TASK = Task(row_index=0, row={}, prompt="?", prompt_ids_T=np.array([5, 6], np.int32))


class Scripted(FakeEngine):
    """Streams what it was told, and remembers what it was asked."""

    def __init__(self, *chunks: TokenChunk | Exception) -> None:
        super().__init__()
        self.chunks = chunks
        self.asked: list[tuple[list[int], Sampling]] = []

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self.options = options
        self.asked.append((prompt_ids_T.tolist(), sampling))
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


def chunk(*ids: int, version: int, stop_reason: StopReason | None = None) -> TokenChunk:
    tokens = Tokens(ids_T=ids, logprobs_T=[-0.5] * len(ids), versions_T=[version] * len(ids))
    return TokenChunk(tokens=tokens, stop_reason=stop_reason)


def run(engine: Scripted, env: object = None, arrived: list[int] | None = None, **settings: Any) -> EpisodeGraph:
    runner = EpisodeRunner(
        engine=engine,
        env=env or SingleTurn(),
        sampling=Sampling(max_new_tokens=8, temperature=0.7),
        run_seed=3,
        on_tokens=([] if arrived is None else arrived).append,
        **settings,
    )
    return run_virtual(runner.run(EpisodeKey(2, 1), TASK))


def test_answer_is_the_chunks_of_the_engine_token_for_token() -> None:
    arrived: list[int] = []
    engine = Scripted(chunk(7, 8, version=3), chunk(9, version=4, stop_reason=StopReason.LENGTH))
    episode = run(engine, arrived=arrived)
    prompt, answer = episode.turns
    assert (episode.status, episode.key) == (EpisodeStatus.FINISHED, EpisodeKey(2, 1))
    assert (prompt.author, prompt.tokens.ids_T.tolist(), prompt.parent) == ("task", [5, 6], None)
    assert (answer.author, answer.parent, answer.stop_reason) == ("policy", 0, StopReason.LENGTH)
    assert answer.tokens.ids_T.tolist() == [7, 8, 9]
    assert answer.tokens.versions_T.tolist() == [3, 3, 4]
    assert arrived == [2, 1]


def test_engine_is_asked_with_the_settings_and_the_episodes_own_seed() -> None:
    engine = Scripted(chunk(7, version=0, stop_reason=StopReason.STOP))
    run(engine)
    seed = episode_seed(3, EpisodeKey(2, 1))
    assert engine.asked == [([5, 6], Sampling(max_new_tokens=8, temperature=0.7, seed=seed))]


def test_every_turn_of_an_episode_has_a_seed_of_its_own() -> None:
    class TwoTurns(SingleTurn):
        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            await episode.sample(task.prompt_ids_T)
            await episode.sample(task.prompt_ids_T)
            return AttemptOutcome()

    engine = Scripted(chunk(7, version=0, stop_reason=StopReason.STOP))
    run(engine, TwoTurns())
    assert [sampling.seed for _, sampling in engine.asked] == [episode_seed(3, EpisodeKey(2, 1), t) for t in (0, 1)]


def test_tokens_are_recorded_with_the_digest_of_all_that_was_read_before_them() -> None:
    class Branches(SingleTurn):
        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            for prompt in ([5, 6], [5, 6, 7], [5, 6, 7, 1, 2], [5, 6, 7, 1, 3], [9], [5, 6, 7, 1, 2]):
                await episode.sample(np.array(prompt, np.int32))
            return AttemptOutcome()

    engine, parts = Scripted(chunk(7, version=0, stop_reason=StopReason.STOP)), []
    run(engine, Branches(), on_part=parts.append)
    assert len(parts) == 6
    assert [part.prompt for part in parts] == [prompt_digest(np.array(ids)) for ids, _ in engine.asked]
    assert prompt_digest(np.array([5, 6])) == "554c809660e4af1a", "as in ledgers that exist"


def test_seeds_of_a_run_differ_and_never_change() -> None:
    keys = [(run_seed, EpisodeKey(g, p), t) for run_seed in (0, 1) for g in range(20) for p in range(8) for t in (0, 1)]
    seeds = [episode_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert episode_seed(0, EpisodeKey(1, 2)) == 453923624483662167


def test_refused_request_is_a_failed_episode_with_its_cause() -> None:
    episode = run(Scripted(RequestError("prompt of 9 tokens: too long", remedy="shorten it")))
    assert episode.status is EpisodeStatus.FAILED
    assert episode.cause == "request_refused: prompt of 9 tokens: too long"
    assert episode.num_sampled == 0


def test_tokens_that_came_before_a_failure_stay_with_the_episode() -> None:
    episode = run(Scripted(chunk(7, 8, version=2), RequestError("its logits are not finite", remedy="look at them")))
    assert episode.status is EpisodeStatus.FAILED
    assert episode.cause == "engine_failed: its logits are not finite"
    assert (episode.num_sampled, episode.versions()) == (2, (2, 2))


def test_what_an_environment_raises_fails_its_own_episode_only() -> None:
    episode = run(Scripted(ConnectionError("the tool server is gone")))
    assert episode.status is EpisodeStatus.FAILED
    assert episode.cause == "env_error: ConnectionError: the tool server is gone"


def test_death_of_a_part_is_not_taken_for_a_failed_episode() -> None:
    with pytest.raises(ComponentDied):
        run(Scripted(ComponentDied("the engine is gone", remedy="resume")))


class Fails(SingleTurn):
    """Asks, and fails as often as it is told to."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left = times
        self.error = error

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        await episode.sample(task.prompt_ids_T)
        if self.left:
            self.left -= 1
            raise self.error
        await episode.sample([*task.prompt_ids_T, 7, 9])
        return AttemptOutcome(
            reward=0.5, turn_rewards={1: 0.5}, turn_extra={3: {"files": "+ a"}, LAST: {"tests": "cut"}}
        )


def test_an_attempt_that_is_made_again_gets_the_answers_that_it_got_before() -> None:
    engine = Scripted(chunk(7, version=0, stop_reason=StopReason.STOP))
    episode = run(engine, Fails(2, ConnectionError("gone")), retries=2)
    assert (episode.status, episode.reward) == (EpisodeStatus.FINISHED, 0.5)
    assert [prompt for prompt, _ in engine.asked] == [[5, 6], [5, 6, 7, 9]]
    assert [turn.author for turn in episode.turns] == ["task", "policy", "user", "policy"]
    assert [turn.reward for turn in episode.turns] == [None, 0.5, None, None]
    assert [turn.extra for turn in episode.turns] == [{}, {}, {}, {"files": "+ a", "tests": "cut"}]


def test_an_episode_that_is_cancelled_is_not_attempted_again_whatever_its_environment_makes_of_it() -> None:
    attempts = []

    class Clings:
        begins_with_prompt = True

        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            attempts.append(task)
            try:
                await asyncio.sleep(60)
            finally:
                raise ConnectionError("the tool server is gone")

    async def main() -> None:
        runner = EpisodeRunner(
            engine=Scripted(),
            env=Clings(),
            sampling=Sampling(max_new_tokens=8),
            run_seed=0,
            on_tokens=lambda _: None,
            retries=3,
        )
        running = asyncio.create_task(runner.run(EpisodeKey(2, 1), TASK))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtual(main())
    assert len(attempts) == 1


def test_an_attempt_is_made_again_as_often_as_allowed_and_only_where_its_environment_failed() -> None:
    engine = Scripted(chunk(7, version=0, stop_reason=StopReason.STOP))
    episode = run(engine, Fails(2, ConnectionError("gone")), retries=1)
    assert episode.cause == "env_error: ConnectionError: gone"
    spent = Fails(1, BudgetSpent("no turns are left", remedy="raise env.max_turns", reason="max_turns"))
    episode = run(engine, spent, retries=1)
    assert (episode.status, episode.cause) == (EpisodeStatus.FAILED, "max_turns: no turns are left")


def test_an_environment_that_never_asks_is_a_failed_episode() -> None:
    class Silent(SingleTurn):
        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            return AttemptOutcome(reward=1.0)

    episode = run(Scripted(), Silent())
    assert (episode.status, episode.cause.partition(":")[0]) == (EpisodeStatus.FAILED, "nothing_sampled")


def test_answers_that_were_not_chosen_carry_no_loss() -> None:
    class Chooses(SingleTurn):
        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            await episode.sample(task.prompt_ids_T)
            best = await episode.sample(task.prompt_ids_T)
            return AttemptOutcome(reward=1.0, trained=(best.turn,))

    episode = run(Scripted(chunk(7, version=0, stop_reason=StopReason.STOP)), Chooses())
    assert [turn.untrained for turn in episode.turns] == ["", "not_chosen", ""]
    (sample,) = paths(episode, 1.0)
    assert sample.mask_T.tolist() == [False, False, True]


def test_a_turn_that_two_paths_share_carries_loss_on_the_first_and_a_path_without_any_is_no_sample() -> None:
    class Branches(SingleTurn):
        async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
            await episode.sample([5])
            await episode.sample([5, 7, 8])
            await episode.sample([5, 7, 9])
            with contextlib.suppress(RequestError):
                await episode.sample([5, 7, 1])
            return AttemptOutcome(reward=1.0)

    class Refuses(Scripted):
        async def generate(
            self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
        ) -> AsyncIterator[TokenChunk]:
            if prompt_ids_T[-1] == 1:
                raise RequestError("not that", remedy="ask for something else")
            async for each in super().generate(prompt_ids_T, sampling, options):
                yield each

    episode = run(Refuses(chunk(7, version=0, stop_reason=StopReason.STOP)), Branches())
    samples = paths(episode, 1.0)
    assert [sample.tokens.ids_T.tolist() for sample in samples] == [[5, 7, 8, 7], [5, 7, 9, 7]]
    assert [sample.mask_T.tolist() for sample in samples] == [[False, True, False, True], [False, False, False, True]]
