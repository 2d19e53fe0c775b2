"""The HTTP connection class of every server of the library, with its time limits.

    waiting for a request ──head──▶ answering ──answer sent──▶ waiting for the next one
          │ idle timeout                │ the client reads nothing for the idle timeout
          ▼                             ▼
        closed                        closed

A server accepts a limited number of connections. At the limit, a new connection replaces the least important one, so
that connections without an authorized request cannot lock out connections with one. A connection on which an authorized
request is being answered is never closed to make room.
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
    """Mark the request of the ASGI ``scope`` as authorized: it carries the token, or the server needs no token. A
    server at its limit closes connections without an authorized request first."""
    scope.setdefault("state", {})[_AUTHORIZED] = True


class Connection(H11Protocol):
    """A connection of uvicorn that must make progress within ``timeout_keep_alive`` seconds. While no request is being
    answered, the client must send a whole request head; otherwise the client must read from the response. Computing the
    response may take any time.

    ``limit_concurrency`` is the largest number of connections. A connection beyond it replaces, among the connections
    without an authorized request, the one that became idle first; if there is none, the idle connection that became
    idle first. If authorized requests are being answered on all connections, the new connection receives status 503.
    """

    _idle_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _last_idle_s = 0.0
    """The time when the connection last became idle (it was opened, or its last response was complete), in seconds of
    the event loop's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the protocol object of one connection, with uvicorn's arguments. Requests whose end is ambiguous are
        refused before the application receives them."""
        super().__init__(*args, **kwargs)
        self.app = _AmbiguityFilter(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to count the idle time of the new connection over ``transport``. If the server now has too many
        connections, close the least important other connection."""
        super().connection_made(transport)
        self._start_idle_timer()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def on_response_complete(self) -> None:
        """Start to count the idle time again after a response is complete."""
        self._start_idle_timer()  # before the call below, which may start the next request
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start a timer that closes the connection if the client reads nothing for ``timeout_keep_alive`` seconds.
        asyncio calls this method when the write buffer is full."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timer of :meth:`pause_writing`, since the client has read from the response."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of a connection that has been closed."""
        super().connection_lost(exc)
        for timer in (self._idle_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def _start_idle_timer(self) -> None:
        """Start the timer that closes the connection after ``timeout_keep_alive`` seconds without a request head."""
        self._last_idle_s = self.loop.time()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_idle)

    @property
    def idle(self) -> bool:
        """Return whether no request is being answered on this connection."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def authorized(self) -> bool:
        """Return whether :func:`mark_authorized` has marked the latest request."""
        return self.scope is not None and _AUTHORIZED in self.scope["state"]

    def _close_if_idle(self) -> None:
        """Close the connection if no request is being answered on it, since the client has not sent a complete request
        head in time."""
        if self.idle:
            self.transport.abort()

    def _make_room(self) -> None:
        """Close the least important other connection. A connection whose latest request is not authorized is less
        important than an idle connection with an authorized request; among equals, the connection that became idle
        first is the least important. If authorized requests are being answered on all connections, close none."""
        others = [each for each in self.connections if isinstance(each, Connection) and each is not self]
        least_important = min(
            (each for each in others if each.idle or not each.authorized),
            key=lambda each: (each.authorized, each._last_idle_s),
            default=None,
        )
        if least_important is not None:
            # remove it here, since connection_lost is called only in the next iteration of the event loop
            self.connections.discard(least_important)
            least_important.transport.abort()


class _AmbiguityFilter:
    """An ASGI application that refuses requests whose end is ambiguous (RFC 9112, section 6.3). Behind a proxy, the
    rest of the body of such a request could be parsed as the request of another client."""

    def __init__(self, app: ASGIApp) -> None:
        """Forward all other requests to ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ambiguous request with status 400 and close its connection; forward any other request."""
        names = {name for name, _ in scope.get("headers", ())}
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            why = "Transfer-Encoding together with Content-Length, or in HTTP/1.0: send one of them"
            await PlainTextResponse(why, 400, {"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)
