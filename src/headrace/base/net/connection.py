"""One HTTP connection of any server of the library, with its time limits.

    waiting for a request ──head──▶ answering ──answer sent──▶ waiting for the next one
          │ idle timeout                │ the client reads nothing for the idle timeout
          ▼                             ▼
        closed                        closed

A server accepts a limited number of connections. When it has that many, a new connection replaces the least important
one, so that connections without an authorized request cannot lock out those with one. A connection on which an
authorized request is being answered is never closed to make room.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_AUTHORIZED = "headrace_authorized"


def mark_authorized(scope: MutableMapping[str, Any]) -> None:
    """Mark the request of the ASGI ``scope`` as authorized: it carries the token, or the server needs none. Its
    connection is then kept in preference to others."""
    scope.setdefault("state", {})[_AUTHORIZED] = True


class Connection(H11Protocol):
    """A connection of uvicorn that must make progress within ``timeout_keep_alive`` seconds: while no request is being
    answered, the client must send a whole request head; otherwise it must read what was sent. The answer itself may
    take any time.

    ``limit_concurrency`` is the largest number of connections. A connection beyond it replaces the one without
    an authorized request that was last idle the longest ago; if all have one, the one that has waited longest for its
    next request; if all are being answered, it gets status 503.
    """

    _listening: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _last_idle_s = 0.0
    """When the connection last became idle (it was made, or its last answer was complete), in seconds of the event
    loop's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the protocol object of one connection, with uvicorn's arguments. Requests with an ambiguous end are
        refused before they reach the application."""
        super().__init__(*args, **kwargs)
        self.app = _Unambiguous(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count the idle time of a new connection. If the server now has too many connections, close the least
        important other one."""
        super().connection_made(transport)
        self._listen()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def on_response_complete(self) -> None:
        """Begin to count the idle time again, now that an answer is complete."""
        self._listen()  # before the call below, which may start the next request
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start a timer that closes the connection if the client reads nothing for ``timeout_keep_alive`` seconds;
        asyncio calls this when the buffer of the answer is full."""
        super().pause_writing()
        self._writing = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer of :meth:`pause_writing`: the client has read from the answer."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of a connection that has been closed."""
        super().connection_lost(exc)
        for timer in (self._listening, self._writing):
            if timer is not None:
                timer.cancel()

    def _listen(self) -> None:
        """Start the timer that closes the connection after ``timeout_keep_alive`` seconds without a request."""
        self._last_idle_s = self.loop.time()
        if self._listening is not None:
            self._listening.cancel()
        self._listening = self.loop.call_later(self.timeout_keep_alive, self._end_if_idle)

    @property
    def idle(self) -> bool:
        """Return whether no request is being answered on this connection."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def authorized(self) -> bool:
        """Return whether :func:`mark_authorized` has marked the latest request."""
        return self.scope is not None and _AUTHORIZED in self.scope["state"]

    def _end_if_idle(self) -> None:
        """Close the connection if no request is being answered on it: the client has sent no complete request head in
        time."""
        if self.idle:
            self.transport.abort()

    def _make_room(self) -> None:
        """Close the least important other connection: one whose latest request is not authorized before one that is
        idle, and among these the one that last became idle the longest ago. If authorized requests are being answered
        on all connections, close none."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        least_important = min(
            (each for each in others if each.idle or not each.authorized),
            key=lambda each: (each.authorized, each._last_idle_s),
            default=None,
        )
        if least_important is not None:
            # removed here, since connection_lost is called only in the loop's next iteration
            self.connections.discard(least_important)
            least_important.transport.abort()


class _Unambiguous:
    """An ASGI application that refuses requests whose end two readers could place differently (RFC 9112, section
    6.3): behind a proxy, the rest of the body could be taken for the request of another client."""

    def __init__(self, app: ASGIApp) -> None:
        """Pass all other requests on to ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ambiguous request with status 400 and close its connection; pass any other request on."""
        names = {name for name, _ in scope.get("headers", ())}
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            why = "Transfer-Encoding together with Content-Length, or in HTTP/1.0: send one of them"
            await PlainTextResponse(why, 400, {"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)
