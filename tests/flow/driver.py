"""A flow driven through random histories: every event in any order, crashes included, checked after each.

The ledger is a dictionary, so that thousands of histories take seconds; what it recalls after a crash is written here a
second time, from the words of the contract.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.base.types.episode import EpisodeKey, EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import ScoredGroup
from headrace.flow import Admission, Flow, FlowConfig, GroupBatch
from headrace.flow.policies.deadlines import compute_needed_age
from headrace.flow.state import FlowState
from tests.flow.dict_ledger import DictLedger, Tried

ORDERED_AHEAD = 2
"""Batches that may be taken and not trained yet."""
MANY_ROUNDS = 500
"""Of all events: in a fifth of these every run ends. More would make the search for a short history that never ends,
each try of which goes through all of them, take many minutes."""


class StillClock:
    """Time does not matter to a flow."""

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 0.0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A group that runs in this life."""

    admission: Admission
    from_version: int
    """Committed when it was admitted: nothing sampled from now on is older."""
    started: bool = False
    episodes: dict[int, Any] = field(default_factory=dict)


class Driver:
    """One run over all its lives; each method is one event and checks what must hold after it."""

    def __init__(self, config: FlowConfig, *, steps: int, rng: random.Random, ledger: DictLedger | None = None) -> None:
        self.config = config
        self.steps = steps
        self.rng = rng
        self.ledger = ledger or DictLedger()
        self.lineage: dict[int, tuple[int, ...]] = {}
        """The groups of every step that the present weights contain."""
        self.batches: dict[int, tuple[int, ...]] = {}
        """The groups of every step that was ever taken."""
        self.checkpoint = 0
        self.overlaps = 0
        """Batches that were trained while other groups ran."""
        self.max_age = 0
        self.saved_bound: int | None = None
        self.newest_sampled = -1
        self.crashed = False
        self._begin()

    def _begin(self) -> None:
        self.flow = Flow(
            self.config, writer=self.ledger, clock=StillClock(), last_step=self.steps, pick_row=lambda number: number
        )
        self.flow.restore(self.checkpoint, self.ledger.roll_back(self.checkpoint))
        self.running: dict[int, Attempt] = {}
        self.taken: list[GroupBatch] = []
        self.num_trained = self.checkpoint
        self.earlier_bounds: list[tuple[int, int]] = []
        """(bound, newest version while it held) of bounds that hold no more."""
        if self.config.max_age == "auto":
            self.flow.resume_max_age(self.saved_bound)
            self.earlier_bounds.append((self.config.largest_age, self.newest_sampled))
        self.bound = self.flow.state.limits.max_age
        self.check()

    # --- events

    def admit(self) -> bool:
        admissions = self.flow.admit()
        for admission in admissions:
            assert admission.row == admission.number
            attempt = Attempt(admission=admission, from_version=self.flow.state.version)
            attempt.episodes.update({episode.key.place: episode for episode in admission.ended})
            self.running[admission.number] = attempt
        return bool(admissions)

    def start(self) -> bool:
        waiting = [number for number, attempt in self.running.items() if not attempt.started]
        if waiting:
            number = self.rng.choice(waiting)
            self.flow.start(number)
            self.running[number].started = True
        return bool(waiting)

    def end_episode(self, *, failures: float = 0.0) -> bool:
        """One more episode of any running group ends; the last one closes the group."""
        started = [number for number, attempt in self.running.items() if attempt.started]
        if not started:
            return False
        number = self.rng.choice(started)
        attempt = self.running[number]
        left = [place for place in range(self.config.group_size) if place not in attempt.episodes]
        if left:
            key = EpisodeKey(number, self.rng.choice(left))
            failed = self.rng.random() < failures
            self.newest_sampled = max(self.newest_sampled, self.flow.state.version)
            episode = self.make_episode(key, (attempt.from_version, self.flow.state.version), failed=failed)
            attempt.episodes[episode.key.place] = episode
            self.flow.end_episode(episode)
        if len(attempt.episodes) == self.config.group_size and self.rng.random() < 0.8:
            self._close(number)
        return True

    def make_episode(self, key: EpisodeKey, versions: tuple[int, int], *, failed: bool) -> Any:
        """An ended episode whose tokens were sampled under ``versions``."""
        return Tried(key=key, status=EpisodeStatus.FAILED if failed else EpisodeStatus.SCORED, sampled_under=versions)

    def report(self, taken: GroupBatch) -> StepReport:
        """What the learner says of a step."""
        nothing = np.zeros(0, np.float32)
        return StepReport(
            step=taken.step, metrics={}, trained_tokens=1, dropped_tokens={}, log_pi_N=nothing, seconds=0.0, ages={0: 1}
        )

    def _close(self, number: int) -> None:
        episodes = self.running.pop(number).episodes
        group = ScoredGroup(number=number, episodes=tuple(episodes[place] for place in sorted(episodes)))
        if len(group.scored) >= self.config.min_episodes:
            self.flow.add_scored(group)
        else:
            self.flow.drop(number, "failed")

    def drop(self) -> bool:
        """A group cannot be run at all, or its time is over."""
        if not self.running:
            return False
        number = self.rng.choice(list(self.running))
        del self.running[number]
        self.flow.drop(number, "timeout")
        return True

    def take(self) -> bool:
        if len(self.taken) >= ORDERED_AHEAD:
            return False
        left = sum(self.flow.state.dropped.values())
        taken = self.flow.take()
        if taken is None:
            return sum(self.flow.state.dropped.values()) > left
        step, groups = taken.step, taken.groups
        assert step == self.flow.state.next_step - 1
        numbers = tuple(group.number for group in groups)
        assert len(set(numbers)) == len(numbers) == self.config.groups_per_step
        assert self.batches.setdefault(step, numbers) == numbers, "a replayed step has other groups than before"
        floor = -1 if taken.oldest_version is None else taken.oldest_version
        for group in groups:
            versions = [v for episode in group.scored for v in episode.versions() if v >= floor]
            assert versions, "nothing of it is left to train"
            ages = [step - version for version in versions]
            assert min(ages) >= 0
            assert max(ages) <= self.allowed(min(versions)), f"step {step} would train group {group.number}"
            assert max(ages) <= self.config.largest_age
            self.max_age = max(self.max_age, *ages)
        self.taken.append(taken)
        return True

    def allowed(self, version: int) -> int:
        """The greatest bound that held since ``version`` came into use."""
        return max([self.bound, *(bound for bound, last in self.earlier_bounds if last >= version)])

    def tune(self) -> bool:
        """A bound that tunes itself moves."""
        if self.config.max_age != "auto":
            return False
        self.earlier_bounds.append((self.bound, self.flow.state.version))
        self.bound = self.rng.randrange(1, self.config.largest_age + 1)
        self.flow.set_max_age(self.bound)
        return True

    def throttle(self) -> bool:
        """A cap that tunes itself moves."""
        if self.config.capacity != "auto":
            return False
        self.flow.set_capacity(self.rng.randrange(self.config.groups_per_step, 4 * self.config.groups_per_step))
        return True

    def train(self) -> bool:
        if not self.taken:
            return False
        taken = self.taken.pop(0)
        groups, report = taken.groups, self.report(taken)
        self.flow.record_step_trained(groups, report)
        self.lineage[self.num_trained] = tuple(group.number for group in groups)
        self.num_trained += 1
        self.overlaps += bool(self.running)
        return True

    def commit(self) -> bool:
        version = self.flow.state.version + 1
        if version > self.num_trained:
            return False
        self.flow.record_version_committed(version, "")
        return True

    def save(self) -> bool:
        """A snapshot of what is trained."""
        self.checkpoint = self.num_trained
        self.saved_bound = self.bound
        return True

    def crash(self) -> bool:
        """Everything in memory is gone."""
        self.lineage = {step: numbers for step, numbers in self.lineage.items() if step < self.checkpoint}
        self.crashed = True
        self._begin()
        return True

    def go_on_under(self, config: FlowConfig) -> bool:
        """Crash, and continue with other settings, unless what the ledger holds is too old for them."""
        resumed = Flow(config, writer=self.ledger, clock=StillClock(), last_step=self.steps, pick_row=lambda row: row)
        resumed.restore(self.checkpoint, self.ledger.roll_back(self.checkpoint))
        fits = compute_needed_age(resumed.state, only_planned=config.policy.drops_stale) <= config.largest_age
        if fits:
            self.config, self.saved_bound = config, None
        self.crash()
        return fits

    # --- driving

    def random_events(self, count: int, *, crashes: float = 0.02) -> None:
        """Any events in any order; ``crashes`` is how probable a crash is at each."""
        quiet = [self.admit, self.start, self.start, self.end_episode, self.end_episode, self.end_episode]
        quiet += [self.take, self.train, self.commit, lambda: self.end_episode(failures=0.5)]
        rates = {self.crash: crashes, self.drop: 0.03, self.save: 0.03, self.tune: 0.04, self.throttle: 0.03}
        for _ in range(count):
            drawn, event = self.rng.random(), self.rng.choice(quiet)
            for rare, rate in rates.items():
                event = rare if 0 <= drawn < rate else event
                drawn -= rate
            if event():
                self.check()

    def finish(self) -> None:
        """Everything that runs ends in time: the last step must be reached."""
        events = [self.admit, self.start, self.end_episode, self.take, self.train, self.commit]
        for _ in range(MANY_ROUNDS):
            if self.flow.state.version == self.steps:
                return
            moved = [event() for event in self.rng.sample(events, len(events))]
            assert any(moved), f"deadlock: {self.flow.state.counts}, step {self.flow.state.next_step}"
            self.check()
        raise AssertionError(f"it continues for ever: {self.flow.state.counts}, step {self.flow.state.next_step}")

    def check(self) -> None:
        """Conservation, against a count of our own."""
        state = self.flow.state
        assert state.conserved()
        check_counts(state)
        alive = {n: row.state for n, row in self.ledger.rows.items() if n in state.groups}
        assert alive == {number: entry.state for number, entry in state.groups.items()}
        gone = [row for number, row in self.ledger.rows.items() if number not in state.groups]
        assert all(row.state in (GroupState.RELEASED, GroupState.DROPPED) for row in gone)
        assert sum(row.state is GroupState.DROPPED for row in gone) == sum(state.dropped.values())
        assert len(self.ledger.rows) == state.num_submitted

    def check_end(self) -> None:
        """Every step once, every group in one step or dropped, none left."""
        assert sorted(self.lineage) == list(range(self.steps))
        trained = [number for numbers in self.lineage.values() for number in numbers]
        assert len(trained) == len(set(trained)) == self.steps * self.config.groups_per_step
        dropped = {number for number, row in self.ledger.rows.items() if row.state is GroupState.DROPPED}
        assert set(trained) | dropped == set(self.ledger.rows)
        assert not self.flow.state.groups


