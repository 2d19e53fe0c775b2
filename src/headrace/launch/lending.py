"""Lending of cores between the parts of one machine: parts that wait lend their cores to parts that compute.

    activity file   one byte for each part, in memory that all parts share: 1 while the part computes
    unit of work    a step of an engine, or an order of the learner. Before each unit the part reads the activity file,
                    and computes with its own cores and its share of the cores whose owners wait

The parts exchange no messages and do not wait for each other. Whether more cores help depends on model and batch, so a
part alternates between units with and without borrowed cores for a while, and then borrows only if that was faster, the
cost of the change included. Later it measures again.
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
"""Number of units that a trial measures with borrowed cores, and as many without."""
UNITS_BETWEEN_TRIALS = 1500
"""Number of units until the next trial."""
MIN_SPEEDUP = 1.05
"""Factor by which units must be faster with borrowed cores for the part to borrow."""


def make_activity_file(path: Path, parts: int) -> None:
    """Write an activity file for ``parts`` parts, in which all of them are marked as computing: a part that still loads
    its model lends nothing."""
    path.write_bytes(b"\x01" * parts)


class OwnCores:
    """The cores of a part that neither lends nor borrows."""

    @contextmanager
    def unit(self, amount: float | None = 1.0) -> Iterator[None]:
        """Return a context for one unit of work, in which the cores do not change. ``amount`` is ignored; see
        :class:`LentCores`."""
        yield

    def rest(self) -> None:
        """Do nothing: a part that waits does not lend its cores."""


class LentCores:
    """The cores of one part that lends and borrows: which of them it computes with, by the activity file of
    ``lending``. ``set_threads`` sets the number of threads that the library computes with (torch, for example); the
    methods must be called by the thread that computes."""

    def __init__(self, lending: Lending, set_threads: Callable[[int], None], clock: Clock) -> None:
        """Open the activity file of ``lending``, and mark this part as computing."""
        self._shares, self._place = lending.shares, lending.place
        descriptor = os.open(lending.activity_file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._activity = mmap.mmap(descriptor, len(self._shares))
        finally:
            os.close(descriptor)
        self._clock = clock
        self._set_threads = set_threads
        self._threads = 0
        self._trial = _LendingTrial()
        self._activity[self._place] = 1

    def rest(self) -> None:
        """Mark this part as waiting, so that parts that compute may use its cores until its next unit of work."""
        self._activity[self._place] = 0

    @contextmanager
    def unit(self, amount: float | None = 1.0) -> Iterator[None]:
        """Compute a unit of work inside this context, with borrowed cores if they make it faster. ``amount`` is the
        size of the unit, by which its time is divided for comparison; ``None``: the unit cannot be compared with
        others."""
        start_s = self._clock.now()
        self._activity[self._place] = 1
        free = self._borrowable()
        borrow = bool(free) and self._trial.should_borrow()
        self._use_threads(self._shares[self._place] + (free if borrow else 0))
        yield
        if free and amount is not None:
            self._trial.record((self._clock.now() - start_s) / amount, borrowed=borrow)

    def _borrowable(self) -> int:
        """Return how many cores this part may borrow now: the cores whose owners wait, divided by the number of parts
        that compute."""
        busy = self._activity[:]
        resting = sum(share for share, at_work in zip(self._shares, busy, strict=True) if not at_work)
        return resting // max(1, sum(busy))

    def _use_threads(self, threads: int) -> None:
        """Compute with ``threads`` threads from now on; a change is made only if it differs, since it costs time."""
        if threads != self._threads:
            self._set_threads(threads)
            self._threads = threads


class _LendingTrial:
    """The measurement that decides whether a part borrows cores: units of work alternate between borrowed cores and own
    cores only, and the medians of their times are compared."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._decision: bool | None = None
        self._units_left = 0

    def should_borrow(self) -> bool:
        """Return whether the next unit should borrow cores: as the last trial decided, or as the trial that runs
        needs."""
        if self._decision is not None:
            return self._decision
        return len(self._seconds[True]) <= len(self._seconds[False])

    def record(self, seconds: float, *, borrowed: bool) -> None:
        """Record the time of a unit for which cores could be borrowed: ``seconds`` divided by the size of the unit.
        ``borrowed`` says whether it did borrow. When there are enough, decide; after many more units, begin a new
        trial."""
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
    """Return the median; the upper one of the two in the middle of an even number of values."""
    return sorted(values)[len(values) // 2]


AnyCores = OwnCores | LentCores
"""The cores of any part, with the same methods whether it lends or not."""


def cores(lending: Lending | None) -> AnyCores:
    """Return the object by which a part uses its cores, from the settings ``lending`` that it was started with;
    ``None`` for a part that neither lends nor borrows."""
    if lending is None:
        return OwnCores()
    import torch

    return LentCores(lending, torch.set_num_threads, RealClock())
