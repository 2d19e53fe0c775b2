"""A proxy that treats HTTP requests as a bad network does: it loses, repeats, delays and reorders them."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FAULTS = {"passed": 10, "late": 4, "lost": 1, "unanswered": 2, "doubled": 2, "repeated late": 2, "refused": 1}
"""What happens to a request, and how often. ``late`` requests are overtaken by others."""
LATE_S = 0.05
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BadNetwork:
    """The proxy in front of one port of this machine."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._rng = port, random.Random(seed)
        self.faults = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Treat one request, which is the only one of its connection."""
        with suppress(OSError, asyncio.IncompleteReadError):
            if request := await _read(reader):
                await self._treat(request, writer)
        writer.close()

    async def _treat(self, request: bytes, writer: asyncio.StreamWriter) -> None:
        (fault,) = self._rng.choices(list(FAULTS), list(FAULTS.values()))
        self.faults[fault] += 1
        if fault == "refused":
            writer.write(BUSY)
        if fault in ("refused", "lost"):
            return
        if fault == "late":
            await asyncio.sleep(self._rng.uniform(0, LATE_S))
        times = 2 if fault == "doubled" else 1
        answers = await asyncio.gather(*(self._forward(request) for _ in range(times)))
        if fault != "unanswered":
            writer.write(answers[-1])
            await writer.drain()
        if fault == "repeated late":
            writer.close()
            await asyncio.sleep(self._rng.uniform(0, 4 * LATE_S))
            await self._forward(request)

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return a request that asks for its connection to be closed; empty if there is none."""
    with suppress(asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in lines)
        assert b"transfer-encoding" not in fields
        body = await reader.readexactly(int(fields.get(b"content-length", 0)))
        kept = [line for line in lines if not line.lower().startswith(b"connection:")]
        return b"\r\n".join([first, *kept, b"connection: close", b"", body])
    return b""


@contextmanager
def bad_network(url: str, seed: int) -> Iterator[tuple[str, Counter]]:
    """Yield the URL at which the server at ``url`` is reached through a bad network, and the counts of its faults."""
    network = BadNetwork(int(url.rpartition(":")[2]), seed)
    ready, ports, loop = threading.Event(), list[int](), asyncio.new_event_loop()
    ended = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(network.serve, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await ended.wait()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}", network.faults
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
