"""Cores that are lent: what rests leaves its cores to what computes, on one machine.

    board     a byte for each part, in memory that all of them share: 1 while it computes
    a unit    an engine's step, an order of the learner: before it the part looks at the board, and takes its own cores
              and its share of those whose owners rest

Nobody is asked and nobody waits. Whether more cores help depends on model and batch: a part tries its units with and
without, in turn, and borrows only while that was faster, the change itself included; later it tries again.
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

TRIED = 12
"""Units of a trial with borrowed cores, and as many without."""
HELD = 1500
"""Units until the next trial."""
GAIN = 1.05
"""Borrowing goes on where it was faster by this factor."""


def make_board(path: Path, parts: int) -> None:
    """A board on which everybody is at work: a part that loads its model lends nothing."""
    path.write_bytes(b"\x01" * parts)


class OwnCores:
    """The cores of a part that neither lends nor borrows."""

    @contextmanager
    def unit(self, amount: float | None = 1.0) -> Iterator[None]:
        """Nothing changes."""
        yield

    def rest(self) -> None:
        """Nothing changes."""


class LentCores:
    """The cores of one part. ``set_threads`` must be called by the thread that computes."""

    def __init__(self, lending: Lending, set_threads: Callable[[int], None], clock: Clock) -> None:
        self._shares, self._place = lending.shares, lending.place
        descriptor = os.open(lending.board, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._board = mmap.mmap(descriptor, len(self._shares))
        finally:
            os.close(descriptor)
        self._clock = clock
        self._set_threads = set_threads
        self._threads = 0
        self._trial = _LendingTrial()
        self._board[self._place] = 1

    def rest(self) -> None:
        """Whoever computes may have its cores."""
        self._board[self._place] = 0

    @contextmanager
    def unit(self, amount: float | None = 1.0) -> Iterator[None]:
        """Within this the part computes, with as many cores as are good for it. ``amount`` of work: what its time is
        divided by before it is compared with others'; ``None``: it is like no other."""
        start_s = self._clock.now()
        self._board[self._place] = 1
        free = self._free()
        borrow = bool(free) and self._trial.borrows()
        self._take(self._shares[self._place] + (free if borrow else 0))
        yield
        if free and amount is not None:
            self._trial.took((self._clock.now() - start_s) / amount, borrowed=borrow)

    def _free(self) -> int:
        """This part's share of the cores whose owners rest."""
        busy = self._board[:]
        resting = sum(share for share, at_work in zip(self._shares, busy, strict=True) if not at_work)
        return resting // max(1, sum(busy))

    def _take(self, threads: int) -> None:
        if threads != self._threads:
            self._set_threads(threads)
            self._threads = threads


class _LendingTrial:
    """Finds out by trying whether borrowed cores are worth it."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._verdict: bool | None = None
        self._left = 0

    def borrows(self) -> bool:
        """Whether the next unit should."""
        if self._verdict is not None:
            return self._verdict
        return len(self._seconds[True]) <= len(self._seconds[False])

    def took(self, seconds: float, *, borrowed: bool) -> None:
        """A unit that could have borrowed took so long, for one of its amount."""
        if self._verdict is not None:
            self._left -= 1
            if not self._left:
                self._verdict = None
            return
        self._seconds[borrowed].append(seconds)
        if min(map(len, self._seconds.values())) < TRIED:
            return
        faster = _middle(self._seconds[False]) / max(_middle(self._seconds[True]), 1e-12)
        self._verdict, self._left = faster >= GAIN, HELD
        self._seconds = {True: [], False: []}
        word = "borrows" if self._verdict else "does not borrow"
        sys.stderr.write(f"with lent cores a unit of work is {faster:.2f} times as fast: {word}\n")
        sys.stderr.flush()


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


AnyCores = OwnCores | LentCores


def cores(lending: Lending | None) -> AnyCores:
    """Those of a part that is told ``lending``."""
    if lending is None:
        return OwnCores()
    import torch

    return LentCores(lending, torch.set_num_threads, RealClock())
