"""Whole runs with filters: batches have exactly their size, every reason is counted, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import DataError, NothingToLearn
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control import Components, ControlSettings
from headrace.control.groups import OpenGroup
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.flow.ledger import SqliteLedger
from headrace.rollout.environments import Curriculum, CurriculumConfig
from headrace.rollout.environments.data import RowOrder
from headrace.rollout.scoring import Scores
from headrace.run.session.running import first_cause
from headrace.testing import FakeEngine, FakeScorer, lognormal_lengths
from tests.control.lives import Life, Plan, RecordingObserver, SiblingEngine, list_groups, live, run_to_failure
from tests.control.test_crash_and_resume import check_books, lives


def drawn(*parts: object) -> float:
    """A number between 0 and 1 that is always the same for the same parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class MoodyScorer(FakeScorer):
    """Rewards 0 or 1; each row has a solve rate of its own, often 0 or 1. Now and then there is no reward."""

    def __init__(self, seed: int, *, failures: float = 0.0) -> None:
        super().__init__(seconds=0.2)
        self._seed = seed
        self._failures = failures

    async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
        await asyncio.sleep(self._seconds)
        rate = np.clip(1.6 * drawn(self._seed, task.row_index) - 0.3, 0, 1)
        return Scores(rewards=tuple(self._one(task, text, float(rate)) for text in completions))

    def _one(self, task: Task, text: str, rate: float) -> float | None:
        if drawn(self._seed, "fails", task.row_index, len(text)) < self._failures:
            return None
        return float(drawn(self._seed, "solves", task.row_index, len(text)) < rate)


KINDS: dict[str, list[Any]] = {
    "zero variance": ["zero_variance"],
    "dynamic sampling": [{"kind": "dynamic_sampling", "low": 0.2, "high": 0.9}],
    "redundancy": [{"kind": "redundancy", "keep": 4}],
    "resampling": [{"kind": "resample_correct", "keep": 4}],
    "masks": [{"kind": "length", "max_tokens": 60}],
    "length": [{"kind": "length", "max_tokens": 60, "action": "leave_out"}, "zero_variance"],
    "all": [
        {"kind": "redundancy", "keep": 5},
        {"kind": "length", "max_tokens": 90},
        {"kind": "resample_correct", "keep": 4},
        "dynamic_sampling",
    ],
}


def filtered(run_dir: Path, filters: list[Any], *, seed: int = 0, **flow: Any) -> Plan:
    return Plan(
        run_dir=run_dir,
        steps=5,
        flow={"group_size": 6, "groups_per_step": 3, "filters": filters, **flow},
        scorer=lambda: MoodyScorer(seed, failures=0.05),
    )


def episodes_of(run_dir: Path, number: int) -> list[EpisodeGraph]:
    ledger = SqliteLedger.open(run_dir / "ledger.sqlite")
    try:
        return ledger.episodes(number)
    finally:
        ledger.close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**20), max_age=st.integers(0, 2), order=st.sampled_from(["strict", "ready_first"]))
def test_batch_has_exactly_its_size_and_the_books_balance(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, max_age: int, order: str
) -> None:
    plan = filtered(tmp_path_factory.mktemp("run"), KINDS[kind], seed=seed, max_age=max_age, order=order)
    life = live(plan)
    assert [len(list_groups(batch)) for batch in life.learner.batches] == [3] * 5
    groups, episodes, tokens = life.summary.ledger.groups, life.summary.ledger.episodes, life.summary.ledger.tokens
    assert groups.trained == 15
    assert groups.submitted == 15 + sum(groups.dropped.values()) + groups.in_flight
    assert episodes.submitted == 6 * groups.submitted
    assert episodes.trained == sum(len(batch.lengths_S) for batch in life.learner.batches)
    assert tokens.trained == sum(batch.num_loss_tokens for batch in life.learner.batches)
    assert tokens.submitted == tokens.trained + sum(tokens.dropped.values()) + tokens.in_flight
    gone = life.seen.controller.state.metrics.totals.set_aside
    assert all(episodes.dropped[reason] >= count for reason, count in gone.items())


@pytest.mark.parametrize("all_masked", ["keep", "replace"])
def test_groups_of_which_every_answer_is_masked_are_kept_or_made_up_for(tmp_path: Path, all_masked: str) -> None:
    plan = filtered(tmp_path, [{"kind": "length", "max_tokens": 8, "all_masked": all_masked}])
    life = live(plan)
    ledger, sizes = life.summary.ledger, [len(list_groups(batch)) for batch in life.learner.batches]
    assert ledger.groups.trained == 15
    assert ledger.groups.submitted == 15 + sum(ledger.groups.dropped.values()) + ledger.groups.in_flight
    assert ledger.tokens.trained == sum(batch.num_loss_tokens for batch in life.learner.batches)
    assert ledger.episodes.dropped["overlong"] > 0
    if all_masked == "keep":
        assert "overlong" not in ledger.groups.dropped
        assert min(sizes) < 3, "a group of which everything is masked has no sample in its batch"
    else:
        assert ledger.groups.dropped["overlong"] > 0
        assert sizes == [3] * 5


