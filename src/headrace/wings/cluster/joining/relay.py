"""Both ends of the connections over a Redis server (streams.py), between a run and the machines that join it.

    machine                                   server                   run
    worker ──▶ socket of that name ──▶ Dial ──▶ dials ──▶ socket of that name ──▶ channel of the worker
                                   ◀───────── up, down ─────────▶

The run's sockets that may be dialled lie in one directory, each under the name that is dialled: the socket at which
machines join, the two of each channel (under CURVE, as over TCP), and the endpoint of programs. Nothing else can be
reached.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import RunError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.node import Dial
from headrace.launch.child import ENDPOINT
from headrace.launch.leases import Lease
from headrace.wings.cluster.joining.streams import ENTRY_BYTES, RETRY_S, LocalConnection, RedisStreams

JOIN_SOCKET = "door"
"""Name of the socket at which machines join."""
LAST_S = 2.0
"""Longest time in seconds for the last data of connections to be passed on."""


@asynccontextmanager
async def relay_to_run(streams: RedisStreams, directory: Path, max_connections: int) -> AsyncIterator[None]:
    """Let machines dial the sockets in ``directory`` while the body runs, with up to ``max_connections`` connections at
    once.

    Raises the errors of :meth:`~headrace.wings.cluster.joining.streams.RedisStreams.connect`. If the server fails
    later, its connections end and new ones wait until it is back.
    """
    async with _connected(streams), _connection_group() as connections:
        listening = connections.run(_DialListener(streams, directory, connections, max_connections).serve())
        try:
            yield
        finally:
            listening.cancel()
            await streams.forget_dials()


@asynccontextmanager
async def relay_from_machine(streams: RedisStreams) -> AsyncIterator[RelayRoute]:
    """Yield the route from a machine that joins to the run. Raises the errors of
    :meth:`~headrace.wings.cluster.joining.streams.RedisStreams.connect`."""
    lease = Lease.directory(Path(tempfile.gettempdir()))
    try:
        async with _connected(streams), _connection_group() as connections:
            route = RelayRoute(streams, lease.path, connections)
            try:
                await route.open()
                yield route
            finally:
                route.close()
    finally:
        lease.end()


class RelayRoute:
    """The route from a machine that joins to the sockets of the run."""

    def __init__(self, streams: RedisStreams, directory: Path, connections: _RelayedConnections) -> None:
        self.programs = ""
        """``HOST:PORT`` of this machine at which programs reach the run's endpoint."""
        self._streams, self._directory, self._connections = streams, directory, connections
        self._servers: set[asyncio.Server] = set()

    async def open(self) -> None:
        """Open the port for programs of this machine."""
        server = await asyncio.start_server(
            lambda *local: self._carry(ENDPOINT, local), "127.0.0.1", 0, limit=ENTRY_BYTES
        )
        self._servers.add(server)
        self.programs = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def to(self, address: str) -> str:
        """Return the address of a new socket of this machine that leads to the run's socket of the same name. It
        accepts one connection."""
        name = address.rpartition("/")[2]
        path = self._directory / name

        def connect_once(*local: Any) -> None:
            self._servers.discard(server)
            server.close()
            path.unlink(missing_ok=True)
            self._carry(name, local)

        try:
            server = await asyncio.start_unix_server(connect_once, path, limit=ENTRY_BYTES)
        except OSError as error:
            raise RunError(
                f"a socket cannot be made at {path}: {error}",
                remedy="set TMPDIR to a short path (under 60 characters) that can be written",
            ) from None
        self._servers.add(server)
        return f"ipc://{path}"

    def close(self) -> None:
        """Accept no more connections."""
        for server in self._servers:
            server.close()

    def _carry(self, name: str, local: LocalConnection) -> None:
        number = secrets.randbits(63)
        self._connections.add(number, self._dial(Dial(to=name, number=number), local))

    async def _dial(self, dial: Dial, local: LocalConnection) -> None:
        streams, number = self._streams, dial.number
        try:
            await streams.dial(dial)
        except streams.errors as error:
            streams.warn(f"nothing can be dialled over it: {error}")
            local[1].transport.abort()
        else:
            await streams.carry(local, outward=streams.up(number), inward=streams.down(number))


class _DialListener:
    """The run's end of the relay: it opens a connection for each dial."""

    def __init__(
        self, streams: RedisStreams, directory: Path, connections: _RelayedConnections, max_connections: int
    ) -> None:
        self._streams, self._directory, self._connections, self._max_connections = (
            streams,
            directory,
            connections,
            max_connections,
        )
        self._codec = MessageCodec(Dial)

    async def serve(self) -> None:
        streams, is_away = self._streams, False
        while True:
            try:
                dials = await streams.next_dials()
            except streams.errors as error:
                if not is_away:
                    is_away = True
                    streams.warn(f"nobody joins over it, and who has is lost, until it is back: {error}")
                await asyncio.sleep(RETRY_S)
                continue
            if is_away:
                is_away = False
                streams.recovered()
            for data in dials:
                self._accept(data)

    def _accept(self, data: bytes) -> None:
        with suppress(msgspec.DecodeError):  # our programs send no such data
            dial = self._codec.decode(data)
            assert isinstance(dial, Dial)
            if dial.number not in self._connections.tasks:
                self._connections.add(dial.number, self._answer(dial))

    async def _answer(self, dial: Dial) -> None:
        streams = self._streams
        outward, inward = streams.down(dial.number), streams.up(dial.number)
        local = None
        if len(self._connections.tasks) > self._max_connections:
            streams.warn(
                f"{self._max_connections} connections are carried, and there are files for no more (ulimit -n)"
            )
        elif dial.to in os.listdir(self._directory):
            with suppress(OSError):  # it has just been closed
                local = await asyncio.open_unix_connection(self._directory / dial.to, limit=ENTRY_BYTES)
        if local is None:
            await streams.end(outward, inward)
        else:
            await streams.carry(local, outward=outward, inward=inward)


class _RelayedConnections:
    """The open connections by number, in the task group that owns them."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def add(self, number: int, carrying: Coroutine[Any, Any, None]) -> None:
        """Start a task that carries connection ``number``."""
        task = self._group.create_task(carrying)
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number))

    def run(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start another task in the group."""
        return self._group.create_task(serving)

    async def end(self) -> None:
        """Wait a short time for the connections to end, then cancel the others."""
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=LAST_S)
        for task in self.tasks.values():
            task.cancel()


@asynccontextmanager
async def _connection_group() -> AsyncIterator[_RelayedConnections]:
    try:
        async with asyncio.TaskGroup() as group:
            connections = _RelayedConnections(group)
            try:
                yield connections
            finally:
                await connections.end()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def _connected(streams: RedisStreams) -> AsyncIterator[None]:
    try:
        await streams.connect()
        yield
    finally:
        await streams.close()


MOST = 1 << 16
"""Number of open files up to which this process raises its own limit, if allowed."""


def open_files() -> int:
    """Raise this process's limit of open files up to :data:`MOST` and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    limit = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit, soft)
