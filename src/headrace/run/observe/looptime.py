"""When the controller works: its event loop tells when it runs, and when it waits for something to happen."""

from __future__ import annotations

import asyncio
import selectors

from headrace.base.clock import Clock, RealClock
from headrace.base.types.trace import Span

SHORT_S = 0.005
"""A wait of the loop shorter than this does not end a span: what it worked is added up, and stands at its beginning."""
LEAST_S = 0.025
"""No span begins sooner after another: a loop that is woken a thousand times a second tells forty spans."""
MOST_S = 0.25
"""No span is longer: a loop that never waits tells of its work while it goes on."""
LANE = "controller"


class LoopTime:
    """Adds up when one event loop ran callbacks, as spans of the lane ``controller``. It costs two looks at the clock
    each time that the loop waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.now()
        """When the present span began."""
        self._woke_s = self._since_s
        """When the loop last began to run."""
        self._worked_s = 0.0
        """Work in the present span, up to the last wait."""
        self._spans: list[Span] = []

    def asleep(self) -> float:
        """The loop begins to wait; when."""
        now_s = self._clock.now()
        self._worked_s += now_s - self._woke_s
        return now_s

    def awake(self, since_s: float) -> None:
        """The loop runs again, and has waited since ``since_s``."""
        self._woke_s = now_s = self._clock.now()
        age_s = now_s - self._since_s
        if (now_s - since_s >= SHORT_S and age_s >= LEAST_S) or age_s >= MOST_S:
            self._close(now_s)

    def spans(self) -> list[Span]:
        """What the loop has worked since this was last asked; called from within the loop."""
        now_s = self.asleep()
        self._woke_s = now_s
        self._close(now_s)
        spans, self._spans = self._spans, []
        return spans

    def _close(self, now_s: float) -> None:
        if self._worked_s > 0:
            end_s = self._since_s + self._worked_s
            self._spans.append(Span(lane=LANE, name="run", start_s=self._since_s, end_s=end_s))
        self._since_s, self._worked_s = now_s, 0.0


class WatchedSelector(selectors.DefaultSelector):
    """Waits as its base class does, and tells when."""

    def __init__(self, work: LoopTime) -> None:
        super().__init__()
        self._work = work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See :meth:`selectors.BaseSelector.select`."""
        since_s = self._work.asleep()
        try:
            return super().select(timeout)
        finally:
            self._work.awake(since_s)


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how much of the time it works."""

    def __init__(self) -> None:
        self.work = LoopTime(RealClock())
        super().__init__(WatchedSelector(self.work))