def test_run_that_masks_everything_ends_and_says_so(tmp_path: Path) -> None:
    filters = [{"kind": "length", "max_tokens": 1, "all_masked": "keep"}]
    plan = filtered(tmp_path, filters, max_idle_batches=3)
    with pytest.raises(NothingToLearn, match=r"not one answer: flow\.filters have masked all of them") as error:
        raise run_to_failure(plan)
    assert "engine.max_new_tokens" in error.value.remedy


def test_dropped_group_is_counted_in_metrics_and_summary_and_the_sampled_reward_tells_of_it(tmp_path: Path) -> None:
    life = live(filtered(tmp_path, ["zero_variance"]))
    dropped = life.summary.ledger.groups.dropped["zero_variance"]
    assert dropped > 5
    assert life.seen.steps[-1].dropped_groups["zero_variance"] <= dropped
    assert life.summary.ledger.episodes.dropped["zero_variance"] > 4 * dropped
    assert life.summary.ledger.tokens.dropped["zero_variance"] > 0
    sampled = [step.reward_sampled for step in life.seen.steps if step.reward_sampled is not None]
    trained = [step.reward_mean for step in life.seen.steps if step.reward_mean is not None]
    assert len(sampled) >= 3
    assert sampled != trained


def test_every_group_that_is_trained_passes_the_filter_and_no_other_is_dropped_for_it(tmp_path: Path) -> None:
    live(filtered(tmp_path, ["dynamic_sampling"], min_episodes=4))
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
    try:
        seen: dict[str, int] = {}
        for attempt in ledger.attempts(0):
            state, reason = ledger._db.execute(
                "SELECT state, reason FROM groups WHERE number = ?", (attempt.number,)
            ).fetchone()
            solved = 0 < sum(attempt.rewards) < len(attempt.rewards)
            if state == "released":
                assert solved
            elif reason.startswith("accuracy"):
                assert not solved
            seen[reason] = seen.get(reason, 0) + 1
        assert seen["accuracy_too_low"] > 0
        assert seen["accuracy_too_high"] > 0
    finally:
        ledger.close()


class Watched(SiblingEngine):
    """Remembers how many sequences it had at most, and how many left early."""

    withdrawn = 0

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        ended = False
        try:
            async for chunk in super().generate(prompt_ids_T, sampling, options):
                ended = chunk.stop_reason is not None
                yield chunk
        finally:
            self.withdrawn += not ended


def test_first_that_finish_are_trained_and_the_others_leave_the_engine_at_once(tmp_path: Path) -> None:
    plan = filtered(tmp_path, KINDS["redundancy"])
    plan.scorer = lambda: FakeScorer(seconds=0.2)
    plan.engine = lambda: Watched(length=lognormal_lengths(60, 1.0, 600))
    life = live(plan)
    redundant = life.summary.ledger.episodes.dropped["redundant"]
    assert redundant == 2 * life.summary.ledger.groups.trained
    assert isinstance(life.engine, Watched)
    assert 0 < life.engine.withdrawn <= redundant
    assert life.engine.stats().running == 0
    assert life.summary.ledger.tokens.dropped["redundant"] > 0
    for number in list_groups(life.learner.batches[0]):
        episodes = episodes_of(tmp_path, number)
        assert len(episodes) == 6
        trained = [episode.num_sampled for episode in episodes if episode.status is EpisodeStatus.SCORED]
        others = [episode for episode in episodes if episode.status is EpisodeStatus.LEFT_OUT]
        assert (len(trained), len(others)) == (4, 2)
        assert {episode.cause for episode in others} == {"redundant"}
        # streamed up to the moment when the fourth ended, never a whole chunk beyond it
        assert all(episode.num_sampled <= max(trained) for episode in others)
    slow = filtered(tmp_path / "without", [], group_size=4)
    slow.run_dir.mkdir()
    slow.engine, slow.scorer = plan.engine, plan.scorer
    assert life.seconds < live(slow).seconds, "redundancy takes the tail away"


def test_group_that_has_enough_takes_no_more(tmp_path: Path) -> None:
    group = OpenGroup(number=0, task=_task(), size=4, first=2)
    episodes = [_finished(place) for place in range(4)]
    for episode in episodes:
        group.record_finished(episode)
    assert [episode.status for episode in episodes] == [EpisodeStatus.FINISHED] * 2 + [EpisodeStatus.LEFT_OUT] * 2


