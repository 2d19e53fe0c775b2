"""Groups whose episodes all fail end the run, in words that say why and whom to look at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.base.errors import EnvError, RequestError
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.rollout.scoring import Scores
from headrace.testing import FakeEngine, FakeScorer
from tests.control.lives import Plan, RecordingObserver, run_to_failure, with_eval


def test_reward_that_always_fails_ends_the_run_with_its_words(tmp_path: Path) -> None:
    class Broken(FakeScorer):
        async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
            await asyncio.sleep(0.1)
            return Scores(rewards=(), failure="reward_error: my_reward.py:7: KeyError: 'answer'")

    seen = RecordingObserver()
    error = run_to_failure(Plan(run_dir=tmp_path, flow={"max_failed_groups": 5}, scorer=Broken), seen=seen)
    assert isinstance(error, EnvError)
    assert "5 groups in a row" in str(error)
    assert "my_reward.py:7: KeyError" in str(error)
    assert seen.controller.state.flow.state.dropped == {"reward_error": 5}


def test_reward_that_is_none_for_every_answer_ends_the_run_with_what_none_means(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, flow={"max_failed_groups": 5}, scorer=lambda: FakeScorer(reward=lambda _: None))
    seen = RecordingObserver()
    error = run_to_failure(plan, seen=seen)
    assert isinstance(error, EnvError)
    assert "the reward function returned None for the last, and None means that an answer does not count" in str(error)
    assert "whether it returns what it has computed" in error.remedy
    assert seen.controller.state.flow.state.dropped == {"reward_none": 5}


def test_engine_that_refuses_everything_is_what_the_remedy_names(tmp_path: Path) -> None:
    class ClosedGroup(FakeEngine):
        async def generate(
            self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
        ) -> AsyncIterator[TokenChunk]:
            await asyncio.sleep(0.1)
            raise RequestError("no such adapter", remedy="load it")
            yield

    error = run_to_failure(Plan(run_dir=tmp_path, flow={"max_failed_groups": 5}, engine=ClosedGroup))
    assert isinstance(error, EnvError)
    assert "request_refused: no such adapter" in str(error)
    assert "look at what is asked of the engine" in error.remedy
    assert "reward" not in error.remedy


def test_held_out_rewards_that_all_fail_end_the_run(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, parts=with_eval(3), scorer=lambda: FakeScorer(reward=lambda _: None))
    assert isinstance(run_to_failure(plan), EnvError)
