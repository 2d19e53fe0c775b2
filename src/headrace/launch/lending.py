"""Lending of cores between the parts of a run on one machine: parts that wait lend their cores to parts that compute.

    activity file   one byte for each part, in memory that all parts share: 1 while the part computes
    unit of work    a step of an engine, or an order of the learner. Before each unit the part reads the activity file,
                    and computes with its own cores and its share of the cores whose owners wait

The parts exchange no messages and do not wait for each other. Whether more cores help depends on the model and the
batch. Therefore a part measures: it alternates between units of work with and without borrowed cores for a while, and
then borrows only if units with borrowed cores were faster, including the cost of changing the number of threads. Later
it measures again.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.base.clock import Clock, RealClock
from headrace.launch.starts import Lending

TRIAL_UNITS = 12
"""Number of units that a trial measures with borrowed cores, and the same number without."""
UNITS_BETWEEN_TRIALS = 1500
"""Number of units until the next trial."""
MIN_SPEEDUP = 1.05
"""The smallest speedup of units with borrowed cores for which a part borrows."""


def make_activity_file(path: Path, num_parts: int) -> None:
    """Write an activity file for ``num_parts`` parts in which all parts are marked as computing, because a part that
    still loads its model must not lend its cores."""
    path.write_bytes(b"\x01" * num_parts)


class OwnCores:
    """The cores of a part that neither lends nor borrows cores."""

    @contextmanager
    def unit(self, amount: float | None = 1.0) -> Iterator[None]:
        """Return a context for one unit of work. The number of threads does not change, and ``amount`` is ignored; see
        :class:`LentCores`."""
        yield

    def mark_waiting(self) -> None:
        """Do nothing: this part does not lend its cores while it waits."""


class LentCores:
    """The cores of a part that lends and borrows cores, with the activity file of ``lending``. ``set_threads`` sets the
    number of threads with which the library computes, for example torch. Only the thread that computes may call the
    methods."""

    def __init__(self, lending: Lending, set_threads: Callable[[int], None], clock: Clock) -> None:
        """Open the activity file of ``lending``, and mark this part as computing. ``clock`` measures the units of
        work."""
        self._shares, self._index = lending.shares, lending.place
        """``_shares``: the number of cores that each part owns. ``_index``: the index of this part."""
        descriptor = os.open(lending.activity_file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._activity = mmap.mmap(descriptor, len(self._shares))
        finally:
            os.close(descriptor)
        self._clock = clock
        self._set_threads = set_threads
        self._num_threads = 0
        """The number of threads that was set last; 0 before."""
        self._trial = _LendingTrial()
        """The measurement that decides whether this part borrows cores."""
        self._activity[self._index] = 1

    def mark_waiting(self) -> None:
        """Mark this part as waiting, so that other parts may use its cores until its next unit of work."""
        self._activity[self._index] = 0

    @contextmanager
    def unit(self, amount: float | None = 1.0) -> Iterator[None]:
        """Return a context for one unit of work, which uses borrowed cores if they make it faster. ``amount`` is the
        size of the unit; its time is divided by it to compare units. ``None`` means that the unit cannot be
        compared."""
        start_s = self._clock.now()
        self._activity[self._index] = 1
        num_free = self._count_borrowable()
        borrows = bool(num_free) and self._trial.should_borrow()
        self._use_threads(self._shares[self._index] + (num_free if borrows else 0))
        yield
        if num_free and amount:  # a batch without trained tokens cannot be compared
            self._trial.record((self._clock.now() - start_s) / amount, borrowed=borrows)

    def _count_borrowable(self) -> int:
        """Return how many cores this part may borrow now: the number of cores of waiting parts, divided by the number
        of computing parts."""
        busy = self._activity[:]
        resting = sum(share for share, is_computing in zip(self._shares, busy, strict=True) if not is_computing)
        return resting // max(1, sum(busy))

    def _use_threads(self, num_threads: int) -> None:
        """Set the number of threads to ``num_threads``, if it differs from the current number; a change takes time."""
        if num_threads != self._num_threads:
            self._set_threads(num_threads)
            self._num_threads = num_threads


class _LendingTrial:
    """The measurement that decides whether a part borrows cores. Units of work alternate between borrowed cores and the
    part's own cores, and the medians of their times are compared."""

    def __init__(self) -> None:
        """Begin the first trial."""
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        """The times of the units of the current trial, in seconds: with (``True``) and without borrowed cores."""
        self._decision: bool | None = None
        """Whether the part borrows cores; ``None`` during a trial."""
        self._units_left = 0
        """The number of units until the next trial begins."""

    def should_borrow(self) -> bool:
        """Return whether the next unit should borrow cores, by the decision of the last trial or, during a trial, so
        that units with and without borrowed cores alternate."""
        if self._decision is not None:
            return self._decision
        return len(self._seconds[True]) <= len(self._seconds[False])

    def record(self, seconds: float, *, borrowed: bool) -> None:
        """Record the time of a unit for which cores could have been borrowed: ``seconds``, divided by the size of the
        unit. ``borrowed`` says whether cores were borrowed. When enough units are recorded, decide. Begin a new trial
        after :data:`UNITS_BETWEEN_TRIALS` more units."""
        if self._decision is not None:
            self._units_left -= 1
            if not self._units_left:
                self._decision = None
            return
        self._seconds[borrowed].append(seconds)
        if min(map(len, self._seconds.values())) < TRIAL_UNITS:
            return
        faster = _median(self._seconds[False]) / max(_median(self._seconds[True]), 1e-12)
        self._decision, self._units_left = faster >= MIN_SPEEDUP, UNITS_BETWEEN_TRIALS
        self._seconds = {True: [], False: []}
        word = "borrows" if self._decision else "does not borrow"
        sys.stderr.write(f"with lent cores a unit of work is {faster:.2f} times as fast: {word}\n")
        sys.stderr.flush()


def _median(values: Sequence[float]) -> float:
    """Return the median of ``values``; for an even number of values the larger of the two middle values."""
    return sorted(values)[len(values) // 2]


AnyCores = OwnCores | LentCores
"""The cores of any part. Both classes have the same methods."""


def make_cores(lending: Lending | None) -> AnyCores:
    """Return the object through which a part uses its cores. ``lending`` are the settings of the part; ``None`` means
    that it neither lends nor borrows cores."""
    if lending is None:
        return OwnCores()
    import torch

    return LentCores(lending, torch.set_num_threads, RealClock())