def _task() -> Task:
    return Task(row_index=0, row={}, prompt="", prompt_ids_T=np.array([0], np.int32))


def _finished(place: int) -> EpisodeGraph:
    return EpisodeGraph(key=EpisodeKey(0, place), status=EpisodeStatus.FINISHED)


def test_masked_episode_moves_the_baseline_and_carries_no_loss(tmp_path: Path) -> None:
    plan = filtered(tmp_path, KINDS["masks"], max_age=0)
    plan.scorer = lambda: FakeScorer(seconds=0.1)
    life = live(plan)
    batch = life.learner.batches[0]
    advantages: list[float] = []
    for number in list_groups(batch):
        counted = [(e, e.reward) for e in episodes_of(tmp_path, number) if e.reward is not None]
        mean = sum(reward for _, reward in counted) / len(counted)
        advantages += [reward - mean for e, reward in counted if e.status is EpisodeStatus.SCORED]
    starts = np.concatenate([[0], np.cumsum(batch.lengths_S)[:-1]])
    assert batch.advantages_N[starts + 1].tolist() == pytest.approx(advantages)
    assert life.summary.ledger.episodes.dropped["overlong"] > 0


def test_filter_that_lets_nothing_pass_ends_the_run_with_advice(tmp_path: Path) -> None:
    plan = filtered(tmp_path, ["zero_variance"], max_idle_batches=4)
    plan.scorer = lambda: FakeScorer(seconds=0.1, reward=lambda _: 0.25)
    seen = RecordingObserver()
    error = run_to_failure(plan, seen=seen)
    assert isinstance(error, NothingToLearn)
    assert "filters dropped 12 groups in a row and kept none: 12 zero_variance; all 72 rewards were 0.25" in str(error)
    for advice in ("whether the reward function works", "raise flow.group_size", "flow.max_idle_batches", "--resume"):
        assert advice in error.remedy
    assert "filters dropped 6 groups in a row" in seen.texts("warning")
    assert seen.controller.state.flow.state.dropped == {"zero_variance": 12}


def test_rewards_that_never_pass_though_they_differ_are_described(tmp_path: Path) -> None:
    plan = filtered(tmp_path, [{"kind": "dynamic_sampling", "threshold": 5.0}], max_idle_batches=4)
    plan.scorer = lambda: FakeScorer(seconds=0.1)
    error = run_to_failure(plan)
    assert isinstance(error, NothingToLearn)
    assert "12 accuracy_too_low; 72 rewards between 0 and 1" in str(error)
    assert "threshold" in error.remedy


def test_long_drought_that_ends_is_no_reason_to_stop(tmp_path: Path) -> None:
    class Late(FakeScorer):
        async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
            scores = await super().score(task, completions)
            return scores if task.row_index % 10 == 9 else Scores(rewards=(1.0,) * len(completions))

    plan = filtered(tmp_path, ["zero_variance"], max_idle_batches=8)
    plan.scorer = lambda: Late(seconds=0.1)
    summary = live(plan).summary
    assert summary.status == "finished"
    assert summary.ledger.groups.dropped["zero_variance"] > 100


def with_rows(plan: Plan, *, epochs: int | None = None, curriculum: CurriculumConfig | None = None) -> Plan:
    """The plan with the orders of a run file."""
    rows = plan.num_tasks

    @dataclass(kw_only=True)
    class Rowed(Plan):
        def settings(self) -> ControlSettings:
            given = super().settings()
            made = None
            if curriculum is not None:
                made = Curriculum(curriculum, num_rows=rows, seed=3, epochs=epochs)
            return replace(given, order=RowOrder(num_rows=rows, seed=3, shuffle=True, epochs=epochs), curriculum=made)

    return Rowed(**{name: getattr(plan, name) for name in Plan.__dataclass_fields__})


@pytest.mark.parametrize("curriculum", [None, CurriculumConfig()])
@pytest.mark.parametrize("max_age", [0, 2])
def test_rows_that_are_used_up_end_the_run_in_words(
    tmp_path: Path, max_age: int, curriculum: CurriculumConfig | None
) -> None:
    plan = filtered(tmp_path, ["zero_variance"], max_age=max_age)
    plan.steps, plan.num_tasks = 50, 20
    summary = live(with_rows(plan, epochs=1, curriculum=curriculum)).summary
    assert summary.status == "finished"
    assert 0 < summary.steps < 6
    assert summary.ledger.groups.submitted == 20
    assert summary.ledger.groups.in_flight == 20 - 3 * summary.steps - sum(summary.ledger.groups.dropped.values()) < 3
    for said in (f"data.epochs is used up after {summary.steps} of 50 steps", "20 groups were attempted", "--resume"):
        assert said in summary.cause
    assert summary.cause in summary.warnings
    more = live(with_rows(plan, epochs=2, curriculum=curriculum)).summary
    assert more.ledger.groups.submitted == 40
    assert more.steps > summary.steps


