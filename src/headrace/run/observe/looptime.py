"""The working time of the controller: an event loop that measures when it runs and when it waits."""

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
    """Adds up when one event loop ran callbacks, as spans of the lane ``controller``. It reads the clock twice each
    time the loop waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.now()
        """The beginning of the present span."""
        self._woke_s = self._since_s
        """The time when the loop last began to run."""
        self._worked_s = 0.0
        """The work in the present span, up to the last wait, in seconds."""
        self._spans: list[Span] = []

    def asleep(self) -> float:
        """Record that the loop starts to wait, and return the current time in seconds."""
        now_s = self._clock.now()
        self._worked_s += now_s - self._woke_s
        return now_s

    def awake(self, since_s: float) -> None:
        """Record that the loop runs again, after a wait that began at ``since_s``."""
        self._woke_s = now_s = self._clock.now()
        age_s = now_s - self._since_s
        if (now_s - since_s >= SHORT_S and age_s >= LEAST_SPAN_S) or age_s >= MOST_SPAN_S:
            self._close(now_s)

    def spans(self) -> list[Span]:
        """Return the work of the loop since the last call, as spans. This is called from within the loop."""
        now_s = self.asleep()
        self._woke_s = now_s
        self._close(now_s)
        spans, self._spans = self._spans, []
        return spans

    def _close(self, now_s: float) -> None:
        """End the present span, and begin the next at ``now_s``."""
        if self._worked_s > 0:
            end_s = self._since_s + self._worked_s
            self._spans.append(Span(lane=LANE, name="run", start_s=self._since_s, end_s=end_s))
        self._since_s, self._worked_s = now_s, 0.0


class WatchedSelector(selectors.DefaultSelector):
    """A selector that reports its waits to a :class:`LoopTime`."""

    def __init__(self, work: LoopTime) -> None:
        super().__init__()
        self._work = work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as :meth:`selectors.BaseSelector.select` does, and report the wait."""
        since_s = self._work.asleep()
        try:
            return super().select(timeout)
        finally:
            self._work.awake(since_s)


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that measures how much of the time it works; see :attr:`work`."""

    def __init__(self) -> None:
        self.work = LoopTime(RealClock())
        """The measured work."""
        super().__init__(WatchedSelector(self.work))
