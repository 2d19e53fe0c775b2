"""Who waits, by rank. Whatever is asked of it costs no more where more wait, but for the heap's logarithm."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.engine.native.sequence import Sequence

_FEW = 64
"""Entries that may be left behind, whatever the length."""


class Waiting:
    """A heap whose entries are removed by leaving them behind; where they are the most, it is made anew."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: dict[int, Sequence] = {}
        self._begun: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._members.values()))

    def begun(self) -> list[Sequence]:
        """Those that wait with an answer."""
        return [sequence for sequence in self._begun.values() if sequence.answer is not None]

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait."""
        self._members[sequence.arrival] = sequence
        if sequence.answer is not None:
            self._begun[sequence.arrival] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence:
        """The one of the first rank; there is one."""
        while self._heap[0][1].arrival not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove(self, sequence: Sequence) -> None:
        """It waits no more; whether it was here does not matter."""
        self._members.pop(sequence.arrival, None)
        self._begun.pop(sequence.arrival, None)
        if len(self._heap) > 2 * len(self._members) + _FEW:
            self._heap = [(one.rank, one) for one in self._members.values()]
            heapq.heapify(self._heap)
