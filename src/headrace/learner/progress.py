"""The progress of a learner in units of work, such as a micro-batch, an optimizer update or a copy of the weights.
Another thread reads it, to detect a learner that has stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.base.clock import Clock

FORGETTING = 0.9
"""The factor by which the longest duration of a kind of units decays with each later unit, so that a slow first unit,
which compiles kernels, is forgotten after some time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkUnit:
    """One unit of a learner's work, such as a micro-batch."""

    kind: str
    """The kind of the unit; units of one kind have about the same duration."""
    what: str
    """The description of the unit: ``micro-batch 3 of 8 of step 5``. Empty while the learner waits for calls."""


class Progress:
    """The current unit of a learner, the number of finished units, and the usual duration of each kind of units. A
    supervisor compares them with the clock, to detect a learner that no longer advances.

    The learner calls :meth:`track`; the attributes may be read in any thread.

    >>> from headrace.base.clock import RealClock
    >>> progress = Progress(RealClock())
    >>> with progress.track("micro-batch", "micro-batch 1 of 2"):
    ...     progress.unit.what, progress.usual_s()
    ('micro-batch 1 of 2', 0.0)
    >>> progress.unit.what, progress.num_units
    ('', 1)
    """

    def __init__(self, clock: Clock) -> None:
        """Create the record without a current unit of work; durations are measured by ``clock``."""
        self._clock = clock
        self._usual_s: dict[str, float] = {}
        """The longest duration of recent units of each kind, in seconds; older ones count less."""
        self.num_units = 0
        """The number of units that have ended."""
        self.unit = WorkUnit(kind="", what="")
        """The current unit."""

    @contextmanager
    def track(self, kind: str, description: str) -> Iterator[None]:
        """Return a context of one unit of work of the kind ``kind`` and with the description ``description``; contexts
        may be nested."""
        outer_unit, start_s = self.unit, self._clock.now()
        self.unit = WorkUnit(kind=kind, what=description)
        try:
            yield
        finally:
            took_s = self._clock.now() - start_s
            self._usual_s[kind] = max(took_s, FORGETTING * self._usual_s.get(kind, 0.0))
            self.unit, self.num_units = outer_unit, self.num_units + 1

    def usual_s(self) -> float:
        """Return the longest recent duration of units of the current unit's kind, in seconds; 0 if none has ended."""
        return self._usual_s.get(self.unit.kind, 0.0)
