"""Runs on fakes whose learner reads the tokens of its batches in the store: they train the same as without a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import StoreError
from headrace.base.store import COLUMNS, StoreReader
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline, GroupOutline
from headrace.base.types.scored import ScoredGroup
from headrace.control.loops import scoring
from headrace.flow import Flow
from headrace.flow import ready as ready_module
from headrace.flow.layout import lay_out
from headrace.flow.ledger import ResumeState
from headrace.flow.ready import ReadyColumns
from headrace.testing import FakeEngine, FakeLearner, lognormal_lengths
from tests.control.lives import Plan, live, run_to_failure


class ReadingLearner(FakeLearner):
    """Reads the tokens of each group where the outline says that they lie."""

    def __init__(self, directory: Path) -> None:
        super().__init__(token_s=0.002)
        self._directory = directory / COLUMNS
        self.num_read = 0

    async def step(self, outline: BatchOutline) -> StepReport:
        reader = StoreReader(self._directory)

        def read(group: GroupOutline) -> memoryview:
            if isinstance(group.columns, memoryview):
                return group.columns
            self.num_read += 1
            return reader.part(group.columns)

        laid_out = lay_out(outline, read)
        return laid_out.complete_report(await self.train(laid_out.batch))


def plan_of(directory: Path, **changes: Any) -> Plan:
    directory.mkdir(exist_ok=True)
    return Plan(
        run_dir=directory,
        steps=8,
        engine=lambda: FakeEngine(length=lognormal_lengths(40, 1.2, 300)),
        learner=lambda: ReadingLearner(directory),
        parts=lambda parts: replace(parts, columns_shared=True),
        **changes,
    )


@pytest.fixture
def store_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group is stored, however small, and a file has few of them."""
    monkeypatch.setattr(ready_module, "INLINE_TOKENS", 0)
    monkeypatch.setitem(ReadyColumns.__init__.__kwdefaults__, "file_bytes", 4000)


@pytest.mark.usefixtures("store_all")
@pytest.mark.parametrize("policy", [{}, {"policy": {"kind": "unbounded", "stale": "drop_oldest"}, "max_age": 2}])
def test_a_run_trains_the_same_with_tokens_in_the_store_as_in_memory(tmp_path: Path, policy: dict[str, Any]) -> None:
    stored = live(plan_of(tmp_path / "stored", flow=policy))
    plain = live(replace(plan_of(tmp_path / "plain", flow=policy), parts=lambda parts: parts))
    assert isinstance(stored.learner, ReadingLearner)
    assert stored.learner.num_read == 16
    assert stored.learner.weights == plain.learner.weights
    assert stored.summary.ledger == plain.summary.ledger
    assert [step.metrics for step in stored.seen.steps] == [step.metrics for step in plain.seen.steps]
    assert os.listdir(tmp_path / "stored" / COLUMNS) == [], "no file is left behind"


@pytest.mark.usefixtures("store_all")
def test_files_are_removed_while_the_run_goes_on(tmp_path: Path) -> None:
    most: list[int] = []
    seen: set[str] = set()

    class Counting(ReadingLearner):
        async def step(self, outline: BatchOutline) -> StepReport:
            report = await super().step(outline)
            most.append(len(os.listdir(tmp_path / COLUMNS)))
            seen.update(os.listdir(tmp_path / COLUMNS))
            return report

    live(replace(plan_of(tmp_path), steps=40, learner=lambda: Counting(tmp_path)))
    assert max(most) < len(seen) / 3


