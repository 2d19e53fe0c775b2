"""The working time of the controller: an event loop that measures when it runs and when it waits.

The controller is one process with one asyncio event loop. The times in which the loop runs callbacks become spans of
the event trace in the lane ``controller``, from which the verdict tells whether the controller is the bottleneck.
"""

from __future__ import annotations

import asyncio
import selectors

from headrace.base.clock import Clock, RealClock
from headrace.base.types.trace import Span

SHORT_S = 0.005
"""A wait of the loop that is shorter than this, in seconds, does not end a span. The work of a span is added up and
placed at its beginning."""
LEAST_SPAN_S = 0.025
"""The shortest time between the beginnings of two spans, in seconds: a loop that wakes a thousand times a second makes
forty spans a second."""
MOST_SPAN_S = 0.25
"""The longest span, in seconds, so that a loop that never waits reports its work while it runs."""
LANE = "controller"
"""The lane of the spans."""


class LoopTime:
    """The measured working time of one event loop, collected as spans of the lane ``controller``. The loop's selector
    calls :meth:`asleep` before each wait and :meth:`awake` after it."""

    def __init__(self, clock: Clock) -> None:
        """Start the first span now. ``clock`` must be the one that all spans of the trace use."""
        self._clock = clock
        self._since_s = clock.now()
        """The beginning of the present span."""
        self._woke_s = self._since_s
        """The time when the loop last began to run."""
        self._worked_s = 0.0
        """The work in the present span, up to the last wait, in seconds."""
        self._spans: list[Span] = []

    def asleep(self) -> float:
        """Record that the loop starts to wait: add its work since the last wait to the present span. Return the current
        time in seconds, which :meth:`awake` takes."""
        now_s = self._clock.now()
        self._worked_s += now_s - self._woke_s
        return now_s

    def awake(self, since_s: float) -> None:
        """Record that the loop runs again, after a wait that began at ``since_s``, in seconds of the clock. The present
        span ends here if the wait was not short, or if the span has become long."""
        self._woke_s = now_s = self._clock.now()
        age_s = now_s - self._since_s
        if (now_s - since_s >= SHORT_S and age_s >= LEAST_SPAN_S) or age_s >= MOST_SPAN_S:
            self._close(now_s)

    def spans(self) -> list[Span]:
        """Return the work of the loop since the last call, as spans, and forget it. The observers of the run call it
        from within the loop, whenever they pass spans on."""
        now_s = self.asleep()
        self._woke_s = now_s
        self._close(now_s)
        spans, self._spans = self._spans, []
        return spans

    def _close(self, now_s: float) -> None:
        """End the present span and keep it, if the loop has worked in it, and begin the next at ``now_s``. The span
        starts where it began and is as long as the work in it."""
        if self._worked_s > 0:
            end_s = self._since_s + self._worked_s
            self._spans.append(Span(lane=LANE, name="run", start_s=self._since_s, end_s=end_s))
        self._since_s, self._worked_s = now_s, 0.0


class WatchedSelector(selectors.DefaultSelector):
    """The selector of a :class:`WatchedLoop`: the object in which an event loop waits for sockets and timers. It
    reports the beginning and the end of each wait to a :class:`LoopTime`."""

    def __init__(self, work: LoopTime) -> None:
        """Report waits to ``work``."""
        super().__init__()
        self._work = work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets as :meth:`selectors.BaseSelector.select` does, for at most ``timeout`` seconds (``None``:
        without a limit), report the wait, and return the sockets that are ready."""
        since_s = self._work.asleep()
        try:
            return super().select(timeout)
        finally:
            self._work.awake(since_s)


class WatchedLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that measures when it works. A run uses it for its controller, and takes the spans of
    :attr:`work` into its trace."""

    def __init__(self) -> None:
        """Create the loop, with the real clock."""
        self.work = LoopTime(RealClock())
        """The measured work."""
        super().__init__(WatchedSelector(self.work))
