"""The HTTP server of the session endpoint, which runs in the controller's event loop. Programs act in an episode by
sending requests to it. It listens on this machine only, unless another address is configured."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from headrace.base.clock import Clock
from headrace.base.config.tls import server_context
from headrace.base.errors import RunError
from headrace.base.net.refusal import excerpt
from headrace.base.net.shell import HttpServer, ShellLimits, make_url
from headrace.base.types.sampling import Sampling
from headrace.launch.endpoints import HERE, ListenAddress
from headrace.rollout.environments.base import OpenEpisode
from headrace.wings.agents.app import EndpointDispatcher, make_app
from headrace.wings.agents.base import Access, SessionLimits
from headrace.wings.agents.sessions import Sessions

MAX_CONNECTIONS = 4096
"""Largest number of connections that are open at once."""


class Endpoint:
    """The server to which programs send the requests of their episodes; :meth:`listening` creates and runs it."""

    def __init__(self, base_url: str, sessions: Sessions) -> None:
        """Create the endpoint of a server that listens at ``base_url`` and serves ``sessions``; use :meth:`listening`
        instead."""
        self.base_url = base_url
        """The server's URL without ``/v1``."""
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
        at: ListenAddress = HERE,
        limits: SessionLimits | None = None,
    ) -> AsyncIterator[Endpoint]:
        """Return a context in which an endpoint runs on a free port of the address ``at``.

        ``clock`` gives the time, and ``limits`` are the limits of each session (``None``: the defaults). ``sampling``
        are the sampling settings of the policy, which requests cannot change; ``warn`` is called once for each field of
        a request with a different value. A request whose model is the name of one of ``agents`` is answered by that
        agent. Raises :class:`~headrace.base.errors.RunError` if no port is free, and
        :class:`~headrace.base.errors.ConfigError` for a certificate that cannot be used.
        """
        if at.tls_certificate:
            server_context(at.tls_certificate, at.tls_key)
        limits = SessionLimits() if limits is None else limits
        sessions = Sessions(limits)
        dispatcher = EndpointDispatcher(
            sessions=sessions, limits=limits, clock=clock, on_ignored=_IgnoredWarnings(sampling, warn), agents=agents
        )  # fmt: skip
        with _open_socket(at.host) as listening:
            shell = ShellLimits(
                idle_timeout_s=limits.idle_timeout_s,
                max_connections=MAX_CONNECTIONS,
                tls_certificate=at.tls_certificate,
                tls_key=at.tls_key,
            )
            server = HttpServer(make_app(dispatcher), shell)
            async with _run_server(server, [listening]):
                yield cls(make_url(listening, secure=bool(at.tls_certificate)), sessions)

    def session(self, episode: OpenEpisode) -> AbstractAsyncContextManager[Access]:
        """Return a context in which programs can act in ``episode``; it yields the address and the key for them. After
        the context the key is refused and no request runs, so that the episode is complete. Raises an unexpected error
        that occurred while a request was answered."""
        return self._sessions.open(episode, self.base_url)


class _IgnoredWarnings:
    """A callable that warns the user once for each field of requests whose value differs from the policy's setting."""

    def __init__(self, sampling: Sampling, warn: Callable[[str], None]) -> None:
        """Create the callable. ``sampling`` are the sampling settings of the policy, and ``warn`` shows a line to the
        user."""
        self._own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        """The policy's setting of each field about which a warning may be shown."""
        self._warn = warn
        self._warned: set[str] = set()
        """The fields about which a warning was shown."""

    def __call__(self, name: str, value: float | str) -> None:
        """Warn that a request has ``value`` in the field ``name``, unless the policy uses that value or there was a
        warning about the field before."""
        own = self._own.get(name)
        if value == own or name in self._warned:
            return
        self._warned.add(name)
        instead = f"the policy samples with {name}={own:g}" if own is not None else "the policy does not read that"
        setting = f"{name}={value:g}" if isinstance(value, float | int) else f"{name}={excerpt(value)}"
        self._warn(f"a program asks for {setting}; {instead}, as everywhere in the run: so it is trained")


@asynccontextmanager
async def _run_server(server: HttpServer, listening: list[socket.socket]) -> AsyncIterator[None]:
    """Return a context in which ``server`` runs on the ``listening`` sockets. At the end, wait until all its
    connections are closed."""
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=listening))
            try:
                yield
            finally:
                server.should_exit = True
                await asyncio.wait({serving})
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # a group of the caller's stays whole: it may hold the error that explains


@contextmanager
def _open_socket(host: str) -> Iterator[socket.socket]:
    """Return a context with a socket that listens on a free port of ``host`` and is closed at the end. Raises
    :class:`~headrace.base.errors.RunError` if that is not possible."""
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
