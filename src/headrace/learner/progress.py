"""What a learner is at, unit by unit: a micro-batch, the optimizer, a copy of the weights. Another thread reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.base.clock import Clock

FORGETTING = 0.9
"""What remains of the longest unit of a kind with each later one: a first one that compiles is not the measure for
ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """One unit of work."""

    kind: str
    """Units of one kind take about as long."""
    what: str
    """The unit in words: ``micro-batch 3 of 8 of step 5``; empty: none, the learner waits for orders."""
    begun_s: float
    """When it was begun, on the clock."""


class Progress:
    """The unit that a learner is at, how many it has ended, and how long each kind usually takes.

    Its owner calls :meth:`at`; the attributes may be read in any thread.

    >>> from headrace.base.clock import RealClock
    >>> progress = Progress(RealClock())
    >>> with progress.at("micro-batch", "micro-batch 1 of 2"):
    ...     progress.unit.what, progress.usual_s()
    ('micro-batch 1 of 2', 0.0)
    >>> progress.unit.what, progress.num_units
    ('', 1)
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._usual_s: dict[str, float] = {}
        self.num_units = 0
        """Units that have ended."""
        self.unit = WorkUnit(kind="", what="", begun_s=clock.now())
        """What it is at now."""

    @contextmanager
    def at(self, kind: str, what: str) -> Iterator[None]:
        """Within this the learner is at that unit; units may lie within others."""
        outer, begun_s = self.unit, self._clock.now()
        self.unit = WorkUnit(kind=kind, what=what, begun_s=begun_s)
        try:
            yield
        finally:
            took_s = self._clock.now() - begun_s
            self._usual_s[kind] = max(took_s, FORGETTING * self._usual_s.get(kind, 0.0))
            self.unit, self.num_units = outer, self.num_units + 1

    def usual_s(self) -> float:
        """How long a unit of the present kind has taken at most of late; 0 where there was none."""
        return self._usual_s.get(self.unit.kind, 0.0)
