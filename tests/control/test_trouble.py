"""What goes wrong ends the run in words, or costs what is counted; nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import (
    ComponentDied,
    DataError,
    HeadraceError,
    LedgerError,
    NothingToLearn,
    RequestError,
    StallError,
)
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import FloatColumn, IntColumn
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.control import Components
from headrace.control.board import Standstill
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.learner.base import Publication
from headrace.rollout.scoring import Scores
from headrace.testing import FakeEngine, FakeLearner, FakeScorer
from tests.control.lives import Plan, RecordingObserver, list_groups, live, run_to_failure, with_eval


async def for_ever() -> None:
    await asyncio.Event().wait()


class MuteScorer(FakeScorer):
    async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
        await for_ever()
        return await super().score(task, completions)


class MuteEngine(FakeEngine):
    """Emits nothing for rows from 8 on; the first rows are asked for by the comparison before training."""

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        if prompt_ids_T[0] >= 8:
            await for_ever()
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            yield chunk


class DeafEngine(FakeEngine):
    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        await for_ever()
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            yield chunk


class StuckLearner(FakeLearner):
    async def train(self, batch: Batch) -> StepReport:
        if batch.step == 2:
            await for_ever()
        return await super().train(batch)


class StuckCommit(FakeEngine):
    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        if version == 2:
            await for_ever()
        return await super().commit(version, mode)


class StuckPublication(FakeLearner):
    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        if publication.version == 0:
            await for_ever()
        return await super().wait_until_published(publication)


STALLS: dict[str, tuple[dict[str, Callable[[], object]], list[str]]] = {
    "scorer": ({"scorer": MuteScorer}, ["a reward has been owed by scoring workers", "rollout  waits"]),
    "engine": ({"engine": MuteEngine}, ["an episode has been owed by engine", "learner  waits"]),
    "engine before training": ({"engine": DeafEngine}, ["a comparison of logprobs has been owed by engine"]),
    "sync": ({"engine": StuckCommit}, ["sync     waits", "the commit of version 2"]),
    "first publication": ({"learner": StuckPublication}, ["sync     waits", "the announcement of version 0"]),
}


def test_learner_that_gives_no_sign_of_work_is_named_within_the_stall_timeout(tmp_path: Path) -> None:
    error = run_to_failure(Plan(run_dir=tmp_path, run={"stall_timeout_s": 20.0}, learner=StuckLearner))
    assert isinstance(error, StallError)
    for said in ("step 2 has been owed by the learner for 21 s", "learner  busy", "run.stall_timeout_s"):
        assert said in str(error)


def test_run_waits_for_a_process_that_is_stopped_and_goes_on_with_it(tmp_path: Path) -> None:
    stopped = [Standstill(words="learner (pid 7) is stopped (SIGSTOP)", stopped=True)]

    class StoppedLearner(FakeLearner):
        """Is stopped by a signal for 100 s."""

        async def train(self, batch: Batch) -> StepReport:
            if batch.step == 2:
                self._standing = stopped
                await asyncio.sleep(self.halt_s)
                self._standing = []
            return await super().train(batch)

        halt_s = 100.0
        _standing: Sequence[Standstill] = ()

    class StoppedForGood(StoppedLearner):
        halt_s = 1e9

    def with_standing(parts: Components) -> Components:
        learner = parts.learner
        assert isinstance(learner, StoppedLearner)
        return replace(parts, standstills=lambda: learner._standing)

    plan = Plan(run_dir=tmp_path, steps=4, run={"stall_timeout_s": 15.0}, parts=with_standing)
    error = run_to_failure(replace(plan, learner=StoppedForGood))
    assert isinstance(error, StallError)
    for said in ("nothing has moved for 180 s", "learner (pid 7) is stopped (SIGSTOP)"):
        assert said in str(error)
    assert live(replace(plan, learner=StoppedLearner)).summary.status == "finished"


def test_step_that_takes_longer_than_the_watchdog_waits_is_no_stall(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, steps=3, run={"stall_timeout_s": 20.0}, learner=lambda: FakeLearner(token_s=1.0))
    life = live(plan)
    assert life.summary.status == "finished"
    assert life.seconds > 3 * 20.0


def test_engine_that_steps_without_telling_is_no_stall(tmp_path: Path) -> None:
    class Thinking(FakeEngine):
        """Reads the prompt for a minute."""

        async def generate(
            self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
        ) -> AsyncIterator[TokenChunk]:
            for _ in range(6):
                await asyncio.sleep(10.0)
                self._count(steps=1)
            async for chunk in super().generate(prompt_ids_T, sampling, options):
                yield chunk

    plan = Plan(run_dir=tmp_path, steps=2, run={"stall_timeout_s": 20.0}, engine=Thinking)
    assert live(plan).summary.status == "finished"


def test_tokens_of_a_request_that_fails_halfway_stay_in_the_books(tmp_path: Path) -> None:
    class Tearing(FakeEngine):
        num_asked = 0

        async def generate(
            self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
        ) -> AsyncIterator[TokenChunk]:
            self.num_asked += 1
            torn = self.num_asked % 5 == 0
            async for chunk in super().generate(prompt_ids_T, sampling, options):
                yield chunk
                if torn:
                    raise RequestError("its logits are not finite", remedy="look at the weights")

    summary = live(Plan(run_dir=tmp_path, steps=4, flow={"max_age": 0}, engine=Tearing)).summary
    torn = summary.ledger.episodes.dropped["engine_failed"]
    assert summary.ledger.tokens.dropped["engine_failed"] == 16 * torn > 0
    assert summary.ledger.tokens.submitted == summary.tokens_generated


def test_row_whose_prompt_changed_before_a_restart_costs_its_group(tmp_path: Path) -> None:
    def other_prompts(parts: Components) -> Components:
        return replace(parts, tasks=[replace(task, prompt_ids_T=np.array([7, 7], np.int32)) for task in parts.tasks])

    plan = Plan(run_dir=tmp_path, steps=6, scorer=lambda: FakeScorer(seconds=0.0))
    live(plan, crash_at=3.3)
    summary = live(replace(plan, parts=other_prompts)).summary
    assert summary.ledger.groups.dropped["row_changed"] > 0
    assert any("has another prompt than before the restart" in text for text in summary.warnings)


@pytest.mark.parametrize("stuck", STALLS)
def test_part_that_never_answers_is_named_with_who_waits_for_it(tmp_path: Path, stuck: str) -> None:
    parts, words = STALLS[stuck]
    seen = RecordingObserver()
    error = run_to_failure(Plan(run_dir=tmp_path, run={"stall_timeout_s": 20.0}, **parts), seen=seen)
    assert isinstance(error, StallError)
    for said in (*words, "nothing has moved for 20 s", "unblocked by", "run.stall_timeout_s"):
        assert said in str(error)
    assert all(f"\n  {loop} " in str(error) for loop in ("rollout", "scoring", "learner", "sync"))


def test_evaluation_that_never_ends_is_told_before_training_begins(tmp_path: Path) -> None:
    plan = Plan(run_dir=tmp_path, scorer=MuteScorer, parts=with_eval(2), run={"stall_timeout_s": 20.0})
    error = run_to_failure(plan)
    assert isinstance(error, StallError)
    assert "answers to the held-out tasks" in str(error)


def test_slow_parts_that_go_on_moving_are_no_stall(tmp_path: Path) -> None:
    class OneAtATime(FakeScorer):
        """One worker, 8 s each: a group takes longer than the watchdog waits."""

        def __init__(self) -> None:
            super().__init__(seconds=8.0)
            self._worker = asyncio.Lock()

        async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
            async with self._worker:
                return await super().score(task, completions)

    plan = Plan(run_dir=tmp_path, steps=2, scorer=OneAtATime, parts=with_eval(4), run={"stall_timeout_s": 10.0})
    assert live(plan).summary.status == "finished"


def test_rewards_that_are_all_equal_end_the_run_with_advice(tmp_path: Path) -> None:
    seen, equal = RecordingObserver(), lambda: FakeScorer(reward=lambda _: 0.5)
    error = run_to_failure(Plan(run_dir=tmp_path, steps=50, flow={"max_idle_batches": 6}, scorer=equal), seen=seen)
    assert isinstance(error, NothingToLearn)
    assert "6 steps in a row" in str(error)
    assert "0.5" in str(error)
    assert len(seen.steps) == 6
    assert "nothing to prefer" in seen.texts("warning")


def test_some_batches_without_signal_are_no_reason_to_stop(tmp_path: Path) -> None:
    class Moody(FakeScorer):
        """Equal rewards for 4 steps of 5."""

        async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
            scores = await super().score(task, completions)
            return scores if (task.row_index // 2) % 5 == 4 else Scores(rewards=(1.0,) * len(completions))

    plan = Plan(run_dir=tmp_path, steps=20, flow={"max_idle_batches": 6, "order": "strict"}, scorer=Moody)
    assert live(plan).summary.steps == 20


def test_refused_request_costs_its_own_episode_only(tmp_path: Path) -> None:
    class Picky(FakeEngine):
        num_asked = 0

        async def generate(
            self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
        ) -> AsyncIterator[TokenChunk]:
            self.num_asked += 1
            if self.num_asked % 3 == 0:
                raise RequestError("no room for 3 tokens", remedy="ask for less")
            async for chunk in super().generate(prompt_ids_T, sampling, options):
                yield chunk

    life = live(Plan(run_dir=tmp_path, steps=4, engine=lambda: Picky(length=lambda seed: 10 + seed % 7)))
    episodes = life.summary.ledger.episodes
    assert episodes.dropped["request_refused"] > 0
    assert life.summary.steps == 4
    (warning,) = life.summary.warnings
    assert warning.startswith("episodes fail: request_refused: no room for 3 tokens (")


def long_rows(rows: set[int], length: int = 2000) -> Callable[[Components], Components]:
    def change(parts: Components) -> Components:
        tasks = [
            replace(task, prompt_ids_T=np.full(length, task.row_index, np.int32)) if task.row_index in rows else task
            for task in parts.tasks
        ]
        return replace(parts, tasks=tasks)

    return change


def test_prompts_that_do_not_fit_are_counted_and_named_by_row(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=5, parts=long_rows({1, 4, 5})))
    assert life.summary.ledger.groups.dropped == {"prompt_too_long": 3}
    assert life.summary.ledger.groups.trained == 10
    trained = {group for batch in life.learner.batches for group in list_groups(batch)}
    assert trained == set(range(13)) - {1, 4, 5}
    assert sum("do not fit" in warning for warning in life.summary.warnings) == 3
    assert any(warning.startswith("row 2: 2000 prompt tokens") for warning in life.summary.warnings)


def test_dataset_of_which_no_row_fits_is_refused_and_never_spun_on(tmp_path: Path) -> None:
    error = run_to_failure(Plan(run_dir=tmp_path, num_tasks=4, parts=long_rows(set(range(4)))))
    assert isinstance(error, DataError)
    assert "no row fits" in str(error)


def test_one_row_that_fits_is_enough(tmp_path: Path) -> None:
    life = live(Plan(run_dir=tmp_path, steps=3, num_tasks=4, parts=long_rows({0, 1, 2})))
    assert life.summary.ledger.groups.trained == 6
    assert life.summary.ledger.groups.dropped["prompt_too_long"] >= 15


class DyingLearner(FakeLearner):
    async def train(self, batch: Batch) -> StepReport:
        if batch.step == 2:
            raise ComponentDied("the learner ended with signal 9", remedy="look at logs/learner.log")
        return await super().train(batch)


class DyingSnapshot(FakeLearner):
    async def snapshot(self, version: int, slot: int) -> Publication:
        if version == 3:
            raise ComponentDied("the learner ended with signal 9", remedy="look at logs/learner.log")
        return await super().snapshot(version, slot)


class DyingSave(FakeLearner):
    async def save(self, directory: Path) -> None:
        await super().save(directory)
        raise ComponentDied("the learner ended with signal 9", remedy="look at logs/learner.log")


class DyingEngine(FakeEngine):
    async def stage(self, update: WeightUpdate) -> float:
        if update.version == 2:
            raise ComponentDied("the engine ended with signal 9", remedy="look at logs/engine.log")
        return await super().stage(update)


class DyingSampler(FakeEngine):
    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        if prompt_ids_T[0] > 9:
            raise ComponentDied("the engine ended with signal 9", remedy="look at logs/engine.log")
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            yield chunk


class DyingScorer(FakeScorer):
    async def score(self, task: Task, completions: tuple[str, ...], context: object = None) -> Scores:
        if task.row_index > 3:
            raise ComponentDied("the scorers ended with signal 9", remedy="look at logs/scorer.log")
        return await super().score(task, completions)


@pytest.mark.parametrize(
    "parts",
    [
        {"learner": DyingLearner},
        {"learner": DyingSnapshot},
        {"learner": DyingSave},
        {"engine": DyingEngine},
        {"engine": DyingSampler},
        {"scorer": DyingScorer},
    ],
    ids=lambda parts: next(iter(parts.values())).__name__,
)
def test_death_of_a_part_is_the_cause_that_is_told_and_the_run_can_go_on(
    tmp_path: Path, parts: dict[str, Callable[[], object]]
) -> None:
    error = run_to_failure(Plan(run_dir=tmp_path, steps=10, **parts))
    assert isinstance(error, ComponentDied)
    assert "ended with signal 9" in str(error)
    second = live(Plan(run_dir=tmp_path, steps=10))
    assert second.summary.ledger.groups.trained == 20


def test_snapshot_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    run_to_failure(Plan(run_dir=tmp_path, steps=10, learner=DyingSave))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_error_that_nobody_expected_ends_the_run_too(tmp_path: Path) -> None:
    class Wrong(FakeLearner):
        async def logprobs(self, batch: Batch) -> FloatColumn:
            raise ZeroDivisionError

    assert isinstance(run_to_failure(Plan(run_dir=tmp_path, learner=Wrong)), ZeroDivisionError)


def test_ledger_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    class Filling(FakeLearner):
        async def train(self, batch: Batch) -> StepReport:
            ledger = seen.controller._ledger
            (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
            ledger._db.execute(f"PRAGMA max_page_count = {pages}")
            return await super().train(batch)

    seen = RecordingObserver()
    error = run_to_failure(Plan(run_dir=tmp_path, steps=200, learner=Filling), seen=seen)
    assert isinstance(error, LedgerError)
    assert "full" in str(error)
    assert isinstance(error, HeadraceError)
