"""The HTTP server in which every ASGI application of the library runs: uvicorn, with its bounds set in one place."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

from headrace.base.net.connection import Connection

_LOGGING = {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], "asyncio": {"level": "ERROR"}}}
"""Without asyncio's warnings of what is written behind a client that has just left: it is counted, not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellLimits:
    """What connections may take of a server."""

    idle_timeout_s: int = 30
    """Seconds within which a connection must finish its TLS handshake, bring the head of a request, and take some of
    its answer."""
    max_connections: int = 256
    """Places. It is never more than half of the files that the process may open: the rest is needed elsewhere."""
    grace_s: int = 1
    """Seconds that open answers may take once the server has been told to end."""
    tls_certificate: str = ""
    """PEM file; empty: no TLS."""
    tls_key: str = ""
    """PEM file with its key."""


class HttpServer(uvicorn.Server):
    """A server of ``app``; :attr:`should_exit` ends it.

    ``own_logging`` sets up uvicorn's loggers. ``takes_signals`` ends it at Ctrl-C and SIGTERM, which uvicorn would
    raise again afterwards; otherwise signals are left to the program.
    """

    def __init__(
        self, app: ASGIApp, limits: ShellLimits, *, own_logging: bool = False, takes_signals: bool = False
    ) -> None:  # fmt: skip
        self._takes_signals = takes_signals
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
        """Listen at ``sockets``. Unlike uvicorn's own, it bounds the TLS handshake too."""
        assert sockets is not None, "the caller binds, so that a wrong address is told before the server starts"
        await super().startup(sockets=[])
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        for each in sockets:
            self.servers.append(
                await loop.create_server(
                    self._connection, sock=each, ssl=tls, backlog=self.config.backlog,
                    ssl_handshake_timeout=self.config.timeout_keep_alive if tls is not None else None,
                )
            )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM while the body runs, if this server takes them."""
        loop = asyncio.get_running_loop()
        takes = self._takes_signals and threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if takes else ()
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
