"""TCP forwards: connections to a port of 127.0.0.1 in a session are connected to an address outside.

program in the session ── 127.0.0.1:PORT ── listening socket of this process ── HOST:PORT outside
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

MOST_CONNECTIONS = 64
"""The largest number of connections of one port at a time; further connections are closed."""
CHUNK_BYTES = 1 << 16
"""The largest number of bytes of one read."""
CONNECTED_S = 10.0
"""The longest time to connect to the address outside, in seconds."""


class PortForward:
    """The forward of one port of a session, and its open connections."""

    def __init__(self, address: str) -> None:
        """Create a forward of connections to ``address`` (HOST:PORT)."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._server: asyncio.Server | None = None
        """The server that accepts connections; ``None`` before :meth:`serve`."""
        self._connections: set[asyncio.Task[None]] = set()
        """The tasks that forward the open connections."""

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections on ``listener``, which :meth:`close` closes."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=CHUNK_BYTES)

    def close(self) -> None:
        """End all connections, and accept no more."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a new connection, or close it if there are :data:`MOST_CONNECTIONS`."""
        task = asyncio.current_task()
        if task is None or len(self._connections) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._forward(reader, writer)
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy the bytes of one connection in both directions until both have ended. If the address outside cannot be
        reached, close the connection."""
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
    """Copy bytes from ``reader`` to ``writer`` until the end of the stream, and pass the end on."""
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def serve_forwards(listeners: socket.socket, addresses: Sequence[str]) -> list[PortForward]:
    """Receive one listening socket for each of ``addresses``, in their order, through the socket ``listeners``, and
    return the forwards that serve them. Raises ``OSError`` if a listening socket is missing."""
    forwards = [PortForward(address) for address in addresses]
    for forward in forwards:
        _, descriptors, _, _ = socket.recv_fds(listeners, 1, 1)
        if not descriptors:
            raise OSError("a listener of the session is missing")
        await forward.serve(socket.socket(fileno=descriptors[0]))
    return forwards
