"""A model of several engines: who serves what, commits that roll, engines that die.

A sequence goes to the engine that its siblings and its earlier turns went to, unless that one has clearly more to do:
by the same measure as in a real fleet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from headrace.base.types.weights import Interrupt
from headrace.engine.fleet.router import allowed_load
from headrace.wings.plan.agenda import Agenda
from headrace.wings.plan.costs import EngineCost, FailureCost, SyncCost
from headrace.wings.plan.engine import WAITS, EngineCounts, SimulatedAnswer, SimulatedEngine

_STOPS = frozenset(Interrupt) - {Interrupt.INFLIGHT, Interrupt.STREAM}
"""While an engine commits so, others serve."""


class SimulatedFleet:
    """Engines that are alike."""

    def __init__(
        self,
        agenda: Agenda,
        cost: EngineCost,
        *,
        count: int,
        max_sequences: int,
        cache_tokens: float,
        sync: SyncCost,
        failures: FailureCost,
        rng: np.random.Generator,
    ) -> None:
        self._agenda, self._sync, self._failures, self._rng = agenda, sync, failures, rng
        self._moved: dict[SimulatedEngine, None] = {}
        self._files: dict[int, dict[SimulatedEngine, None]] = {}
        self._filed: dict[SimulatedEngine, int] = {}
        self._least = 0
        self._homeless: deque[SimulatedAnswer] = deque()
        self._to_commit: deque[SimulatedEngine] = deque()
        self._committing: dict[SimulatedEngine, None] = {}
        self._swapping: dict[float, list[SimulatedEngine]] = {}
        self._wanted = 0
        self._committed: Callable[[], None] | None = None
        self.engines: list[SimulatedEngine] = []
        for _ in range(count):
            engine = SimulatedEngine(
                agenda, cost, max_sequences=max_sequences, cache_tokens=cache_tokens, moved=self._moved
            )  # fmt: skip
            self.engines.append(engine)
            self._file(engine)
            self._expect_death(engine)

    # --- sequences

    def put(self, answer: SimulatedAnswer, near: SimulatedEngine | None) -> SimulatedEngine | None:
        """Find an engine for it: ``near``, if that has not clearly more to do than others. ``None``: it waits until one
        is there."""
        engine = self._choose(near)
        if engine is None:
            self._homeless.append(answer)
            return None
        if engine is not near:
            answer.read = answer.context
        engine.put(answer)
        return engine

    def withdraw(self, answer: SimulatedAnswer) -> bool:
        """It is not wanted any more; whether it was here."""
        if answer.engine is not None:
            answer.engine.withdraw(answer)
            return True
        if answer in self._homeless:
            self._homeless.remove(answer)
            return True
        return False

    def _choose(self, near: SimulatedEngine | None) -> SimulatedEngine | None:
        if not self._filed:  # a commit stops all of them
            able = [engine for engine in self.engines if engine.up]
            return near if near in able else min(able, key=lambda engine: engine.load, default=None)
        if near is not None and near in self._filed and near.load <= allowed_load(self._least):
            return near
        least = self._least_loaded()
        return near if near in self._filed and near.load <= allowed_load(self._least) else least

    def _least_loaded(self) -> SimulatedEngine:
        """Loads that have risen are found out here, those that have fallen when the engine is settled."""
        while True:
            while not self._files.get(self._least):
                self._least += 1
            engine = next(iter(self._files[self._least]))
            if engine.load == self._least:
                return engine
            self._file(engine)

    def _file(self, engine: SimulatedEngine) -> None:
        """Among those of its load, as the last; those that are held or down are not filed."""
        before = self._filed.pop(engine, None)
        if before is not None:
            del self._files[before][engine]
        if engine.up and not engine.held:
            load = self._filed[engine] = engine.load
            self._files.setdefault(load, {})[engine] = None
            self._least = min(self._least, load)

    def settle(self) -> None:
        """Bring up to date what has changed at this moment."""
        while self._moved:
            engine, _ = self._moved.popitem()
            engine.settle()
            if engine.load < self._filed.get(engine, 0):
                self._file(engine)
            if engine.held and engine.drained and engine in self._committing:
                self._swap(engine)

    # --- weights

    def commit(self, version: int, committed: Callable[[], None]) -> None:
        """Bring ``version`` into use, so many engines at once; ``committed`` is called when all use it."""
        self._wanted, self._committed = version, committed
        self._to_commit = deque(engine for engine in self.engines if engine.up)
        self._commit_next()

    def _commit_next(self) -> None:
        mode = self._sync.interrupt
        usual = 1 if mode in _STOPS else len(self.engines)
        while self._to_commit and len(self._committing) < (self._sync.rolling or usual):
            engine = self._to_commit.popleft()
            if not engine.up:
                continue
            self._committing[engine] = None
            if mode in WAITS and engine.load:
                engine.hold(mode)
                self._file(engine)
            else:
                self._swap(engine)
        if not self._to_commit and not self._committing and self._committed is not None:
            committed, self._committed = self._committed, None
            committed()

    def _swap(self, engine: SimulatedEngine) -> None:
        engine.swap(self._wanted, self._sync.interrupt, self._sync.gap_s)
        if engine not in self._filed:
            self._file(engine)
        begun_s = self._agenda.now_s
        together = self._swapping.setdefault(begun_s, [])
        if not together:
            self._agenda.after(self._sync.gap_s, self._swapped, begun_s)
        together.append(engine)

    def _swapped(self, begun_s: float) -> None:
        for engine in self._swapping.pop(begun_s):
            self._committing.pop(engine, None)
        self._commit_next()

    # --- life

    def _expect_death(self, engine: SimulatedEngine) -> None:
        if self._failures.engine_mtbf_s < float("inf"):
            self._agenda.after(self._rng.exponential(self._failures.engine_mtbf_s), self._die, engine)

    def _die(self, engine: SimulatedEngine) -> None:
        self._homeless.extend(engine.die())
        self._file(engine)
        self._agenda.after(self._failures.engine_restart_s, self._come_back, engine)
        for answer in self._take_homeless():
            answer.engine = None
            self.put(answer, None)
        if engine in self._committing:
            del self._committing[engine]
            self._agenda.after(0.0, self._commit_next)

    def _take_homeless(self) -> list[SimulatedAnswer]:
        homeless, self._homeless = list(self._homeless), deque()
        return homeless

    def _come_back(self, engine: SimulatedEngine) -> None:
        engine.come_back(self._wanted)
        self._file(engine)
        self._expect_death(engine)
        for answer in self._take_homeless():
            self.put(answer, None)

    # --- what was done

    def counted(self) -> EngineCounts:
        """All engines together, up to now."""
        total = EngineCounts()
        for engine in self.engines:
            engine.advance()
            total.busy_s += engine.counted.busy_s
            total.prefill_s += engine.counted.prefill_s
            total.generated += engine.counted.generated
            total.wasted += engine.counted.wasted
            total.preempted += engine.counted.preempted
            total.restarted += engine.counted.restarted
        return total

    @property
    def running(self) -> int:
        """Sequences in batches."""
        return sum(engine.num for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Sequences that wait to join one."""
        return sum(len(engine.waiting) for engine in self.engines) + len(self._homeless)
