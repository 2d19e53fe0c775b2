"""The simulated learner: a model of training and of the weight sync, with the order of events of the real controller.

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
    """One batch for the simulated learner, which needs only the batch's size and times."""

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
    """A learner that trains batches one after another and publishes a new version of the weights after each. The
    simulation orders the batches. The learner calls the simulation back when a step starts, when it ends, and when a
    version is ready to be committed."""

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
        """Create an idle learner in the run of ``events``. ``cost``, ``sync`` and ``failures`` are the costs of steps,
        of the weight sync and of failures, and ``rng`` draws the times of failures. ``on_start()`` is called when a
        step starts, ``on_trained(batch, waited_s)`` when it ends, with the seconds that the learner had waited for the
        batch, and ``commit(version)`` when the engines have staged a version."""
        self._events, self._cost, self._sync, self._failures, self._rng = events, cost, sync, failures, rng
        self._on_start, self._on_trained, self._commit = on_start, on_trained, commit
        self._ordered: deque[B] = deque()
        """The batches to train, in order."""
        self._num_ordered = 0
        """Number of batches that were ordered and whose step has not ended."""
        self._waits_for_buffer: B | None = None
        """The batch for whose weights no buffer was free when it was ordered; ``None`` if there is none."""
        self._buffers = NUM_SLOTS - 1  # one slot holds the version that the engines read
        """Number of free buffers."""
        self._published: deque[int] = deque()
        """The versions that wait to be sent, the oldest first."""
        self.publishing = False
        """Whether a version is in transit to the engines."""
        self.current: B | None = None
        """Batch that is being trained, or after which the weights are being copied; ``None`` while the learner is
        idle."""
        self._free_since_s = 0.0
        """Time at which the learner became free for the next step."""
        self.busy_s = 0.0
        """Time spent on training and on copies of the weights."""
        self.exposed_sync_s = 0.0
        """Time for which the learner was blocked by the weight sync."""
        self._trained_s: float | None = None
        """Time at which the current step ended, until the copy of its weights begins; otherwise ``None``."""

    @property
    def can_order(self) -> bool:
        """Return whether the learner accepts another batch: fewer than :data:`ORDERED_AHEAD` batches are ordered, and
        no ordered batch waits for a buffer."""
        return self._num_ordered < ORDERED_AHEAD and self._waits_for_buffer is None

    def order(self, work: B) -> None:
        """Add the batch ``work`` to the end of the queue, and reserve a buffer for the weights of its step if a buffer
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
        """Start to train the first batch of the queue, if the learner is idle."""
        if self.current is not None or not self._ordered:
            return
        work = self.current = self._ordered.popleft()
        self._on_start()
        waited_s = max(0.0, work.taken_s - self._free_since_s)
        seconds = self._cost.step_s(work.tokens, work.squares)
        self.busy_s += seconds
        self._events.after(seconds + self._draw_failures_s(seconds), self._end, work, waited_s)

    def _draw_failures_s(self, step_s: float) -> float:
        """Draw the failures of the learner during a step of ``step_s`` seconds, and return the seconds that they cost:
        the restarts, and the repetition of the steps since the last checkpoint."""
        lost_s, mtbf_s = 0.0, self._failures.learner_mtbf_s
        while mtbf_s < float("inf") and self._rng.random() < step_s / mtbf_s:
            lost_s += self._failures.learner_restart_s + step_s * self._rng.integers(1, self._failures.checkpoint_steps)
        return lost_s

    def _end(self, work: B, waited_s: float) -> None:
        """Handle the end of a step: report the step to the simulation, and begin to copy the new weights."""
        self._trained_s = self._events.now_s
        self._on_trained(work, waited_s)
        self._copy(work)

    def _copy(self, work: B) -> None:
        """Begin to copy the new weights to a buffer, if the step has ended and a buffer is reserved. Otherwise the
        later of these two events calls this method again."""
        if not work.has_buffer or self._trained_s is None:
            return
        self.exposed_sync_s += self._events.now_s - self._trained_s + self._sync.snapshot_s
        self.busy_s += self._sync.snapshot_s
        self._trained_s = None
        self._events.after(self._sync.snapshot_s, self._end_copy, work)

    def _end_copy(self, work: B) -> None:
        """Handle the end of the copy: publish the weights after ``work`` as the next version, and begin the next
        step."""
        self._published.append(work.step + 1)
        self._num_ordered -= 1
        self.current = None
        self._free_since_s = self._events.now_s
        self._send()
        self._start_next()

    def _send(self) -> None:
        """Send the oldest published version to the engines, unless another one is in transit."""
        if self._published and not self.publishing:
            self.publishing = True
            self._events.after(self._sync.travel_s, self._commit, self._published.popleft())

    def committed(self) -> None:
        """Record that all engines use the version in transit. The buffer of the previous version becomes free, and the
        next published version is sent."""
        self.publishing = False
        self._buffers += 1
        work, self._waits_for_buffer = self._waits_for_buffer, None
        if work is not None:
            self._buffers -= 1
            work.has_buffer = True
            if work is self.current:
                self._copy(work)
        self._send()