def test_curriculum_that_picks_only_rows_that_do_not_fit_ends_the_run_in_words(tmp_path: Path) -> None:
    only_unseen = CurriculumConfig(hard=0.0, target=0.0, easy=0.0)

    def long_rows(parts: Components) -> Components:
        tasks = [
            replace(task, prompt_ids_T=np.full(2000, 0, np.int32)) if task.row_index % 2 else task
            for task in parts.tasks
        ]
        return replace(parts, tasks=tasks)

    plan = filtered(tmp_path, [])
    plan.steps, plan.num_tasks, plan.parts = 50, 8, long_rows
    with pytest.raises(ExceptionGroup) as caught:
        live(with_rows(plan, curriculum=only_unseen))
    cause = first_cause(caught.value)
    assert isinstance(cause, DataError)
    assert "no row that the curriculum still picks fits the context of" in str(cause)


def test_rows_are_visited_again_where_no_bound_is_set(tmp_path: Path) -> None:
    plan = filtered(tmp_path, ["zero_variance"])
    plan.num_tasks = 4
    plan.scorer = lambda: FakeScorer(seconds=0.1)
    assert live(with_rows(plan)).summary.status == "finished"


def test_attempt_that_hangs_costs_its_own_episode_when_its_time_is_up(tmp_path: Path) -> None:
    class Stuck(FakeEngine):
        num_asked = 0

        async def generate(
            self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
        ) -> AsyncIterator[TokenChunk]:
            self.num_asked += 1
            hangs = self.num_asked % 7 == 0
            async for chunk in super().generate(prompt_ids_T, sampling, options):
                yield chunk
                if hangs:
                    await asyncio.Event().wait()

    plan = filtered(tmp_path, [])
    plan.engine = Stuck
    plan.parts = lambda parts: replace(parts, episode_timeout_s=20.0)
    summary = live(plan).summary
    assert summary.status == "finished"
    timed_out = summary.ledger.episodes.dropped["env_timeout"]
    assert timed_out > 3
    assert summary.ledger.tokens.dropped["env_timeout"] == 16 * timed_out
    assert any("env.timeout_s=20.0 s" in warning for warning in summary.warnings)


@pytest.mark.parametrize("kind", ["redundancy", "all", "length"])
@pytest.mark.parametrize("seed", range(3))
def test_crashes_lose_nothing_and_train_nothing_twice(tmp_path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    plan = filtered(tmp_path, KINDS[kind], seed=seed, max_age=rng.randrange(3), groups_per_step=2)
    plan.run = {"checkpoint_every": rng.choice([1, 2, 20])}
    lived, lineage = lives(plan, rng, crashes=4, longest_s=10.0)
    check_books(lived[-1], lineage, 5)


@pytest.mark.parametrize("seed", range(4))
def test_curriculum_picks_the_same_rows_over_crashes_in_a_synchronous_run(tmp_path: Path, seed: int) -> None:
    def plan(name: str) -> Plan:
        (tmp_path / name).mkdir()
        made = filtered(tmp_path / name, ["zero_variance"], seed=seed, max_age=0, order="strict", groups_per_step=2)
        made.steps, made.num_tasks = 8, 16
        made.run = {"checkpoint_every": 3}
        return with_rows(made, curriculum=CurriculumConfig(rest=0.5))

    def rows(life: Life, run_dir: Path) -> list[int]:
        ledger = SqliteLedger.open(run_dir / "ledger.sqlite")
        try:
            return [attempt.row for attempt in ledger.attempts(0)]
        finally:
            ledger.close()

    undisturbed = live(plan("undisturbed"))
    lived, _ = lives(plan("disturbed"), random.Random(seed), crashes=5, longest_s=14.0)
    assert len(lived) >= 4
    assert rows(lived[-1], tmp_path / "disturbed") == rows(undisturbed, tmp_path / "undisturbed")
    assert lived[-1].learner.weights == undisturbed.learner.weights
    states = []
    for life in (undisturbed, lived[-1]):
        curriculum = life.controller.state.curriculum
        assert curriculum is not None
        curriculum.pick(10**6, 10**6)  # looks at all outcomes
        states.append(curriculum.state())
    assert states[0] == states[1]
