"""The queues of an engine: waiting sequences by rank (higher priority first, then order of arrival), and requests by
deadline. Both are heaps, so an operation takes logarithmic time on average. A removed entry stays in the heap and is
skipped; the heap is rebuilt when most of its entries have been removed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from headrace.engine.native.sequence import Sequence

_MAX_REMOVED = 64
"""The number of removed entries up to which a heap is never rebuilt."""


class Waiting:
    """The queue of waiting sequences, ordered by rank. Iteration returns them in the order in which they were added."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        """The pairs (rank, sequence) as a heap. Entries of removed sequences stay in it and are skipped."""
        self._members: dict[int, Sequence] = {}
        """The waiting sequences by their number of arrival."""
        self._started: dict[int, Sequence] = {}
        """The waiting sequences that had already sampled tokens when they were added."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._members.values()))

    def started_sequences(self) -> list[Sequence]:
        """Return the waiting sequences that have sampled tokens already, because they were preempted or moved from
        another engine."""
        return [sequence for sequence in self._started.values() if sequence.answer is not None]

    def add(self, sequence: Sequence) -> None:
        """Add ``sequence`` to the queue."""
        self._members[sequence.arrival] = sequence
        if sequence.answer is not None:
            self._started[sequence.arrival] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence:
        """Return the first waiting sequence by rank, which joins the batch next. It stays in the queue. The queue must
        not be empty."""
        while self._heap[0][1].arrival not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def remove(self, sequence: Sequence) -> None:
        """Remove ``sequence``, if it is in the queue."""
        self._members.pop(sequence.arrival, None)
        self._started.pop(sequence.arrival, None)
        if len(self._heap) > 2 * len(self._members) + _MAX_REMOVED:
            self._heap = [(each.rank, each) for each in self._members.values()]
            heapq.heapify(self._heap)


class Deadlines:
    """The queue of requests by their deadlines. ``known`` maps request ids to the sequences that have not ended. The
    engine updates this mapping, and entries of ended requests are skipped."""

    def __init__(self, known: Mapping[int, Sequence]) -> None:
        """Create an empty queue. The argument is described at the class."""
        self._known = known
        self._heap: list[tuple[float, int, int]] = []
        """The triples (deadline, arrival, request id) as a heap. Entries of ended requests are skipped."""

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Record the deadline of ``sequence``, if it has one."""
        if sequence.request.deadline_s is None:
            return
        heapq.heappush(self._heap, (sequence.deadline_s, sequence.arrival, sequence.request.request_id))
        if len(self._heap) > 2 * len(self._known) + _MAX_REMOVED:
            self._heap = [entry for entry in self._heap if self._find_live(entry) is not None]
            heapq.heapify(self._heap)

    def has_expired(self, now_s: float) -> bool:
        """Return whether the earliest deadline is at ``now_s`` or before, on the engine's clock."""
        return bool(self._heap) and self._heap[0][0] <= now_s

    def pop_expired(self, now_s: float) -> list[Sequence]:
        """Remove and return the sequences whose deadline is at ``now_s`` or before."""
        expired = []
        while self.has_expired(now_s):
            sequence = self._find_live(heapq.heappop(self._heap))
            if sequence is not None:
                expired.append(sequence)
        return expired

    def _find_live(self, entry: tuple[float, int, int]) -> Sequence | None:
        """Return the sequence of a heap entry (deadline, arrival, request id); ``None`` if it has ended, also if its id
        has been used again."""
        sequence = self._known.get(entry[2])
        return sequence if sequence is not None and sequence.arrival == entry[1] else None
