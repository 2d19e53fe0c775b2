"""The dashboard from its terms to Ctrl-C."""

from __future__ import annotations

import html
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from headrace.base.clock import Clock
from headrace.base.config.tls import server_context
from headrace.base.errors import ConfigError
from headrace.base.net.shell import HttpServer, ShellLimits
from headrace.wings.view.app import make_app
from headrace.wings.view.run import OpenRun
from headrace.wings.view.terms import ViewTerms


def serve(runs: Sequence[OpenRun], terms: ViewTerms, *, clock: Clock, tell: Callable[[str], None]) -> None:
    """Show ``runs`` until Ctrl-C or SIGTERM; ``tell`` gets the address to open, with the token.

    Raises :class:`~headrace.base.errors.ConfigError` if the address cannot be bound, or the certificate not be used.
    """
    terms = terms if terms.token else replace(terms, token=secrets.token_urlsafe(18))
    if terms.tls_certificate:
        server_context(terms.tls_certificate, terms.tls_key)
    with bind(terms) as listening:
        server = make_server(runs, terms, clock)
        tell(address(listening, terms))
        server.run(sockets=[listening])


def make_server(runs: Sequence[OpenRun], terms: ViewTerms, clock: Clock) -> HttpServer:
    """Return the server of the dashboard of ``runs``; it ends at Ctrl-C."""
    limits = ShellLimits(tls_certificate=terms.tls_certificate, tls_key=terms.tls_key)
    app = make_app(
        runs, clock=clock, token=terms.token, ending=lambda: server.should_exit, secure=bool(terms.tls_certificate)
    )  # fmt: skip
    server = HttpServer(app, limits, own_logging=True, takes_signals=True)
    return server


def open_browser(url: str, tell: Callable[[str], None], directory: Path) -> threading.Thread:
    """Show ``url`` in a browser, in a thread of its own; say so where there is none. The browser is given a page that
    is put into ``directory`` and leads there: its arguments can be read by everybody on the machine."""
    page = directory / "open.html"
    page.touch(0o600)
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(url)}">', encoding="utf-8")

    def show() -> None:
        found: webbrowser.BaseBrowser | None = None
        with suppress(webbrowser.Error):
            found = webbrowser.get()
        if found is None or _in_terminal(found):
            tell("no browser was found: open the address yourself; over ssh: ssh -L PORT:127.0.0.1:PORT HOST")
            return
        found.open(page.as_uri())

    thread = threading.Thread(target=show, name="browser", daemon=True)
    thread.start()
    return thread


def _in_terminal(found: webbrowser.BaseBrowser) -> bool:
    """Whether a browser would draw its pages over this terminal: it knows no scripts either."""
    return isinstance(found, webbrowser.GenericBrowser) and not isinstance(found, webbrowser.BackgroundBrowser)


def bind(terms: ViewTerms) -> socket.socket:
    """A socket at the address of ``terms``. Raises :class:`~headrace.base.errors.ConfigError` where that is taken."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(terms.host, terms.port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_error:
            made = on_error.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(where)
            made.listen()  # whoever is told the address may call at once, and waits
            on_error.pop_all()
            return made
    except OSError as error:
        raise ConfigError(
            f"--host {terms.host} --port {terms.port}: cannot listen there: {error.strerror or error}",
            remedy="choose another --port (0 for a free one) or --host, or end what listens there",
        ) from None


def address(listening: socket.socket, terms: ViewTerms) -> str:
    """What to open."""
    port = listening.getsockname()[1]
    named = terms.host if terms.host not in ("0.0.0.0", "::") else socket.gethostname()
    host = f"[{named}]" if ":" in named else named
    return f"{'https' if terms.tls_certificate else 'http'}://{host}:{port}/?token={quote(terms.token)}"
