"""Whole runs on fakes with groups of one: rewards are compared over the batch."""

from __future__ import annotations

from pathlib import Path

from headrace.base.errors import NothingToLearn
from headrace.testing import FakeScorer
from tests.control.lives import Plan, live
from tests.control.test_trouble import run_to_failure


def test_groups_of_one_have_signal_where_the_rewards_of_a_batch_differ(tmp_path: Path) -> None:
    flow = {"max_idle_batches": 2, "group_size": 1, "min_episodes": 1}
    better = iter(range(1_000_000))
    plan = Plan(run_dir=tmp_path, steps=6, flow=flow, scorer=lambda: FakeScorer(reward=lambda _: next(better)))
    assert live(plan).summary.status == "finished"


def test_equal_rewards_are_no_reason_to_end_where_a_teacher_says_what_to_prefer(tmp_path: Path) -> None:
    plan = Plan(
        run_dir=tmp_path,
        steps=6,
        has_teachers=True,
        flow={"max_idle_batches": 2},
        scorer=lambda: FakeScorer(reward=lambda _: 0.5),
    )
    assert live(plan).summary.status == "finished"


def test_groups_of_one_whose_rewards_are_all_equal_end_the_run(tmp_path: Path) -> None:
    flow = {"max_idle_batches": 4, "group_size": 1, "min_episodes": 1}
    plan = Plan(run_dir=tmp_path, steps=50, flow=flow, scorer=lambda: FakeScorer(reward=lambda _: 0.5))
    error = run_to_failure(plan)
    assert isinstance(error, NothingToLearn)
    assert "in 4 steps in a row all episodes of a batch got the same reward" in str(error)
