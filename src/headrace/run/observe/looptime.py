"""The working time of the controller, measured by an asyncio event loop that records when it runs and when it waits.

The controller is one process with one event loop. The times in which the loop runs callbacks become spans of the event
trace in the lane ``controller``. The verdict uses them to decide whether the controller is the bottleneck.
"""

from __future__ import annotations

import asyncio
import selectors

from headrace.base.clock import Clock, RealClock
from headrace.base.types.trace import Span

SHORT_S = 0.005
"""The shortest wait of the loop, in seconds, that ends a span. The work between shorter waits is added up, and the span
contains this sum from its beginning on."""
MIN_SPAN_S = 0.025
"""The shortest time between the beginnings of two spans, in seconds: a loop that wakes a thousand times a second makes
forty spans a second."""
MAX_SPAN_S = 0.25
"""The longest span, in seconds, so that a loop that never waits reports its work while it runs."""
LANE = "controller"
"""The lane of the controller's spans in the event trace."""


class LoopTime:
    """The measured working time of one event loop, collected as spans of the lane ``controller``. The loop's selector
    calls :meth:`begin_wait` before each wait and :meth:`end_wait` after it."""

    def __init__(self, clock: Clock) -> None:
        """Start the first span now. ``clock`` must be the clock that all spans of the trace use."""
        self._clock = clock
        self._since_s = clock.now()
        """The beginning of the present span, in seconds of the clock."""
        self._woke_s = self._since_s
        """The time when the loop last ended a wait and began to run callbacks."""
        self._worked_s = 0.0
        """The work in the present span, up to the last wait, in seconds."""
        self._spans: list[Span] = []
        """The spans that have ended since the last call of :meth:`take_spans`."""

    def begin_wait(self) -> float:
        """Record that the loop starts to wait: add its work since the last wait to the present span. Return the current
        time in seconds, for the caller to pass to :meth:`end_wait`."""
        now_s = self._clock.now()
        self._worked_s += now_s - self._woke_s
        return now_s

    def end_wait(self, since_s: float) -> None:
        """Record that the loop runs again, after a wait that began at ``since_s``, in seconds of the clock. The present
        span of work ends here if the wait was not short, or if the span has become long."""
        self._woke_s = now_s = self._clock.now()
        age_s = now_s - self._since_s
        if (now_s - since_s >= SHORT_S and age_s >= MIN_SPAN_S) or age_s >= MAX_SPAN_S:
            self._end_span(now_s)

    def take_spans(self) -> list[Span]:
        """Return the spans of the loop's work since the last call, and remove them here. The caller runs in the loop
        itself."""
        now_s = self.begin_wait()
        self._woke_s = now_s
        self._end_span(now_s)
        spans, self._spans = self._spans, []
        return spans

    def _end_span(self, now_s: float) -> None:
        """End the present span, store it if it contains work, and begin the next span at ``now_s``. The stored span has
        the length of its work, without the short waits between."""
        if self._worked_s > 0:
            end_s = self._since_s + self._worked_s
            self._spans.append(Span(lane=LANE, name="run", start_s=self._since_s, end_s=end_s))
        self._since_s, self._worked_s = now_s, 0.0


class WatchedSelector(selectors.DefaultSelector):
    """The selector of a :class:`WatchedLoop`: the object in which an event loop waits for sockets and timers. It
    reports the beginning and the end of each wait to a :class:`LoopTime`."""

    def __init__(self, work: LoopTime) -> None:
        """Create the selector, which reports its waits to ``work``."""
        super().__init__()
        self._work = work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for sockets as :meth:`selectors.BaseSelector.select` does, for at most ``timeout`` seconds (``None``:
        without a limit), report the wait, and return the sockets that are ready."""
        since_s = self._work.begin_wait()
        try:
            return super().select(timeout)
        finally:
            self._work.end_wait(since_s)


class WatchedLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that measures when it runs callbacks. A run uses it for its controller, and adds the spans
    of :attr:`work` to its event trace."""

    def __init__(self) -> None:
        """Create the loop, with the real clock."""
        self.work = LoopTime(RealClock())
        """The measured working time of this loop."""
        super().__init__(WatchedSelector(self.work))
