"""The simulated fleet: a model of several engines with routing, rolling commits, and failures.

Routing follows the rule of the real router: an answer is routed to the engine that has served its siblings and earlier
turns, unless the load of that engine is clearly above that of other engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from headrace.engine.fleet.router import allowed_load
from headrace.wings.plan.costs import EngineCost, FailureCost, SyncCost
from headrace.wings.plan.engine import WAITING_INTERRUPTS, EngineCounts, SimulatedAnswer, SimulatedEngine
from headrace.wings.plan.events import EventQueue


class SimulatedFleet:
    """A set of ``count`` identical engines. The fleet routes answers, commits versions, and simulates failures. After
    each event, the simulation must call :meth:`settle`."""

    def __init__(
        self,
        events: EventQueue,
        cost: EngineCost,
        *,
        count: int,
        max_sequences: int,
        cache_tokens: float,
        sync: SyncCost,
        failures: FailureCost,
        rng: np.random.Generator,
    ) -> None:
        """Create ``count`` idle engines with version 0, each with the cost model ``cost`` and room for
        ``max_sequences`` answers and ``cache_tokens`` cached tokens. ``sync`` and ``failures`` are the costs of commits
        and failures, and ``rng`` draws the times of failures."""
        self._events, self._sync, self._failures, self._rng = events, sync, failures, rng
        self._changed: dict[SimulatedEngine, None] = {}
        """The engines to settle, as an ordered set."""
        self._engines_by_load: dict[int, dict[SimulatedEngine, None]] = {}
        """Index of the engines that accept answers, by load; its loads may be lower than the current ones."""
        self._indexed_load: dict[SimulatedEngine, int] = {}
        """Load under which each engine is in the index."""
        self._smallest_load = 0
        """A load below which the index has no engines."""
        self._unrouted: deque[SimulatedAnswer] = deque()
        """Answers that wait until an engine is up."""
        self._to_commit: deque[SimulatedEngine] = deque()
        """Engines that have not begun the present commit."""
        self._committing: dict[SimulatedEngine, None] = {}
        """Engines that drain or commit now, as an ordered set."""
        self._commits_by_start: dict[float, list[SimulatedEngine]] = {}
        """Engines whose commit is in progress, by the time at which it began."""
        self._target_version = 0
        """The version of the present or last commit."""
        self._committed: Callable[[], None] | None = None
        """The function to call at the end of the present commit; ``None`` if no commit runs."""
        self.engines: list[SimulatedEngine] = []
        for _ in range(count):
            engine = SimulatedEngine(
                events, cost, max_sequences=max_sequences, cache_tokens=cache_tokens, changed=self._changed
            )  # fmt: skip
            self.engines.append(engine)
            self._update_index(engine)
            self._schedule_failure(engine)

    # --- sequences

    def put(self, answer: SimulatedAnswer, preferred: SimulatedEngine | None) -> SimulatedEngine | None:
        """Route an answer to an engine and return the engine. ``preferred`` is the engine whose cache contains the
        answer's context (``None``: no engine's); it is chosen unless its load is clearly above that of others. If no
        engine is up, the answer waits for one, and ``None`` is returned."""
        engine = self._choose_engine(preferred)
        if engine is None:
            self._unrouted.append(answer)
            return None
        if engine is not preferred:
            answer.uncached = answer.context
        engine.put(answer)
        return engine

    def withdraw(self, answer: SimulatedAnswer) -> bool:
        """Remove an answer that is no longer needed, and return whether it was on an engine or in the queue of the
        fleet."""
        if answer.engine is not None:
            answer.engine.withdraw(answer)
            return True
        if answer in self._unrouted:
            self._unrouted.remove(answer)
            return True
        return False

    def _choose_engine(self, preferred: SimulatedEngine | None) -> SimulatedEngine | None:
        """Return the engine for an answer: ``preferred``, whose cache contains the answer's context, unless its load is
        clearly above that of the least loaded engine. ``None`` if no engine is up."""
        if not self._indexed_load:  # all engines drain for a commit, or are down
            alive = [engine for engine in self.engines if engine.up]
            return preferred if preferred in alive else min(alive, key=lambda engine: engine.load, default=None)
        if self._allows(preferred):
            return preferred
        least = self._least_loaded()  # updates the smallest load, so that ``preferred`` may be allowed now
        return preferred if self._allows(preferred) else least

    def _allows(self, engine: SimulatedEngine | None) -> bool:
        """Return whether ``engine`` takes answers, and its load is at most a little above the smallest load."""
        return engine in self._indexed_load and engine.load <= allowed_load(self._smallest_load)

    def _least_loaded(self) -> SimulatedEngine:
        """Return an engine with the smallest load. An engine whose load has risen is indexed again here, and an engine
        whose load has fallen in :meth:`settle`."""
        while True:
            while not self._engines_by_load.get(self._smallest_load):
                self._smallest_load += 1
            engine = next(iter(self._engines_by_load[self._smallest_load]))
            if engine.load == self._smallest_load:
                return engine
            self._update_index(engine)

    def _update_index(self, engine: SimulatedEngine) -> None:
        """Index the engine by its current load, behind other engines of the same load. An engine that drains for a
        commit, or is down, is removed from the index."""
        before = self._indexed_load.pop(engine, None)
        if before is not None:
            del self._engines_by_load[before][engine]
        if engine.up and not engine.draining:
            load = self._indexed_load[engine] = engine.load
            self._engines_by_load.setdefault(load, {})[engine] = None
            self._smallest_load = min(self._smallest_load, load)

    def settle(self) -> None:
        """Settle every engine that has changed at the current time, and begin the commit of every engine that has
        finished draining."""
        while self._changed:
            engine, _ = self._changed.popitem()
            engine.settle()
            if engine.load < self._indexed_load.get(engine, 0):
                self._update_index(engine)
            if engine.draining and engine.drained and engine in self._committing:
                self._commit_on(engine)

    # --- weights

    def commit(self, version: int, committed: Callable[[], None]) -> None:
        """Begin to commit ``version`` on all engines, as many at a time as the sync allows. ``committed()`` is called
        when all engines use the version."""
        self._target_version, self._committed = version, committed
        self._to_commit = deque(engine for engine in self.engines if engine.up)
        self._commit_next()

    def _commit_next(self) -> None:
        """Begin the commit of the next engines, as many at a time as ``sync.rolling`` allows. If all engines have
        committed, call the callback of :meth:`commit`."""
        mode = self._sync.interrupt
        default = 1 if mode.stops_generation else len(self.engines)
        while self._to_commit and len(self._committing) < (self._sync.rolling or default):
            engine = self._to_commit.popleft()
            if not engine.up:
                continue
            self._committing[engine] = None
            if mode in WAITING_INTERRUPTS and engine.load:
                engine.drain(mode)
                self._update_index(engine)
            else:
                self._commit_on(engine)
        if not self._to_commit and not self._committing and self._committed is not None:
            committed, self._committed = self._committed, None
            committed()

    def _commit_on(self, engine: SimulatedEngine) -> None:
        """Commit the newest version on one engine. One event handles the end of all commits that begin at the same
        time."""
        engine.swap(self._target_version, self._sync.interrupt, self._sync.gap_s)
        if engine not in self._indexed_load:
            self._update_index(engine)
        started_s = self._events.now_s
        together = self._commits_by_start.setdefault(started_s, [])
        if not together:
            self._events.after(self._sync.gap_s, self._end_commits, started_s)
        together.append(engine)

    def _end_commits(self, started_s: float) -> None:
        """Handle the end of the commits that began at ``started_s``: begin the next commits."""
        for engine in self._commits_by_start.pop(started_s):
            self._committing.pop(engine, None)
        self._commit_next()

    # --- life

    def _schedule_failure(self, engine: SimulatedEngine) -> None:
        """Draw the time of the engine's next failure, if engines fail at all."""
        if self._failures.engine_mtbf_s < float("inf"):
            self._events.after(self._rng.exponential(self._failures.engine_mtbf_s), self._fail, engine)

    def _fail(self, engine: SimulatedEngine) -> None:
        """Handle a failure of an engine: its answers are routed to other engines, and it restarts after
        ``engine_restart_s`` seconds."""
        self._unrouted.extend(engine.fail())
        self._update_index(engine)
        self._events.after(self._failures.engine_restart_s, self._restart, engine)
        for answer in self._take_unrouted():
            answer.engine = None
            self.put(answer, None)
        if engine in self._committing:
            del self._committing[engine]
            self._events.after(0.0, self._commit_next)

    def _take_unrouted(self) -> list[SimulatedAnswer]:
        """Return the answers that wait for an engine, and empty their queue."""
        unrouted, self._unrouted = list(self._unrouted), deque()
        return unrouted

    def _restart(self, engine: SimulatedEngine) -> None:
        """Handle the restart of a failed engine, with the newest version: route the answers that had no engine."""
        engine.restart(self._target_version)
        self._update_index(engine)
        self._schedule_failure(engine)
        for answer in self._take_unrouted():
            self.put(answer, None)

    # --- what was done

    def counts(self) -> EngineCounts:
        """Return the totals of all engines together, up to now."""
        total = EngineCounts()
        for engine in self.engines:
            engine.advance()
            total.busy_s += engine.counts.busy_s
            total.prefill_s += engine.counts.prefill_s
            total.generated += engine.counts.generated
            total.wasted += engine.counts.wasted
            total.preempted += engine.counts.preempted
            total.restarted += engine.counts.restarted
        return total

    @property
    def running(self) -> int:
        """Return the number of answers in the batches of all engines."""
        return sum(engine.num for engine in self.engines)

    @property
    def waiting(self) -> int:
        """Return the number of answers that wait to join a batch, or for an engine."""
        return sum(len(engine.waiting) for engine in self.engines) + len(self._unrouted)
