"""The event queue of a simulated run. Its virtual clock jumps from the time of one event to the time of the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class EventQueue:
    """A queue of timed events, which is also a :class:`~headrace.base.clock.Clock`: :meth:`now` returns the time of the
    current event. Events with equal times are executed in the order in which they were added.

    >>> queue, names = EventQueue(), []
    >>> queue.at(2.0, names.append, "late"); queue.at(1.0, names.append, "early")
    >>> while queue.step(): pass
    >>> names, queue.now_s
    (['early', 'late'], 2.0)
    """

    def __init__(self) -> None:
        """Create an empty queue at time 0."""
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        """Heap of the events: time, number, callback and its arguments."""
        self._numbers = count()
        """Numbers the events in the order in which they were added."""

    def now(self) -> float:
        """Return the seconds since the start of the simulated run."""
        return self.now_s

    def wall(self) -> float:
        """Return the seconds since the start of the simulated run; simulated time has no date."""
        return self.now_s

    def at(self, time_s: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Add an event that calls ``callback(*arguments)`` at ``time_s``, or now if ``time_s`` has passed."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), callback, arguments))

    def after(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> None:
        """Add an event that calls ``callback(*arguments)`` after a delay in seconds."""
        self.at(self.now_s + seconds, callback, *arguments)

    def step(self) -> bool:
        """Advance to the next event and execute it; return ``False`` if there is none."""
        if not self._heap:
            return False
        self.now_s, _, callback, arguments = heapq.heappop(self._heap)
        callback(*arguments)
        return True
