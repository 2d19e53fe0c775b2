"""The routes of an engine's answers. Processes other than the controller may send requests to an engine; the engine
sends their chunks directly to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import Chunks, EngineStats
from headrace.base.types.messages.engine import Generate


class AnswerEnd(Protocol):
    """The sockets through which an engine sends answers to processes on its machine other than the controller."""

    def answer(self, reader: str, message: Chunks) -> None:
        """Send ``message`` to the process that receives answers at the address ``reader``."""
        ...

    def forget_reader(self, reader: str) -> None:
        """Discard all unread messages for the process at the address ``reader``, because the process has died."""
        ...


class AnswerRoutes:
    """The destinations of the chunks of an engine's requests. Requests of different processes never have the same
    number."""

    def __init__(self, sockets: AnswerEnd) -> None:
        """Create routes without requests, which send through ``sockets``."""
        self._sockets = sockets
        self._readers: dict[int, str] = {}
        """For each running request that the controller did not send: the address of the process that reads its
        chunks."""
        self._gone: set[str] = set()
        """The addresses of processes that have died. No later process uses the same address."""

    def add(self, order: Generate) -> bool:
        """Record the destination of the chunks of the requests in ``order``. Return whether the sender is alive: an
        order may arrive after the death of the process that sent it."""
        if order.answers_to in self._gone:
            return False
        if order.answers_to:
            self._readers.update(dict.fromkeys([request.request_id for request in order.requests], order.answers_to))
        return True

    def split(self, chunks: Sequence[TokenChunk], stats: EngineStats) -> list[TokenChunk]:
        """Send chunks that other processes read to these processes, with the counters ``stats``. Return the chunks that
        the controller reads."""
        if not self._readers:
            return list(chunks)
        own: list[TokenChunk] = []
        by_reader: dict[str, list[TokenChunk]] = {}
        for chunk in chunks:
            reader = self._readers.get(chunk.request_id, "")
            (by_reader.setdefault(reader, []) if reader else own).append(chunk)
            if chunk.ended:
                self._readers.pop(chunk.request_id, None)
        for reader, reader_chunks in by_reader.items():
            self._sockets.answer(reader, Chunks(chunks=tuple(reader_chunks), stats=stats, spans=()))
        return own

    def forget(self, reader: str) -> Iterable[int]:
        """Remove the process at the address ``reader``, which has died, and return the numbers of its running
        requests."""
        numbers = [number for number, address in self._readers.items() if address == reader]
        for number in numbers:
            del self._readers[number]
        self._gone.add(reader)
        self._sockets.forget_reader(reader)
        return numbers
