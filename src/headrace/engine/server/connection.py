"""Connections that stand still are cut: they would take the places of others."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection of uvicorn that must move within ``timeout_keep_alive`` seconds: bring a whole head of a request,
    while none is being answered, and take what it has been sent. An answer may take as long as it likes."""

    _listening: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listen()

    def on_response_complete(self) -> None:
        self._listen()  # first: in what follows the next request may begin
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._listening, self._writing):
            if timer is not None:
                timer.cancel()

    def _listen(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        self._listening = self.loop.call_later(self.timeout_keep_alive, self._end_if_idle)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _end_if_idle(self) -> None:
        if self.idle:
            self.transport.abort()
