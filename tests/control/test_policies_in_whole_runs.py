"""Policies in whole runs on fakes: bound, books, the lengths that are trained, crashes, and limits that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.messages.controller import EngineStats, StepReport
from headrace.rollout.runner import episode_seed
from headrace.testing import FakeEngine, FakeLearner, lognormal_lengths
from tests.control.lives import Life, Plan, list_groups, live

LENGTH = lognormal_lengths(60, 1.0, 600)
REJECT: dict[str, Any] = {"policy": "unbounded", "max_age": 1, "lead": 4}
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {"policy": "synchronous", "max_age": 0},
    "one ahead": {"policy": "one_ahead"},
    "windowed": {"policy": {"kind": "windowed", "window": 2}, "max_age": 3},
    "reject": REJECT,
    "reject tokens": {**REJECT, "policy": {"kind": "unbounded", "per": "token"}},
    "drop oldest": {"policy": {"kind": "unbounded", "stale": "drop_oldest"}, "max_age": 2, "lead": 1},
    "wait": {"policy": {"kind": "unbounded", "stale": "wait"}, "max_age": 2, "lead": 4},
}


def plan(run_dir: Path, flow: dict[str, Any], **changes: Any) -> Plan:
    return Plan(run_dir=run_dir, flow=flow, engine=lambda: FakeEngine(length=LENGTH), **changes)


@pytest.mark.parametrize("name", POLICIES)
def test_bound_holds_and_books_balance_over_a_crash_and_replayed_steps_train_the_same_groups(
    tmp_path: Path, name: str
) -> None:
    given = plan(tmp_path, POLICIES[name], steps=10)
    first = live(given, crash_at=25.0)
    second = live(given)
    assert second.summary.status == "finished"
    batches = {batch.step: batch for batch in first.learner.batches if batch.step < second.began_at}
    again = {batch.step: batch for batch in second.learner.batches}
    for batch in first.learner.batches:
        if batch.step in again:
            assert list_groups(batch) == list_groups(again[batch.step])
    batches |= again
    assert sorted(batches) == list(range(10))
    bound = given.settings().flow.largest_age
    assert max(int(batch.ages().max()) for batch in batches.values()) <= bound
    trained = [group for batch in batches.values() for group in list_groups(batch)]
    assert len(trained) == len(set(trained)) == 20
    tokens = second.summary.ledger.tokens
    assert tokens.submitted == tokens.trained + sum(tokens.dropped.values()) + tokens.in_flight


def ks(left: list[int], right: list[int]) -> tuple[float, float]:
    """The greatest gap between two empirical distributions, and what it stays below with 99.9% (Smirnov)."""
    grid = np.unique([*left, *right])
    shares = [np.searchsorted(np.sort(sample), grid, side="right") / len(sample) for sample in (left, right)]
    limit = 1.95 * np.sqrt((len(left) + len(right)) / (len(left) * len(right)))
    return float(np.abs(shares[0] - shares[1]).max()), float(limit)


def trained_lengths(batches: list[Batch]) -> list[int]:
    return [int(length) - 1 for batch in batches for length in batch.lengths_S]


@pytest.mark.parametrize(
    ("flow", "alike"),
    [
        ({"max_age": 3}, True),
        ({"policy": {"kind": "windowed", "window": 2}, "max_age": 3}, True),
        ({"policy": {"kind": "unbounded", "stale": "wait"}, "max_age": 3}, True),
        ({**REJECT, "max_age": 0}, False),
    ],
)
def test_lengths_trained_are_those_submitted_under_pacing_and_not_where_stale_groups_are_rejected(
    tmp_path: Path, flow: dict[str, Any], alike: bool
) -> None:
    sizes = {"groups_per_step": 4, "group_size": 4}
    life = live(
        Plan(run_dir=tmp_path, steps=24, num_tasks=5000, flow={**sizes, **flow},
             engine=lambda: FakeEngine(length=LENGTH), learner=lambda: FakeLearner(token_s=0.0005))
    )  # fmt: skip
    submitted = [LENGTH(episode_seed(1, EpisodeKey(group, 0))) for group in range(5000)]
    gap, limit = ks(trained_lengths(life.learner.batches[:18]), submitted)
    assert (gap < limit) == alike
    dropped = life.summary.ledger.groups.dropped
    assert ("stale" in dropped) == (not alike)


def test_tokens_that_are_too_old_are_masked_and_counted(tmp_path: Path) -> None:
    life = live(plan(tmp_path, POLICIES["reject tokens"], steps=20))
    masked = life.summary.ledger.tokens.dropped["stale"]
    assert masked > 0
    assert sum(record.trained_tokens for record in life.seen.steps) == life.summary.ledger.tokens.trained
    assert life.seen.steps[-1].dropped_tokens["stale"] <= masked
    assert all(max(record.ages) <= 1 for record in life.seen.steps)


def test_every_step_tells_how_far_apart_the_versions_of_its_batch_are(tmp_path: Path) -> None:
    life = live(plan(tmp_path, {"max_age": 3}, steps=12))
    spreads = [record.metrics["version_spread"] for record in life.seen.steps]
    assert spreads == [max(record.ages) - min(record.ages) for record in life.seen.steps]
    assert max(spreads) > 0
    assert all(record.metrics["version_std"] <= record.metrics["version_spread"] for record in life.seen.steps)


class CrowdedEngine(FakeEngine):
    """Preempts whenever more than so many sequences run."""

    preempted = 0

    def stats(self) -> EngineStats:
        stats = super().stats()
        self.preempted += max(0, stats.running - 12)
        return msgspec.structs.replace(stats, preempted=self.preempted, cache_blocks=100, cache_blocks_used=0)


def test_cap_that_tunes_itself_limits_what_runs_and_says_why(tmp_path: Path) -> None:
    flow = {"max_age": 8, "capacity": "auto"}
    life = live(Plan(run_dir=tmp_path, steps=40, flow=flow, engine=lambda: CrowdedEngine(length=LENGTH)))
    assert "groups: all of it is in use and nothing waits" in life.seen.texts()
    assert "sequences had to leave the cache" in life.seen.texts()
    caps = {record.metrics["capacity"] for record in life.seen.steps}
    assert min(caps) >= 2
    assert max(record.queue.running for record in life.seen.steps) < 18
    assert life.summary.status == "finished"


class DriftingLearner(FakeLearner):
    """Tells of a drift that grows with the age of what it trains."""

    async def train(self, batch: Batch) -> StepReport:
        report = await super().train(batch)
        ess = 1.0 - 0.04 * float(batch.ages().max(initial=0))
        return msgspec.structs.replace(report, metrics={"ess": ess, "stale_k3": 1e-4})


def tuned(run_dir: Path, **changes: Any) -> Life:
    flow = {"max_age": "auto", "age_tuning": {"limit": 6, "patience": 2}}
    return live(Plan(run_dir=run_dir, steps=60, flow=flow, learner=lambda: DriftingLearner(token_s=0.01)), **changes)


def test_bound_that_tunes_itself_settles_where_staleness_begins_to_cost(tmp_path: Path) -> None:
    life = tuned(tmp_path)
    assert "max_age 1 → 2: 2 good steps in a row reached it" in life.seen.texts()
    assert "max_age 3 → 2: effective sample size 0.88 < 0.9" in life.seen.texts()
    assert life.summary.max_token_age == 3
    assert {record.metrics["max_age"] for record in life.seen.steps} == {1, 2, 3}


def test_tuned_bound_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = tuned(tmp_path, stop_at=60.0)
    bound = first.controller.state.flow.state.limits.max_age
    assert 0 < first.summary.steps < 60
    assert bound > 1
    second = tuned(tmp_path)
    assert second.seen.steps[0].metrics["max_age"] in (bound - 1, bound, bound + 1)
    assert second.summary.status == "finished"
