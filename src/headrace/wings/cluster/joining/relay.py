"""Both ends of what is carried over a Redis server (streams.py), between a run and the machines that join it.

    machine                                   server                   run
    worker ──▶ socket of that name ──▶ Dial ──▶ dials ──▶ socket of that name ──▶ channel of the worker
                                   ◀───────── up, down ─────────▶

The sockets of the run that may be dialled lie in one directory, each under the name that is dialled: the door, both of
each channel (under CURVE, as over TCP), and the endpoint of programs. Nothing else can be reached.
"""

from __future__ import annotations

import asyncio
import os
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
from headrace.launch.leases import Lease
from headrace.wings.cluster.joining.streams import AGAIN_S, ENTRY_BYTES, Local, RedisStreams

DOOR = "door"
ENDPOINT = "endpoint"
LAST_S = 2.0
"""How long what was said last may be on its way."""


def dialled_in(directory: Path) -> Path:
    """Where the sockets of a run lie that may be dialled; ``directory`` is that of all its sockets."""
    return directory / "far"


@asynccontextmanager
async def answering(streams: RedisStreams, directory: Path, most: int) -> AsyncIterator[None]:
    """The run's end: for the body's duration the sockets in ``directory`` can be dialled, ``most`` connections at once.

    Raises what :meth:`~headrace.wings.cluster.joining.streams.RedisStreams.reach` does; a server that goes away later
    costs the connections that it carries.
    """
    async with _reached(streams), _carrying() as carried:
        answers = carried.beside(_Answers(streams, directory, carried, most).serve())
        try:
            yield
        finally:
            answers.cancel()
            await streams.forget_dials()


@asynccontextmanager
async def dialling(streams: RedisStreams) -> AsyncIterator[RelayRoute]:
    """The end of a machine that joins. Raises what :meth:`~headrace.wings.cluster.joining.streams.RedisStreams.reach`
    does."""
    lease = Lease.directory(Path(tempfile.gettempdir()))
    try:
        async with _reached(streams), _carrying() as carried:
            way = RelayRoute(streams, lease.path, carried)
            try:
                await way.open()
                yield way
            finally:
                way.close()
    finally:
        lease.end()


class RelayRoute:
    """From a machine that joins to the sockets of the run."""

    def __init__(self, streams: RedisStreams, directory: Path, carried: _Carried) -> None:
        self.programs = ""
        """``HOST:PORT`` of this machine, at which programs reach their episodes."""
        self._streams, self._directory, self._carried = streams, directory, carried
        self._servers: set[asyncio.Server] = set()

    async def open(self) -> None:
        """For programs of this machine."""
        server = await asyncio.start_server(
            lambda *local: self._carry(ENDPOINT, local), "127.0.0.1", 0, limit=ENTRY_BYTES
        )
        self._servers.add(server)
        self.programs = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def to(self, address: str) -> str:
        """Where this machine finds that socket of the run; one connection can be made to it."""
        name = address.rpartition("/")[2]
        path = self._directory / name

        def come(*local: Any) -> None:
            self._servers.discard(server)
            server.close()
            path.unlink(missing_ok=True)
            self._carry(name, local)

        try:
            server = await asyncio.start_unix_server(come, path, limit=ENTRY_BYTES)
        except OSError as error:
            raise RunError(
                f"a socket cannot be made at {path}: {error}",
                remedy="set TMPDIR to a short path (under 60 characters) that can be written",
            ) from None
        self._servers.add(server)
        return f"ipc://{path}"

    def close(self) -> None:
        """Nothing more is carried."""
        for server in self._servers:
            server.close()

    def _carry(self, name: str, local: Local) -> None:
        number = secrets.randbits(63)
        self._carried.begin(number, self._dial(Dial(to=name, number=number), local))

    async def _dial(self, dial: Dial, local: Local) -> None:
        streams, number = self._streams, dial.number
        try:
            await streams.dial(dial)
        except streams.errors as error:
            streams.trouble(f"nothing can be dialled over it: {error}")
            local[1].transport.abort()
        else:
            await streams.carry(local, outward=streams.up(number), inward=streams.down(number))


class _Answers:
    """Of a run, to those who dial."""

    def __init__(self, streams: RedisStreams, directory: Path, carried: _Carried, most: int) -> None:
        self._streams, self._directory, self._carried, self._most = streams, directory, carried, most
        self._codec = MessageCodec(Dial)

    async def serve(self) -> None:
        streams, away = self._streams, False
        while True:
            try:
                dials = await streams.dialled()
            except streams.errors as error:
                if not away:
                    away = True
                    streams.trouble(f"nobody joins over it, and who has is lost, until it is back: {error}")
                await asyncio.sleep(AGAIN_S)
                continue
            if away:
                away = False
                streams.recovered()
            for data in dials:
                self._take(data)

    def _take(self, data: bytes) -> None:
        with suppress(msgspec.DecodeError):  # nobody of ours says that
            dial = self._codec.decode(data)
            assert isinstance(dial, Dial)
            if dial.number not in self._carried.tasks:
                self._carried.begin(dial.number, self._answer(dial))

    async def _answer(self, dial: Dial) -> None:
        streams = self._streams
        outward, inward = streams.down(dial.number), streams.up(dial.number)
        local = None
        if len(self._carried.tasks) > self._most:
            streams.trouble(f"{self._most} connections are carried, and there are files for no more (ulimit -n)")
        elif dial.to in os.listdir(self._directory):
            with suppress(OSError):  # it has just been closed
                local = await asyncio.open_unix_connection(self._directory / dial.to, limit=ENTRY_BYTES)
        if local is None:
            await streams.end(outward, inward)
        else:
            await streams.carry(local, outward=outward, inward=inward)


class _Carried:
    """Connections, by number, and who owns them."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int, carrying: Coroutine[Any, Any, None]) -> None:
        """Carry one."""
        task = self._group.create_task(carrying)
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number))

    def beside(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something else meanwhile."""
        return self._group.create_task(serving)

    async def end(self) -> None:
        """Those that do not end by themselves now are broken off."""
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=LAST_S)
        for task in self.tasks.values():
            task.cancel()


@asynccontextmanager
async def _carrying() -> AsyncIterator[_Carried]:
    try:
        async with asyncio.TaskGroup() as group:
            carried = _Carried(group)
            try:
                yield carried
            finally:
                await carried.end()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def _reached(streams: RedisStreams) -> AsyncIterator[None]:
    try:
        await streams.reach()
        yield
    finally:
        await streams.close()
