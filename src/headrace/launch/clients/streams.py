"""Streams that pass the chunks of running requests from the client, which receives them, to the tasks that read
them."""

from __future__ import annotations

import asyncio

from headrace.base.types.episode import TokenChunk


class RequestStream:
    """The stream of one request. One task reads it."""

    def __init__(self, max_new_tokens: int) -> None:
        """Create the empty stream of a request that samples up to ``max_new_tokens`` tokens."""
        self._arrived: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue(maxsize=max_new_tokens + 2)
        """The unread chunks: at most one for each token, one that ends the request, and one error."""

    def put(self, chunk: TokenChunk) -> None:
        """Add a chunk that has arrived. If it says that earlier tokens of the request are lost, unread chunks are
        removed."""
        while chunk.lost and not self._arrived.empty():
            self._arrived.get_nowait()
        self._arrived.put_nowait(chunk)

    def fail(self, error: Exception) -> None:
        """Make the reader receive ``error`` after the chunks that have arrived. No other chunk may be added
        afterwards."""
        self._arrived.put_nowait(error)

    async def next(self) -> TokenChunk | Exception:
        """Wait for the next chunk, or for the error that ends the stream, and return it."""
        return await self._arrived.get()


class SiblingArrivals:
    """The chunks of several sibling requests that one task reads together."""

    def __init__(self) -> None:
        """Create a collection without chunks."""
        self.error: Exception | None = None
        """The error that has ended all of the requests; ``None`` if there is none."""
        self._arrived: list[tuple[int, TokenChunk]] = []
        """The unread chunks, each with the index of its sibling."""
        self._has_arrivals = asyncio.Event()
        """Set while there are unread chunks or an error."""

    def add(self, index: int, chunk: TokenChunk) -> None:
        """Add a chunk of the sibling ``index``. If it says that earlier tokens of this sibling are lost, unread chunks
        of the sibling are removed."""
        if chunk.lost:
            self._arrived = [(sibling, unread) for sibling, unread in self._arrived if sibling != index]
        self._arrived.append((index, chunk))
        self._has_arrivals.set()

    def fail(self, error: Exception) -> None:
        """Make the reader receive ``error`` after the chunks that have arrived."""
        self.error = error
        self._has_arrivals.set()

    async def next(self) -> list[tuple[int, TokenChunk]]:
        """Wait for chunks, and return all chunks that have arrived since the last call, each with the index of its
        sibling. If the requests have failed and no chunks are left, raise the error."""
        await self._has_arrivals.wait()
        arrived, self._arrived = self._arrived, []
        if self.error is None:
            self._has_arrivals.clear()
        elif not arrived:
            raise self.error
        return arrived


class SiblingStream:
    """The stream of one of several sibling requests that one task reads together."""

    def __init__(self, arrivals: SiblingArrivals, index: int) -> None:
        """Create the stream of the sibling ``index``, which adds its chunks to ``arrivals``."""
        self._arrivals = arrivals
        self._index = index

    def put(self, chunk: TokenChunk) -> None:
        """Add a chunk that has arrived."""
        self._arrivals.add(self._index, chunk)

    def fail(self, error: Exception) -> None:
        """End this stream and the streams of all siblings with ``error``."""
        self._arrivals.fail(error)
