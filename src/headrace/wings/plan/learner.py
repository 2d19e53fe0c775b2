"""A model of the learner and of the way its weights take to the engines, in the order in which the controller goes.

taken ──▶ trained ──▶ snapshot, if a buffer is free ──▶ on its way ──▶ commit ──▶ committed: slots and a buffer free
  ▲                       │ the learner goes on
  └───────────────────────┘ two steps are ordered at once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from headrace.control.loops.feeding import ORDERED_AHEAD
from headrace.control.loops.syncing import NUM_SLOTS
from headrace.wings.plan.agenda import Agenda
from headrace.wings.plan.costs import FailureCost, LearnerCost, SyncCost

B = TypeVar("B", bound="SimulatedWork")


@dataclass(slots=True, kw_only=True)
class SimulatedWork:
    """One batch, as the learner sees it."""

    step: int
    tokens: float
    """Prompts included."""
    squares: float
    """The squares of the lengths of its samples, added up."""
    taken_s: float
    """When it was taken."""
    has_buffer: bool = False
    """Whether there is one for the copy of its weights."""


class SimulatedLearner(Generic[B]):
    """Trains batches one after the other."""

    def __init__(
        self,
        agenda: Agenda,
        cost: LearnerCost,
        sync: SyncCost,
        failures: FailureCost,
        *,
        rng: np.random.Generator,
        begins: Callable[[], None],
        trained: Callable[[B, float], None],
        commit: Callable[[int], None],
    ) -> None:
        """``begins`` is told of a step that is to be made, ``trained`` of one that is, and for how long the learner had
        waited for its batch; ``commit`` that a version is next to the engines."""
        self._agenda, self._cost, self._sync, self._failures, self._rng = agenda, cost, sync, failures, rng
        self._begins, self._trained, self._commit = begins, trained, commit
        self._ordered: deque[B] = deque()
        self._num_ordered = 0
        self._wants_buffer: B | None = None
        self._buffers = NUM_SLOTS - 1  # the engines read one
        self._published: deque[int] = deque()
        self._on_its_way = False
        self.at_work: B | None = None
        """What it trains or copies."""
        self._free_since_s = 0.0
        self.busy_s = 0.0
        self.exposed_sync_s = 0.0
        """It stood still for the sync."""
        self._trained_s: float | None = None

    @property
    def takes(self) -> bool:
        """Whether another step may be ordered."""
        return self._num_ordered < ORDERED_AHEAD and self._wants_buffer is None

    @property
    def publishing(self) -> bool:
        """Whether a version is on its way to the engines."""
        return self._on_its_way

    def order(self, work: B) -> None:
        """Train this after what was ordered before."""
        self._num_ordered += 1
        self._ordered.append(work)
        if self._buffers:
            self._buffers -= 1
            work.has_buffer = True
        else:
            self._wants_buffer = work
        self._begin()

    def _begin(self) -> None:
        if self.at_work is not None or not self._ordered:
            return
        work = self.at_work = self._ordered.popleft()
        self._begins()
        waited_s = max(0.0, work.taken_s - self._free_since_s)
        seconds = self._cost.step_s(work.tokens, work.squares)
        self.busy_s += seconds
        self._agenda.after(seconds + self._lost_s(seconds), self._end, work, waited_s)

    def _lost_s(self, step_s: float) -> float:
        """What the death of the learner in this step costs: the restart, and steps that are made again."""
        lost_s, mtbf_s = 0.0, self._failures.learner_mtbf_s
        while mtbf_s < float("inf") and self._rng.random() < step_s / mtbf_s:
            lost_s += self._failures.learner_restart_s + step_s * self._rng.integers(1, self._failures.checkpoint_steps)
        return lost_s

    def _end(self, work: B, waited_s: float) -> None:
        self._trained_s = self._agenda.now_s
        self._trained(work, waited_s)
        self._copy(work)

    def _copy(self, work: B) -> None:
        if not work.has_buffer or self._trained_s is None:
            return
        self.exposed_sync_s += self._agenda.now_s - self._trained_s + self._sync.snapshot_s
        self.busy_s += self._sync.snapshot_s
        self._trained_s = None
        self._agenda.after(self._sync.snapshot_s, self._copied, work)

    def _copied(self, work: B) -> None:
        self._published.append(work.step + 1)
        self._num_ordered -= 1
        self.at_work = None
        self._free_since_s = self._agenda.now_s
        self._send()
        self._begin()

    def _send(self) -> None:
        if self._published and not self._on_its_way:
            self._on_its_way = True
            self._agenda.after(self._sync.travel_s, self._commit, self._published.popleft())

    def committed(self) -> None:
        """The engines use the version that was sent: the buffer of the one before is free."""
        self._on_its_way = False
        self._buffers += 1
        work, self._wants_buffer = self._wants_buffer, None
        if work is not None:
            self._buffers -= 1
            work.has_buffer = True
            if work is self.at_work:
                self._copy(work)
        self._send()
