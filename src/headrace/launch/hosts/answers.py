"""The answers of an engine to processes that ask it beside the controller: their chunks are sent to them directly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import Chunks, EngineStats
from headrace.base.types.messages.engine import Generate


class AnswerEnd(Protocol):
    """The sockets by which an engine answers other processes of its machine than the controller."""

    def answer(self, reader: str, message: Chunks) -> None:
        """Send ``message`` to the process that receives answers at the address ``reader``."""
        ...

    def forget_reader(self, reader: str) -> None:
        """Drop the messages that the process at the address ``reader`` has not received, because it has died."""
        ...


class AnswerRoutes:
    """The addresses to which the chunks of an engine's requests go. Requests of all processes have different
    numbers."""

    def __init__(self, sockets: AnswerEnd) -> None:
        """Send by ``sockets``; no request is known yet."""
        self._sockets = sockets
        self._readers: dict[int, str] = {}
        """The address of the reader of each running request that the controller does not read."""
        self._gone: set[str] = set()
        """The addresses of the processes that have died. No other process gets them."""

    def add(self, order: Generate) -> bool:
        """Note where the chunks of the requests of ``order`` go. Return whether anybody reads them: an order may arrive
        after the death of the process that sent it."""
        if order.answers_to in self._gone:
            return False
        if order.answers_to:
            self._readers.update(dict.fromkeys([one.request_id for one in order.requests], order.answers_to))
        return True

    def split(self, chunks: Sequence[TokenChunk], stats: EngineStats) -> list[TokenChunk]:
        """Send the chunks that another process reads to it, with the counters ``stats``, and return those that the
        controller reads."""
        if not self._readers:
            return list(chunks)
        own: list[TokenChunk] = []
        others: dict[str, list[TokenChunk]] = {}
        for chunk in chunks:
            reader = self._readers.get(chunk.request_id, "")
            (others.setdefault(reader, []) if reader else own).append(chunk)
            if chunk.ended:
                self._readers.pop(chunk.request_id, None)
        for reader, read in others.items():
            self._sockets.answer(reader, Chunks(chunks=tuple(read), stats=stats, spans=()))
        return own

    def forget(self, reader: str) -> Iterable[int]:
        """Forget the process at the address ``reader``, and return the numbers of its running requests."""
        numbers = [number for number, address in self._readers.items() if address == reader]
        for number in numbers:
            del self._readers[number]
        self._gone.add(reader)
        self._sockets.forget_reader(reader)
        return numbers