def check_counts(state: FlowState) -> None:
    """Every count that policies ask for, against a look at all groups."""
    counted = (GroupState.TAKEN, GroupState.TRAINED)
    out = {number: entry for number, entry in state.groups.items() if entry.state not in counted}
    free = {number: entry for number, entry in out.items() if entry.step is None}
    assert state.num_open == len(free)
    assert state.open_by_oldest == Counter(
        entry.oldest_version for entry in free.values() if entry.oldest_version is not None
    )
    planned = {(entry.step, number) for number, entry in out.items() if entry.step is not None}
    assert {(step, number) for step, numbers in state.plan.items() for number in numbers} == planned
    ready = {number for number, entry in out.items() if entry.state is GroupState.READY}
    assert state.ready == ready
    for files in (state.ready_by_oldest, state.ready_by_newest):
        assert sorted(number for numbers in files.values() for number in numbers) == sorted(ready & free.keys())
        assert all(files.values())
    assert state.first_open(5) == sorted(free)[:5]
    waiting = [entry for entry in state.groups.values() if entry.state is GroupState.SUBMITTED]
    assert state.num_waiting == len(waiting)
    aged = [entry for entry in waiting if entry.oldest_version is not None and entry.oldest_version <= state.version]
    assert state.num_waiting_aged == len(aged)
