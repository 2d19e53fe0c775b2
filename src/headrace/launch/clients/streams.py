"""The streams of chunks of running requests, from the client that receives them to the tasks that read them."""

from __future__ import annotations

import asyncio

from headrace.base.types.episode import TokenChunk


class RequestStream:
    """The stream of one request, which one task reads."""

    def __init__(self, max_new_tokens: int) -> None:
        """Make the empty stream of a request that samples up to ``max_new_tokens`` tokens."""
        # at most one chunk for each token, one chunk that ends the request, and one error
        self._arrived: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue(maxsize=max_new_tokens + 2)

    def put(self, chunk: TokenChunk) -> None:
        """Add a chunk that has arrived. If it says that the tokens before it are lost, those that were not read are
        removed."""
        while chunk.lost and not self._arrived.empty():
            self._arrived.get_nowait()
        self._arrived.put_nowait(chunk)

    def fail(self, error: Exception) -> None:
        """Let the reader get ``error`` after the chunks that have arrived: no other chunk will come."""
        self._arrived.put_nowait(error)

    async def next(self) -> TokenChunk | Exception:
        """Wait for the next chunk, or for the error that ends the stream, and return it."""
        return await self._arrived.get()


class SiblingArrivals:
    """The chunks of several requests that one task reads together: those that have arrived since it last looked."""

    def __init__(self) -> None:
        """Begin without chunks."""
        self.error: Exception | None = None
        """The error that ends all the requests; ``None`` while there is none."""
        self._arrived: list[tuple[int, TokenChunk]] = []
        self._any = asyncio.Event()

    def add(self, index: int, chunk: TokenChunk) -> None:
        """Add a chunk of the sibling ``index``. If it says that the sibling's tokens before it are lost, those that
        were not read are removed."""
        if chunk.lost:
            self._arrived = [(other, earlier) for other, earlier in self._arrived if other != index]
        self._arrived.append((index, chunk))
        self._any.set()

    def fail(self, error: Exception) -> None:
        """Let the reader get ``error`` after the chunks that have arrived."""
        self.error = error
        self._any.set()

    async def next(self) -> list[tuple[int, TokenChunk]]:
        """Wait for chunks, and return all that have arrived, each with the index of its sibling. Raises the error that
        ended the requests when there are no more."""
        await self._any.wait()
        arrived, self._arrived = self._arrived, []
        if self.error is None:
            self._any.clear()
        elif not arrived:
            raise self.error
        return arrived


class SiblingStream:
    """The stream of one of several requests that one task reads together."""

    def __init__(self, arrivals: SiblingArrivals, index: int) -> None:
        """Pass the chunks of the sibling ``index`` on to ``arrivals``."""
        self._arrivals = arrivals
        self._index = index

    def put(self, chunk: TokenChunk) -> None:
        """Add a chunk that has arrived."""
        self._arrivals.add(self._index, chunk)

    def fail(self, error: Exception) -> None:
        """End the stream, and those of its siblings, with ``error``."""
        self._arrivals.fail(error)
