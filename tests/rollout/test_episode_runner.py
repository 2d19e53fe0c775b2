"""One episode: token for token what the engine sampled, from a seed of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from headrace.clock import run_virtual
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.env import SingleTurn
from headrace.errors import ComponentDied, RequestError
from headrace.rollout import EpisodeRunner
from headrace.rollout.runner import episode_seed
from headrace.testing import FakeEngine
from headrace.types.episode import Episode, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.types.sampling import Sampling
from headrace.types.task import Task
from headrace.types.tokens import IntColumn, Tokens

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


def run(engine: Scripted, env: object = None, arrived: list[int] | None = None) -> Episode:
    runner = EpisodeRunner(
        engine=engine,
        env=env or SingleTurn(),
        sampling=Sampling(max_new_tokens=8, temperature=0.7),
        run_seed=3,
        on_tokens=([] if arrived is None else arrived).append,
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
        async def run(self, task: Task, policy: object) -> list[Turn]:
            first = await policy.sample(task.prompt_ids_T, parent=0)
            return [first, await policy.sample(task.prompt_ids_T, parent=0)]

    engine = Scripted(chunk(7, version=0, stop_reason=StopReason.STOP))
    run(engine, TwoTurns())
    assert [sampling.seed for _, sampling in engine.asked] == [episode_seed(3, EpisodeKey(2, 1), t) for t in (0, 1)]


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
