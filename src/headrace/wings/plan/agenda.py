"""What is to happen when: a clock that jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Agenda:
    """A :class:`~headrace.base.clock.Clock` whose time is that of the event that happens now; of events at one time,
    those
    come first that were noted first.

    >>> agenda, told = Agenda(), []
    >>> agenda.at(2.0, told.append, "late"); agenda.at(1.0, told.append, "early")
    >>> while agenda.step(): pass
    >>> told, agenda.now_s
    (['early', 'late'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = count()

    def now(self) -> float:
        """Seconds since the beginning."""
        return self.now_s

    def wall(self) -> float:
        """The same: no day has been agreed upon."""
        return self.now_s

    def at(self, time_s: float, act: Callable[..., object], *given: Any) -> None:
        """Call ``act`` with ``given`` at ``time_s``, or now if that is past."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), act, given))

    def after(self, seconds: float, act: Callable[..., object], *given: Any) -> None:
        """The same, ``seconds`` from now."""
        self.at(self.now_s + seconds, act, *given)

    def step(self) -> bool:
        """Let the next event happen; ``False`` where there is none."""
        if not self._events:
            return False
        self.now_s, _, act, given = heapq.heappop(self._events)
        act(*given)
        return True
