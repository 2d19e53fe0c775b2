"""Held-out attempts: what they say of a model, and how they are scored."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.clock import run_virtual
from headrace.base.errors import EnvError, EpisodeError
from headrace.base.types.episode import EpisodeGraph
from headrace.base.types.task import Task
from headrace.control import Components
from headrace.control.evaluation import (
    EvaluationListener,
    Evaluator,
    estimate_mean,
    estimate_share,
    pass_at_k,
    pass_hat_k,
)
from headrace.rollout.environments import AttemptOutcome, OpenEpisode
from headrace.rollout.scoring import Scores
from headrace.testing import FakeScorer, fake_parts
from tests.rollout.scoring.test_process_rewards import ByNumber, ThreeTurns


@given(num=st.integers(1, 8), data=st.data())
def test_pass_at_k_and_pass_hat_k_are_the_shares_of_all_choices_of_k_attempts(num: int, data: st.DataObject) -> None:
    passed = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
    k = data.draw(st.integers(1, num))
    chosen = list(itertools.combinations(passed, k))
    count = sum(passed)
    assert pass_at_k(num, count, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    assert pass_hat_k(num, count, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def test_pass_at_k_takes_as_many_attempts_as_anybody_makes() -> None:
    assert pass_at_k(10_000, 1, 1) == pytest.approx(1e-4)
    assert 0 < pass_hat_k(10_000, 9_999, 5_000) < 1


def test_intervals_hold_what_they_are_meant_to_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    for estimate, truth in ((estimate_mean, 0.0), (estimate_share, 0.9)):
        held = 0
        for _ in range(2000):
            values = rng.normal(size=40) if truth == 0.0 else rng.binomial(2, truth, size=40) / 2
            found = estimate(values.tolist())
            assert found.low is not None
            assert found.high is not None
            held += found.low <= truth <= found.high
        assert 0.92 < held / 2000 < 0.97


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_a_share_and_its_interval_stay_between_0_and_1(values: list[float]) -> None:
    found = estimate_share(values)
    assert math.isclose(found.value, sum(values) / len(values), abs_tol=1e-9)
    if len(values) == 1:
        assert found.low is found.high is None
    else:
        assert 0 <= found.low <= found.value + 1e-9
        assert found.value - 1e-9 <= found.high <= 1


def evaluated(
    directory: Path, *, samples: int, scorer: Any = None, **changes: Any
) -> tuple[list[list[float]], list[EpisodeGraph], list[str]]:
    """The rewards of three tasks, what was kept of the attempts, and the warnings."""
    kept: list[EpisodeGraph] = []
    warnings: list[str] = []

    async def keep(episode: EpisodeGraph) -> None:
        kept.append(replace(episode, turns=list(episode.turns)))

    async def main() -> list[list[float]]:
        parts: Components = fake_parts(directory, scorer=scorer)
        await parts.engine.stage(await parts.learner.wait_until_published(await parts.learner.snapshot(0, 0)))
        await parts.engine.commit(0)
        serving = replace(parts, eval_tasks=parts.tasks[:3], **changes)
        evaluator = Evaluator(serving, samples=samples, temperature=None, run_seed=0)
        async with asyncio.timeout(1000):
            return await evaluator.rewards(
                EvaluationListener(on_tokens=lambda _: None, warn=warnings.append, on_attempt=keep)
            )

    return run_virtual(main()), kept, warnings


def test_process_rewards_are_part_of_an_evaluation(tmp_path: Path) -> None:
    scorer = FakeScorer(seconds=0.1, reward=lambda _: 1.0)
    rewards, kept, warnings = evaluated(
        tmp_path, samples=2, scorer=scorer, env=ThreeTurns(), turn_scorer=ByNumber(seconds=0.5)
    )
    assert rewards == [[4.0, 4.0]] * 3  # 1 for the whole, 0 + 1 + 2 for the turns
    assert {episode.key for episode in kept} == {(task, attempt) for task in range(3) for attempt in range(2)}
    assert all(episode.parts == {"steps": 3.0} for episode in kept)
    assert [turn.reward for turn in kept[0].turns if turn.stop_reason] == [0.0, 1.0, 2.0]
    assert not warnings


def test_a_process_reward_that_fails_fails_its_attempt(tmp_path: Path) -> None:
    calls = itertools.count()
    rewards, kept, (warning,) = evaluated(
        tmp_path, samples=1, scorer=FakeScorer(reward=lambda _: 1.0), env=ThreeTurns(),
        turn_scorer=ByNumber(fails=lambda _: next(calls) == 4),
    )  # fmt: skip
    assert sorted(rewards) == [[0.0], [4.0], [4.0]]
    assert warning.startswith("1 of 3 held-out attempts failed and count as 0; 1 of them: reward_timeout: steps")
    assert sum(bool(episode.cause) for episode in kept) == 1


class Ranked(FakeScorer):
    """Wants all attempts at a task at once: each earns its place."""

    async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
        return Scores(rewards=tuple(map(float, range(len(completions)))))


def test_a_reward_of_groups_sees_all_attempts_at_a_task(tmp_path: Path) -> None:
    rewards, kept, _ = evaluated(tmp_path, samples=4, scorer=Ranked(by_group=True))
    assert rewards == [[0.0, 1.0, 2.0, 3.0]] * 3
    assert len(kept) == 12


class Earns:
    """Says itself what an episode earned; fails at some rows."""

    begins_with_prompt = True

    def __init__(self, fails: Sequence[int]) -> None:
        self._fails = fails

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        if task.row_index in self._fails:
            raise EpisodeError("no", remedy="none", reason="env_timeout")
        await episode.sample(task.prompt_ids_T)
        return AttemptOutcome(reward=0.5)


def test_attempts_that_fail_count_as_nothing_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    rewards, kept, (warning,) = evaluated(tmp_path, samples=2, env=Earns([1]))
    assert rewards == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]
    assert [episode.cause for episode in kept if episode.key.group == 1] == ["env_timeout: no"] * 2
    assert warning == "2 of 6 held-out attempts failed and count as 0; 2 of them: env_timeout: no"
    with pytest.raises(EnvError, match="no held-out task could be scored"):
        evaluated(tmp_path, samples=2, env=Earns([0, 1, 2]))
