"""The endpoint as a server inside the controller's loop: on this machine alone, unless another address is named."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.clock import Clock
from headrace.base.config.tls import server_context
from headrace.base.errors import RunError
from headrace.base.net.refusal import shown
from headrace.base.net.shell import HttpServer, ShellLimits
from headrace.base.types.sampling import Sampling
from headrace.rollout.environments.base import OpenEpisode
from headrace.wings.agents.app import EndpointDispatcher, make_app
from headrace.wings.agents.base import Access, SessionLimits
from headrace.wings.agents.sessions import Sessions

MAX_CONNECTIONS = 4096
"""At once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where an endpoint listens, and to how much."""

    host: str = "127.0.0.1"
    """An address of this machine."""
    tls_certificate: str = ""
    """A PEM file; empty: in clear text."""
    tls_key: str = ""
    """Its key."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    """What it takes."""
    path: Path | None = None
    """Of a socket at which it listens too."""


_HERE = At()


class Endpoint:
    """Where programs reach their episodes. Made by :meth:`listening`."""

    def __init__(self, base_url: str, sessions: Sessions) -> None:
        self.base_url = base_url
        """Without ``/v1``."""
        self._sessions = sessions

    @classmethod
    @asynccontextmanager
    async def listening(
        cls,
        sampling: Sampling,
        *,
        clock: Clock,
        warn: Callable[[str], None],
        agents: frozenset[str] = frozenset(),
        at: At = _HERE,
    ) -> AsyncIterator[Endpoint]:
        """An endpoint that answers for the body's duration, on a free port.

        ``sampling`` is how the policy samples, whatever requests say; ``warn`` is told, once for each field, if they
        say something else. A request whose model is one of ``agents`` is answered by that agent. Raises
        :class:`~headrace.base.errors.RunError` where no port can be had, :class:`~headrace.base.errors.ConfigError` for
        a certificate that cannot be used.
        """
        if at.tls_certificate:
            server_context(at.tls_certificate, at.tls_key)
        limits, sessions = at.limits, Sessions(at.limits)
        desk = EndpointDispatcher(
            sessions=sessions, limits=limits, clock=clock, on_wish=_Wishes(sampling, warn), agents=agents
        )  # fmt: skip
        with _bound(at.host) as listening, _bound_to(at.path) as more:
            shell = ShellLimits(
                idle_timeout_s=limits.idle_timeout_s,
                max_connections=MAX_CONNECTIONS,
                tls_certificate=at.tls_certificate,
                tls_key=at.tls_key,
            )
            server = HttpServer(make_app(desk), shell)
            host, port = listening.getsockname()[:2]
            scheme, host = "https" if at.tls_certificate else "http", f"[{host}]" if ":" in host else host
            async with _beside(server, [listening, *more]):
                yield cls(f"{scheme}://{host}:{port}", sessions)

    def session(self, episode: OpenEpisode, at: str = "") -> AbstractAsyncContextManager[Access]:
        """A way into ``episode`` for the body's duration; ``at``: a ``HOST:PORT`` elsewhere that leads here. Afterwards
        its key is refused and none of its requests runs, so that the episode is complete; what went wrong in it that
        no program could mend is raised."""
        scheme, _, here = self.base_url.partition("://")
        return self._sessions.open(episode, f"{scheme}://{at or here}")


class _Wishes:
    """Tells once of every field by which programs ask for what they do not get."""

    def __init__(self, sampling: Sampling, warn: Callable[[str], None]) -> None:
        self._own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        self._warn = warn
        self._told: set[str] = set()

    def __call__(self, name: str, value: float | str) -> None:
        own = self._own.get(name)
        if value == own or name in self._told:
            return
        self._told.add(name)
        instead = f"the policy samples with {name}={own:g}" if own is not None else "the policy does not read that"
        asked = f"{name}={value:g}" if isinstance(value, float | int) else f"{name}={shown(value)}"
        self._warn(f"a program asks for {asked}; {instead}, as everywhere in the run: so it is trained")


@asynccontextmanager
async def _beside(server: HttpServer, listening: list[socket.socket]) -> AsyncIterator[None]:
    """``server`` serves while the body runs, and has let go of every connection when this returns."""
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=listening))
            try:
                yield
            finally:
                server.should_exit = True
                await asyncio.wait({serving})
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@contextmanager
def _bound(host: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, 0), family=family, backlog=2048)
    except OSError as error:
        raise RunError(
            f"the endpoint for programs cannot listen on {host}: {error}",
            remedy="is that an address of this machine, may this process open sockets, and is a port free?",
        ) from None
    with contextlib.closing(listening):
        yield listening


@contextmanager
def _bound_to(path: Path | None) -> Iterator[list[socket.socket]]:
    if path is None:
        yield []
        return
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        yield [listening]
