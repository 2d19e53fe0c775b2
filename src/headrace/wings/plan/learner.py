"""A model of the learner and of the weight sync, with the order of events of the real controller.

taken ──▶ trained ──▶ snapshot, if a buffer is free ──▶ in transit ──▶ commit ──▶ slots and a buffer free
  ▲                       │ the learner continues
  └───────────────────────┘ two steps are ordered at once

A buffer holds the copy of one version's weights, from which the engines read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from headrace.base.types.weights import NUM_SLOTS
from headrace.control.loops.feeding import ORDERED_AHEAD
from headrace.wings.plan.costs import FailureCost, LearnerCost, SyncCost
from headrace.wings.plan.events import EventQueue

B = TypeVar("B", bound="SimulatedWork")


@dataclass(slots=True, kw_only=True)
class SimulatedWork:
    """One batch as the simulated learner sees it: only its size and times."""

    step: int
    """Number of the step that trains the batch."""
    tokens: float
    """Number of tokens, prompts included."""
    squares: float
    """Sum of the squared lengths of the samples, for the cost of attention."""
    taken_s: float
    """Time at which the batch was taken from the flow, in seconds of the run."""
    has_buffer: bool = False
    """Whether a buffer is reserved for the snapshot of the step's weights."""


class SimulatedLearner(Generic[B]):
    """A learner that trains batches one after another and publishes the new weights of each as a version. The
    simulation orders batches, and is called back when a step starts, ends or has its weights ready to commit."""

    def __init__(
        self,
        events: EventQueue,
        cost: LearnerCost,
        sync: SyncCost,
        failures: FailureCost,
        *,
        rng: np.random.Generator,
        on_start: Callable[[], None],
        on_trained: Callable[[B, float], None],
        commit: Callable[[int], None],
    ) -> None:
        """Create an idle learner. ``on_start`` is called when a step starts, ``on_trained`` when it ends, with its
        batch and the seconds that the learner waited for it. ``commit`` is called with a version once the engines have
        staged it."""
        self._events, self._cost, self._sync, self._failures, self._rng = events, cost, sync, failures, rng
        self._on_start, self._on_trained, self._commit = on_start, on_trained, commit
        self._ordered: deque[B] = deque()
        self._num_ordered = 0
        self._waits_for_buffer: B | None = None
        self._buffers = NUM_SLOTS - 1  # one slot holds the version that the engines read
        self._published: deque[int] = deque()
        self._in_transit = False
        self.current: B | None = None
        """Batch that is being trained or whose weights are being copied."""
        self._free_since_s = 0.0
        self.busy_s = 0.0
        """Time spent on training and on copies of the weights."""
        self.exposed_sync_s = 0.0
        """Time for which the learner was blocked by the weight sync."""
        self._trained_s: float | None = None

    @property
    def can_order(self) -> bool:
        """Return whether the learner takes another batch: fewer than the allowed number are ordered, and none waits for
        a buffer."""
        return self._num_ordered < ORDERED_AHEAD and self._waits_for_buffer is None

    @property
    def publishing(self) -> bool:
        """Return whether a version is in transit to the engines."""
        return self._in_transit

    def order(self, work: B) -> None:
        """Queue a batch to be trained after those that were ordered before, and reserve a buffer for its weights if one
        is free."""
        self._num_ordered += 1
        self._ordered.append(work)
        if self._buffers:
            self._buffers -= 1
            work.has_buffer = True
        else:
            self._waits_for_buffer = work
        self._start_next()

    def _start_next(self) -> None:
        """Start to train the batch that was ordered first, if the learner is free."""
        if self.current is not None or not self._ordered:
            return
        work = self.current = self._ordered.popleft()
        self._on_start()
        waited_s = max(0.0, work.taken_s - self._free_since_s)
        seconds = self._cost.step_s(work.tokens, work.squares)
        self.busy_s += seconds
        self._events.after(seconds + self._lost_s(seconds), self._end, work, waited_s)

    def _lost_s(self, step_s: float) -> float:
        """Return the seconds lost to failures of the learner in a step of ``step_s`` seconds: restarts, and steps since
        the last checkpoint that are repeated."""
        lost_s, mtbf_s = 0.0, self._failures.learner_mtbf_s
        while mtbf_s < float("inf") and self._rng.random() < step_s / mtbf_s:
            lost_s += self._failures.learner_restart_s + step_s * self._rng.integers(1, self._failures.checkpoint_steps)
        return lost_s

    def _end(self, work: B, waited_s: float) -> None:
        """Handle the end of a step: report it, and copy its weights."""
        self._trained_s = self._events.now_s
        self._on_trained(work, waited_s)
        self._copy(work)

    def _copy(self, work: B) -> None:
        """Begin to copy the new weights to a buffer, if training has ended and a buffer is reserved for them."""
        if not work.has_buffer or self._trained_s is None:
            return
        self.exposed_sync_s += self._events.now_s - self._trained_s + self._sync.snapshot_s
        self.busy_s += self._sync.snapshot_s
        self._trained_s = None
        self._events.after(self._sync.snapshot_s, self._copied, work)

    def _copied(self, work: B) -> None:
        """Publish the copied weights of the batch ``work`` as the next version, and begin the next step."""
        self._published.append(work.step + 1)
        self._num_ordered -= 1
        self.current = None
        self._free_since_s = self._events.now_s
        self._send()
        self._start_next()

    def _send(self) -> None:
        """Send the oldest published version to the engines, unless another one is in transit."""
        if self._published and not self._in_transit:
            self._in_transit = True
            self._events.after(self._sync.travel_s, self._commit, self._published.popleft())

    def committed(self) -> None:
        """Record that all engines use the version in transit. The buffer of the version before it becomes free, and the
        next version is sent."""
        self._in_transit = False
        self._buffers += 1
        work, self._waits_for_buffer = self._waits_for_buffer, None
        if work is not None:
            self._buffers -= 1
            work.has_buffer = True
            if work is self.current:
                self._copy(work)
        self._send()
