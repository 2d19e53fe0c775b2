"""The HTTP server of the dashboard: its settings, its socket, and the opening of a browser."""

from __future__ import annotations

import html
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from headrace.base.config.tls import refuse_incomplete_tls, server_context
from headrace.base.errors import ConfigError
from headrace.base.net.shell import HttpServer, ShellLimits, listening_socket
from headrace.wings.view.auth import ViewAuth


class AppFactory(Protocol):
    """A function that returns the application to serve, such as the dashboard of runs, for a token that is chosen when
    the server starts."""

    def __call__(self, *, token: str, secure: bool, ending: Callable[[], bool]) -> ViewAuth:
        """Return the application. Every request must have ``token``. Its event streams end once ``ending()`` returns
        true; ``secure`` is true if the application is served over TLS only."""
        ...


def serve(make_app: AppFactory, config: ViewConfig, *, report: Callable[[str], None]) -> None:
    """Serve the dashboard that ``make_app`` returns until Ctrl-C or SIGTERM; ``report`` is called with the address to
    open, which includes the token.

    Raises :class:`~headrace.base.errors.ConfigError` if the address cannot be bound or the certificate cannot be used.
    """
    config = config if config.token else replace(config, token=secrets.token_urlsafe(18))
    if config.tls_certificate:
        server_context(config.tls_certificate, config.tls_key)
    with bind(config) as listening:
        server = make_server(make_app, config)
        report(make_url(listening, config))
        server.run(sockets=[listening])


def make_server(make_app: AppFactory, config: ViewConfig) -> HttpServer:
    """Return the HTTP server of the application that ``make_app`` returns, with the settings ``config``; Ctrl-C ends
    it."""
    limits = ShellLimits(tls_certificate=config.tls_certificate, tls_key=config.tls_key)
    app = make_app(token=config.token, ending=lambda: server.should_exit, secure=bool(config.tls_certificate))
    server = HttpServer(app, limits, own_logging=True, takes_signals=True)
    return server


def open_browser(url: str, report: Callable[[str], None], directory: Path) -> threading.Thread:
    """Open ``url`` in a browser, in a separate thread, which is returned; call ``report`` with a message if there is no
    browser. The browser opens a private page in ``directory`` that redirects to ``url``, because every user of the
    machine can read the browser's command-line arguments, and the URL has the token."""
    page = directory / "open.html"
    page.touch(0o600)
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">', encoding="utf-8")

    def show() -> None:
        """Open the page in a browser; report how to open it by hand if there is no graphical browser."""
        found: webbrowser.BaseBrowser | None = None
        with suppress(webbrowser.Error):
            found = webbrowser.get()
        if found is None or _is_in_terminal(found):
            report("no browser was found: open the address yourself; over ssh: ssh -L PORT:127.0.0.1:PORT HOST")
            return
        found.open(page.as_uri())

    thread = threading.Thread(target=show, name="browser", daemon=True)
    thread.start()
    return thread


def _is_in_terminal(browser: webbrowser.BaseBrowser) -> bool:
    """Return whether a browser displays its pages in this terminal. Such browsers cannot show the dashboard, because
    they run no scripts."""
    return isinstance(browser, webbrowser.GenericBrowser) and not isinstance(browser, webbrowser.BackgroundBrowser)


def bind(config: ViewConfig) -> socket.socket:
    """Return a listening socket at the address of ``config``.

    Raises :class:`~headrace.base.errors.ConfigError` if the address cannot be bound.
    """
    return listening_socket(
        config.host,
        config.port,
        setting=f"--host {config.host} --port {config.port}",
        remedy="choose another --port (0 for a free one) or --host, or end what listens there",
    )


def make_url(listening: socket.socket, config: ViewConfig) -> str:
    """Return the URL to open in a browser, with the token in ``config``, for the socket ``listening``. If the server
    listens on all addresses of this machine, the URL has the machine's host name."""
    port = listening.getsockname()[1]
    named = config.host if config.host not in ("0.0.0.0", "::") else socket.gethostname()
    host = f"[{named}]" if ":" in named else named
    return f"{'https' if config.tls_certificate else 'http'}://{host}:{port}/?token={quote(config.token)}"


DEFAULT_PORT = 8321
"""The default port of the dashboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """Settings of the dashboard's server, from the command line."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = DEFAULT_PORT
    """Port to listen on; 0: any free port."""
    token: str = ""
    """Token that clients must present; empty: a new one is generated."""
    tls_certificate: str = ""
    """PEM file with the server's certificate; empty: no TLS."""
    tls_key: str = ""
    """PEM file with the key of the certificate."""

    def __post_init__(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for an impossible port, an empty host, and a certificate
        without its key."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a port", remedy="give 0 (a free one) to 65535")
        if not self.host:
            raise ConfigError("--host is empty", remedy="give an address, 127.0.0.1 for this machine only")
        refuse_incomplete_tls("view", self.tls_certificate, self.tls_key)
