"""What the loop of the wire leaves for the step loop: chunks, and reports of commits."""

from __future__ import annotations

import threading
from collections import deque

from headrace.base.types.messages.controller import Chunk
from headrace.base.types.weights import SwapReport


class ChunkQueue:
    """Bounded by the tokens of the requests: nothing else is put there."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._swaps: deque[SwapReport] = deque()
        self._there = threading.Event()

    def put(self, chunk: Chunk) -> None:
        """Leave a chunk."""
        self._chunks.append(chunk)
        self._there.set()

    def report(self, swap: SwapReport) -> None:
        """Leave a report."""
        self._swaps.append(swap)
        self._there.set()

    @property
    def any(self) -> bool:
        """Whether something is there."""
        return bool(self._chunks or self._swaps)

    def wait(self, timeout_s: float) -> None:
        """Until something is there, at most so long."""
        if not self.any:
            self._there.wait(timeout_s)
        self._there.clear()

    def take(self) -> list[Chunk]:
        """The chunks that are there."""
        return [self._chunks.popleft() for _ in range(len(self._chunks))]

    def take_swaps(self) -> list[SwapReport]:
        """The reports that are there."""
        return [self._swaps.popleft() for _ in range(len(self._swaps))]
