"""The HTTP server, a uvicorn server, that runs every ASGI application of the library, with its limits and its listening
socket."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

from headrace.base.errors import ConfigError
from headrace.base.net.connection import Connection

_LOGGING = {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], "asyncio": {"level": "ERROR"}}}
"""uvicorn's logging without asyncio's warnings about writing to a client that has just disconnected, which are counted
elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellLimits:
    """The limits and the TLS files of an :class:`HttpServer`."""

    idle_timeout_s: int = 30
    """The number of seconds within which a client must finish its TLS handshake, send the head of a request, and read
    some of the response."""
    max_connections: int = 256
    """The largest number of connections. It is reduced to half of the files that the process may open, since the
    process needs the other half for other purposes."""
    grace_s: int = 1
    """The number of seconds that unfinished responses may still take after the server was stopped."""
    tls_certificate: str = ""
    """The PEM file of the certificate; empty: no TLS."""
    tls_key: str = ""
    """The PEM file of the certificate's key."""


class HttpServer(uvicorn.Server):
    """A uvicorn server of an ASGI application, with limits on its connections. Set the attribute ``should_exit`` to
    stop the server."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ShellLimits,
        *,
        own_logging: bool = False,
        takes_signals: bool = False,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve ``app`` within ``limits``.

        ``own_logging`` configures uvicorn's loggers. With ``takes_signals`` the server stops at Ctrl-C and SIGTERM, and
        does not raise the signal again afterwards as uvicorn does; otherwise the program handles signals. The server
        calls ``ending`` when it starts to stop, so that the application can complete requests that would wait longer.
        """
        self._takes_signals, self._ending = takes_signals, ending
        settings: dict[str, Any] = {"log_config": _LOGGING if own_logging else None}
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_level="error",
                server_header=False,
                http=Connection,
                ws="none",
                timeout_keep_alive=limits.idle_timeout_s,
                limit_concurrency=max(2, min(limits.max_connections, _open_files() // 2)),
                timeout_graceful_shutdown=limits.grace_s,
                ssl_certfile=limits.tls_certificate or None,
                ssl_keyfile=limits.tls_key or None,
                **settings,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at ``sockets``, which the caller has bound. Unlike uvicorn's method, this method also limits the time
        of the TLS handshake."""
        assert sockets is not None, "the caller binds, so that a wrong address fails before the server starts"
        await super().startup(sockets=[])
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        for each in sockets:
            self.servers.append(
                await loop.create_server(
                    self._connection, sock=each, ssl=tls, backlog=self.config.backlog,
                    ssl_handshake_timeout=self.config.timeout_keep_alive if tls is not None else None,
                )
            )  # fmt: skip

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the server: call ``ending``, wait for open requests, and close all connections."""
        self._ending()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A context that handles Ctrl-C and SIGTERM, if the server was created with ``takes_signals`` and runs in the
        main thread. It replaces uvicorn's own signal handling."""
        loop = asyncio.get_running_loop()
        is_enabled = self._takes_signals and threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_enabled else ()
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _connection(self) -> Connection:
        """Return the protocol object for a new connection; asyncio calls this for each one."""
        return Connection(self.config, self.server_state, self.lifespan.state)


def listening_socket(host: str, port: int, *, setting: str, remedy: str) -> socket.socket:
    """Return a socket that listens at ``host`` and ``port``; port 0 selects a free port. A connection that arrives
    before the server runs waits in the backlog.

    Raises :class:`~headrace.base.errors.ConfigError` if the address cannot be used. Its message contains ``setting``,
    the address as the user has set it, and ``remedy``.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_error:
            made = on_error.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen()
            on_error.pop_all()
            return made
    except OSError as error:
        raise ConfigError(f"{setting}: cannot listen there: {error.strerror or error}", remedy=remedy) from None


def make_url(listening: socket.socket, *, secure: bool = False) -> str:
    """Return the URL of the server that listens at the socket ``listening``: ``https`` if ``secure``, else ``http``."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _open_files() -> int:
    """Return the number of files that this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
