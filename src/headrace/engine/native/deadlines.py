"""Which requests must end by when."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from headrace.engine.native.sequence import Sequence

_FEW = 64
"""Entries of requests that have ended, which may stay whatever their number."""


class Deadlines:
    """A heap over ``known``: all requests that have not ended."""

    def __init__(self, known: Mapping[int, Sequence]) -> None:
        self._known = known
        self._heap: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Note the deadline of ``sequence``, if it has one."""
        if sequence.request.deadline_s is None:
            return
        heapq.heappush(self._heap, (sequence.deadline_s, sequence.arrival, sequence.request.request_id))
        if len(self._heap) > 2 * len(self._known) + _FEW:
            self._heap = [entry for entry in self._heap if self._open(entry) is not None]
            heapq.heapify(self._heap)

    def past(self, now_s: float) -> bool:
        """Whether the first deadline is over."""
        return bool(self._heap) and self._heap[0][0] <= now_s

    def take(self, now_s: float) -> list[Sequence]:
        """The sequences whose time is over."""
        late = []
        while self.past(now_s):
            sequence = self._open(heapq.heappop(self._heap))
            if sequence is not None:
                late.append(sequence)
        return late

    def _open(self, entry: tuple[float, int, int]) -> Sequence | None:
        sequence = self._known.get(entry[2])
        return sequence if sequence is not None and sequence.arrival == entry[1] else None