@pytest.mark.usefixtures("store_all")
@pytest.mark.parametrize("seed", range(6))
def test_each_batch_is_read_through_crashes_that_leave_files_behind(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear: Callable[[ReadyColumns], None] = ReadyColumns.clear

    def unless_crashed(store: ReadyColumns) -> None:  # a killed process removes nothing
        if store._store is None:
            clear(store)

    monkeypatch.setattr(ReadyColumns, "clear", unless_crashed)
    rng, lives = np.random.default_rng(seed), 0
    plan = replace(plan_of(tmp_path, flow={"record_tokens": 16, "max_age": 3}), steps=16)
    life = live(plan, crash_at=float(rng.uniform(1, 5)))
    lineage = {batch.step: batch for batch in life.learner.batches}
    while not life.ended:
        lives += 1
        life = live(plan, crash_at=float(rng.uniform(2, 6)) if lives < 8 else None)
        lineage |= {batch.step: batch for batch in life.learner.batches}
    assert lives
    assert life.summary.ledger.groups.trained == 32
    assert set(life.summary.ledger.tokens.dropped) <= {"discarded", "crash", "restarted"}
    replayed = FakeLearner(token_s=0.0)
    for step in range(16):
        replayed._learn(lineage[step])
    assert replayed.weights == life.learner.weights


def full_at(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[int], bool]) -> None:
    """The store has no room for the groups whose number ``is_full`` returns true for."""
    put: Callable[[ReadyColumns, ScoredGroup], ScoredGroup] = ReadyColumns.put

    def limited(store: ReadyColumns, group: ScoredGroup) -> ScoredGroup:
        if is_full(group.number):
            raise StoreError("the store is full", remedy="make room")
        return put(store, group)

    monkeypatch.setattr(ReadyColumns, "put", limited)


@pytest.mark.usefixtures("store_all")
def test_a_group_that_cannot_be_stored_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_at(monkeypatch, lambda number: number in (1, 4, 5))
    life = live(plan_of(tmp_path))
    assert life.ended
    assert life.summary.ledger.groups.trained == 16
    assert life.summary.ledger.groups.dropped == {"store_full": 3}
    assert life.summary.ledger.tokens.dropped["store_full"] > 0
    assert any("a group was dropped: the store is full; make room" in words for words in life.summary.warnings)


@pytest.mark.usefixtures("store_all")
def test_a_store_that_stays_full_ends_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_at(monkeypatch, lambda number: number >= 4)
    error = run_to_failure(plan_of(tmp_path))
    assert isinstance(error, StoreError)
    assert "groups in a row were dropped (store_full); the last: the store is full" in error.problem
    assert error.remedy == "make room, then --resume"


@pytest.mark.usefixtures("store_all")
def test_short_groups_that_need_no_store_do_not_hide_that_it_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_even(group: ScoredGroup) -> bool:
        return group.number % 2 == 0

    for module in (ready_module, scoring):
        monkeypatch.setattr(module, "is_stored", is_even)
    full_at(monkeypatch, lambda number: number % 2 == 0)
    error = run_to_failure(plan_of(tmp_path, flow={"max_failed_groups": 4}))
    assert isinstance(error, StoreError)
    assert "4 groups in a row were dropped (store_full)" in error.problem


@pytest.mark.usefixtures("store_all")
def test_a_resumed_run_for_whose_ready_groups_the_store_has_no_room_trains_them_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, with_room = (plan_of(tmp_path / name, flow={"max_age": 3}) for name in ("full", "with_room"))
    restoring = [False]
    for each in (plan, with_room):
        assert not live(each, crash_at=5.0).ended  # one group is ready, and two are taken
    whole = live(with_room)
    restore: Callable[..., str] = Flow.restore

    def restored(flow: Flow, step: int, resumed: ResumeState) -> str:
        restoring[0] = True
        why = restore(flow, step, resumed)
        restoring[0] = False
        return why

    monkeypatch.setattr(Flow, "restore", restored)
    full_at(monkeypatch, lambda _: restoring[0])
    life = live(plan)
    assert life.ended
    assert life.summary.ledger.groups.dropped == {}
    assert life.learner.weights == whole.learner.weights
    (warning,) = [words for words in life.summary.warnings if "the store is full; make room" in words]
    assert "ready groups stay in memory until they are trained" in warning
