"""One HTTP connection of any server of the library, and what it may hold of that server.

    waiting for a request ──head──▶ answering ──answer sent──▶ waiting for the next one
          │ idle timeout                │ the client takes nothing for the idle timeout
          ▼                             ▼
         cut                           cut

A server has a limited number of places. When they are full, a new connection gets the place of the one that matters
least, so that connections which nobody has proved to be entitled cannot lock out those who are.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_ENTITLED = "headrace_entitled"


def mark_entitled(scope: MutableMapping[str, Any]) -> None:
    """Record that the request of ``scope`` may be answered: it has the token, or the server wants none."""
    scope.setdefault("state", {})[_ENTITLED] = True


class Connection(H11Protocol):
    """A connection of uvicorn that must move within ``timeout_keep_alive`` seconds: bring a whole head of a request,
    while none is being answered, and take what it has been sent. An answer may take as long as it likes.

    ``limit_concurrency`` is the number of places of the server. The connection that exceeds it replaces the oldest one
    without an entitled request; where all have one, the oldest that waits for its next request; where all are being
    answered, it hears 503.
    """

    _listening: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _since_s = 0.0
    """When it was made, or its last answer was complete, on the loop's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = _Unambiguous(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listen()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

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
        self._since_s = self.loop.time()
        if self._listening is not None:
            self._listening.cancel()
        self._listening = self.loop.call_later(self.timeout_keep_alive, self._end_if_idle)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def entitled(self) -> bool:
        """Whether its latest request may be answered, as :func:`mark_entitled` recorded."""
        return self.scope is not None and _ENTITLED in self.scope["state"]

    def _end_if_idle(self) -> None:
        if self.idle:
            self.transport.abort()

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        least = min(
            (each for each in others if each.idle or not each.entitled),
            key=lambda each: (each.entitled, each._since_s),
            default=None,
        )
        if least is not None:
            self.connections.discard(least)  # at once: the transport reports its end in the next turn of the loop
            least.transport.abort()


class _Unambiguous:
    """Refuses requests whose end two readers could see at different places (RFC 9112, section 6.3): behind a proxy the
    rest of the body could be taken for another client's request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            why = "Transfer-Encoding together with Content-Length, or in HTTP/1.0: send one of them"
            await PlainTextResponse(why, 400, {"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)
