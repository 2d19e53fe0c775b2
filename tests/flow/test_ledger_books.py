"""The SQLite ledger under random histories: its books against a recount, its memory against a second opinion."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.flow import FlowConfig, GroupBatch
from headrace.flow.ledger import ResumeState, SqliteLedger, UnitCounts
from headrace.flow.ledger.base import Operation
from tests.flow.dict_ledger import DictLedger, Row
from tests.flow.driver import Driver
from tests.flow.episodes import as_told, ended, sampled

CAUSES = ("reward_error: line 3", "reward_nan", "request_refused: too long: by 3")
TRAINED = (GroupState.TRAINED, GroupState.RELEASED)


class BothLedgers(DictLedger):
    """Writes everything twice, and recalls it twice."""

    def __init__(self, path: Path, config: FlowConfig) -> None:
        super().__init__()
        self.path = path
        self.config = config
        self.sqlite = self._open()

    def _open(self) -> SqliteLedger:
        return SqliteLedger(self.path, group_size=self.config.group_size, groups_per_step=self.config.groups_per_step)

    def write(self, operation: Operation) -> None:
        super().write(operation)
        self.sqlite.apply(operation)

    def roll_back(self, step: int) -> ResumeState:
        self.sqlite.close()
        self.sqlite = self._open()
        mine, found = super().roll_back(step), self.sqlite.roll_back(step)
        assert told(mine) == told(found)
        return found


def told(resumed: ResumeState) -> tuple[object, ...]:
    groups = [
        (
            group.number,
            group.row,
            group.state,
            group.oldest_version if group.state is GroupState.READY else None,
            group.step,
            [as_told(episode) for episode in group.episodes],
        )
        for group in resumed.groups
    ]
    return (resumed.num_submitted, resumed.num_released, resumed.dropped, groups)


class BookDriver(Driver):
    """Episodes with tokens, and a learner that cannot use all of them."""

    ledger: BothLedgers

    def __init__(self, config: FlowConfig, *, rng: random.Random, ledger: BothLedgers) -> None:
        self.unusable: dict[int, int] = {}
        self.checked = 0
        super().__init__(config, steps=4, rng=rng, ledger=ledger)

    def make_episode(self, key: EpisodeKey, versions: tuple[int, int], *, failed: bool) -> EpisodeGraph:
        tokens = sampled(self.rng.randrange(2, 9), versions, seed=self.rng.randrange(1 << 30))
        cause = self.rng.choice(CAUSES) if failed else ""
        return ended(key.group, key.place, tokens=tokens, reward=self.rng.random(), cause=cause)

    def report(self, batch: GroupBatch) -> StepReport:
        step = batch.step
        tokens = sum(episode.num_sampled for group in batch.groups for episode in group.scored)
        self.unusable[step] = self.rng.randrange(3)
        return StepReport(
            step=step,
            metrics={},
            trained_tokens=tokens - self.unusable[step],
            dropped_tokens={"not_finite": self.unusable[step]} if self.unusable[step] else {},
            log_pi_N=np.zeros(0, np.float32),
            seconds=0.0,
        )

    def crash(self) -> bool:
        self.unusable = {step: lost for step, lost in self.unusable.items() if step < self.checkpoint}
        return super().crash()

    def check(self) -> None:
        super().check()
        books = self.ledger.sqlite.conservation()
        assert books.holds
        lost = sum(self.unusable.values())
        assert books.groups == count_groups(self.ledger.rows)
        assert books.episodes == count_episodes(self.ledger.rows, self.config.group_size)
        assert books.tokens == count_tokens(self.ledger.rows, lost)
        self.checked += 1


def count_groups(rows: dict[int, Row]) -> UnitCounts:
    fates = UnitCounts(submitted=len(rows))
    for row in rows.values():
        fates.trained += row.state in TRAINED
        fates.in_flight += row.state.in_flight
        if row.state is GroupState.DROPPED:
            fates.dropped[row.reason] = fates.dropped.get(row.reason, 0) + 1
    return fates


def count_episodes(rows: dict[int, Row], size: int) -> UnitCounts:
    fates, dropped = UnitCounts(submitted=size * len(rows)), Counter[str]()
    for row in rows.values():
        for place in range(size):
            count_one(fates, dropped, row, row.episodes.get(place), amount=1)
    fates.dropped = dict(dropped)
    return fates


def count_tokens(rows: dict[int, Row], lost: int) -> UnitCounts:
    fates, dropped = UnitCounts(trained=-lost), Counter({"not_finite": lost} if lost else {})
    for row in rows.values():
        for episode in row.episodes.values():
            fates.submitted += episode.num_sampled
            count_one(fates, dropped, row, episode, amount=episode.num_sampled)
    fates.dropped = dict(dropped)
    return fates


def count_one(fates: UnitCounts, dropped: Counter[str], row: Row, episode: EpisodeGraph | None, *, amount: int) -> None:
    if episode is not None and episode.status is EpisodeStatus.FAILED:
        dropped[episode.cause.split(":")[0]] += amount
    elif row.state is GroupState.DROPPED:
        dropped[row.reason] += amount
    elif row.state in TRAINED:
        fates.trained += amount
    else:
        fates.in_flight += amount


@pytest.mark.parametrize("seed", range(24))
def test_books_and_memory_agree_with_a_second_count_after_every_event(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    max_age = rng.randrange(4)
    config = FlowConfig(
        groups_per_step=2,
        group_size=3,
        max_age=max_age,
        lead=rng.randrange(max_age + 1),
        order=rng.choice(("strict", "ready_first")),
    )
    ledger = BothLedgers(tmp_path / "ledger.sqlite", config)
    driver = BookDriver(config, rng=rng, ledger=ledger)
    driver.random_events(120)
    driver.finish()
    driver.check_end()
    assert driver.checked > 40
    ledger.sqlite.close()
