"""A server from its settings to its end.

    bind ─▶ listen (503: loading) ─▶ load model, make engine ─▶ serve ─▶ Ctrl-C ─▶ drain for grace_s ─▶ withdraw ─▶ end

The port is taken before the model is loaded, so that a wrong one is told at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.types import ASGIApp

from headrace.base.clock import Clock
from headrace.base.config.tls import server_context
from headrace.base.errors import ConfigError
from headrace.base.net.auth import refuse_open_door
from headrace.base.net.shell import HttpServer, ShellLimits
from headrace.engine.base import EngineCore
from headrace.engine.local import LocalEngine, LocalTerms
from headrace.wings.serve.answering import Service
from headrace.wings.serve.app import State, make_app
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.config import ServeSection
from headrace.wings.serve.prompts import PromptLimits

LAST_RESORT_S = 5.0
"""After the grace period, how long connections may take to end before they are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that can be served."""

    core: EngineCore
    """With weights committed."""
    words: ServedTokenizer
    name: str
    agents: tuple[str, ...] = ()
    """Those with adapters of their own, which answer under their names."""
    max_context: int
    """Longest prompt plus choice, in tokens: of the context, or of the cache where that holds less."""
    facts: Mapping[str, str | int | float]
    """What computes it and where its memory goes, as :meth:`~headrace.engine.native.NativeEngine.facts` names it, and
    ``device`` and ``weights_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvents:
    """Whom to tell what happens."""

    listening: Callable[[str], None]
    """The server's URL; the model is not there yet."""
    serving: Callable[[str, Loaded], None]
    """Its URL, and what it serves."""
    ending: Callable[[int], None]
    """It has been told to end, and this many requests are open."""


def serve(
    limits: ServeSection, token: str, load: Callable[[], Loaded], *, clock: Clock, events: ServerEvents
) -> None:  # fmt: skip
    """Serve what ``load`` returns until Ctrl-C or SIGTERM.

    Raises :class:`~headrace.base.errors.ConfigError` if the address cannot be bound or would be open to anybody, what
    ``load`` raises, and :class:`~headrace.base.errors.ComponentDied` when the engine does.
    """
    refuse_open_door(limits.host, token)
    if limits.tls_certificate:
        server_context(limits.tls_certificate, limits.tls_key)  # told before anything is taken
    with _bind(limits.host, limits.port) as listening:
        asyncio.run(_ServeServer(limits, token, clock, events).run(listening, load))


class _Draining(HttpServer):
    """A server that says when it begins to end."""

    def __init__(self, app: ASGIApp, limits: ShellLimits, ending: Callable[[], None]) -> None:
        super().__init__(app, limits, own_logging=True, takes_signals=True)
        self._ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        await super().shutdown(sockets)


class _ServeServer:
    def __init__(self, limits: ServeSection, token: str, clock: Clock, events: ServerEvents) -> None:
        self._limits, self._clock, self._events = limits, clock, events
        self._state = State()
        self._engine: LocalEngine | None = None
        shell = ShellLimits(
            idle_timeout_s=limits.idle_timeout_s,
            max_connections=limits.max_sequences + 1024,
            grace_s=int(limits.grace_s + LAST_RESORT_S),
            tls_certificate=limits.tls_certificate,
            tls_key=limits.tls_key,
        )
        self._http = _Draining(make_app(self._state, token), shell, self._drain)

    async def run(self, listening: socket.socket, load: Callable[[], Loaded]) -> None:
        url = _url(listening, "https" if self._limits.tls_certificate else "http")
        try:
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(self._http.serve(sockets=[listening]))
                self._events.listening(url)
                living = group.create_task(self._live(url, load))
                serving.add_done_callback(lambda _: living.cancel())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _live(self, url: str, load: Callable[[], Loaded]) -> None:
        """Load, then keep the engine until the server has ended, or the engine has."""
        try:
            loaded = await asyncio.to_thread(load)
            terms = LocalTerms(max_requests=self._limits.max_sequences)
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode") as encoder:
                async with LocalEngine(loaded.core, clock=self._clock, terms=terms) as engine:
                    self._engine = engine
                    self._state.service = self._service(loaded, engine, encoder)
                    self._events.serving(url, loaded)
                    raise await engine.died()
        finally:
            self._http.should_exit = True

    def _service(self, loaded: Loaded, engine: LocalEngine, encoder: ThreadPoolExecutor) -> Service:
        return Service(
            engine=engine,
            words=loaded.words,
            terms=PromptLimits(
                model=loaded.name, agents=loaded.agents, max_context=loaded.max_context, limits=self._limits
            ),
            clock=self._clock,
            encoder=encoder,
        )

    def _drain(self) -> None:
        """Nothing new begins; what still runs after the grace period ends with what it has."""
        self._state.draining = True
        self._events.ending(len(self._http.server_state.tasks))
        if self._engine is not None:
            asyncio.get_running_loop().call_later(self._limits.grace_s, self._engine.withdraw_all)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as on_error:
            made = on_error.enter_context(socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            on_error.pop_all()
            return made
    except OSError as error:
        raise ConfigError(
            f"serve.host={host!r}, serve.port={port}: cannot listen there: {error.strerror or error}",
            remedy="choose another --port (0 for a free one) or --host, or end what listens there",
        ) from None


def _url(listening: socket.socket, scheme: str) -> str:
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
