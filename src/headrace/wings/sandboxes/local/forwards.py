"""The ways out of a session: connections to its own 127.0.0.1 that are carried to an address outside.

program in the session ── 127.0.0.1:PORT ── listener, held by this process ── HOST:PORT outside
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

MOST_CONNECTIONS = 64
"""The most connections of one port at once; more of them are closed at once."""
CHUNK_BYTES = 1 << 16
"""The most bytes that are carried at once."""
CONNECTED_S = 10.0
"""How long a connection to the address outside may take."""


class PortForward:
    """One port of a session, and the connections that are open on it."""

    def __init__(self, address: str) -> None:
        """Carry connections to ``address``: HOST:PORT."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept the connections of a listener, which now belongs to this object."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=CHUNK_BYTES)

    def close(self) -> None:
        """End the connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        for task in list(self._carrying):
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a new connection, unless there are too many."""
        task = asyncio.current_task()
        if task is None or len(self._carrying) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._carrying.add(task)
        try:
            await self._carry(reader, writer)
        finally:
            self._carrying.discard(task)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection in both directions until both have ended. Where the address cannot be reached, the
        program in the session sees its connection closed."""
        try:
            async with asyncio.timeout(CONNECTED_S):
                answers, outside = await asyncio.open_connection(self._host, self._port, limit=CHUNK_BYTES)
        except (OSError, TimeoutError):
            return
        try:
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_copy(reader, outside))
                directions.create_task(_copy(answers, writer))
        finally:
            outside.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes in one direction until there are no more, and say so to the other end."""
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def serve_forwards(listeners: socket.socket, addresses: Sequence[str]) -> list[PortForward]:
    """Serve the listeners of a session, which wait at the socket ``listeners`` in the order of the addresses to which
    they lead. Raises ``OSError`` if one is missing."""
    forwards = [PortForward(address) for address in addresses]
    for forward in forwards:
        _, descriptors, _, _ = socket.recv_fds(listeners, 1, 1)
        if not descriptors:
            raise OSError("a listener of the session is missing")
        await forward.serve(socket.socket(fileno=descriptors[0]))
    return forwards
