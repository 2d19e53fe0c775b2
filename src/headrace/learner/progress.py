"""The progress of a learner, unit by unit: a micro-batch, the optimizer, a copy of the weights. Another thread reads
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.base.clock import Clock

FORGETTING = 0.9
"""The factor by which the longest duration of a kind of units decays with each later unit, so that a first unit that
compiles does not count for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """One unit of a learner's work, such as a micro-batch."""

    kind: str
    """Kind of the unit; units of one kind take about the same time."""
    what: str
    """Description of the unit: ``micro-batch 3 of 8 of step 5``. Empty if the learner waits for calls."""
    begun_s: float
    """When it was begun, on the clock."""


class Progress:
    """The current unit of a learner, the number of finished units, and the usual duration of each kind. A supervisor
    compares them with the clock to see whether the learner still advances.

    The learner calls :meth:`at`; the attributes may be read in any thread.

    >>> from headrace.base.clock import RealClock
    >>> progress = Progress(RealClock())
    >>> with progress.at("micro-batch", "micro-batch 1 of 2"):
    ...     progress.unit.what, progress.usual_s()
    ('micro-batch 1 of 2', 0.0)
    >>> progress.unit.what, progress.num_units
    ('', 1)
    """

    def __init__(self, clock: Clock) -> None:
        """Begin without a unit of work; durations are measured by ``clock``."""
        self._clock = clock
        self._usual_s: dict[str, float] = {}
        self.num_units = 0
        """Number of units that have ended."""
        self.unit = WorkUnit(kind="", what="", begun_s=clock.now())
        """The current unit."""

    @contextmanager
    def at(self, kind: str, what: str) -> Iterator[None]:
        """Set the current unit, of ``kind`` and described by ``what``, inside the ``with`` block; units may be
        nested."""
        outer, begun_s = self.unit, self._clock.now()
        self.unit = WorkUnit(kind=kind, what=what, begun_s=begun_s)
        try:
            yield
        finally:
            took_s = self._clock.now() - begun_s
            self._usual_s[kind] = max(took_s, FORGETTING * self._usual_s.get(kind, 0.0))
            self.unit, self.num_units = outer, self.num_units + 1

    def usual_s(self) -> float:
        """Return the recent longest duration of units of the current kind, in seconds; 0 if there was none."""
        return self._usual_s.get(self.unit.kind, 0.0)
