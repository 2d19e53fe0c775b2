"""Connections over a Redis server, for machines between which no TCP connection is possible.

    machine that dials ───up──▶ machine that is dialled
                       ◀─down──

Each connection is two streams. The entries of a stream are the data read from a socket, numbered 1, 2, ... without a
gap; the largest possible number marks the end.

A writer is at most ``AHEAD`` entries ahead of its reader, who deletes the entries that it has written to its own
socket. An entry with an unexpected number ends the connection, and so does every error of the server, because data may
be missing then. The data are not inspected: the ends of the connection protect them. All keys expire, since both ends
may die without deleting them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.base.clock import RealClock
from headrace.base.config.redis import redis_package, without_password
from headrace.base.errors import ConfigError, DeadlineError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.node import Dial

ENTRY_BYTES = 1 << 18
"""Largest size of one entry, in bytes. One entry is in transit at a time."""
AHEAD = 8
"""Largest number of entries of one stream that wait to be read: 2 MiB."""
UNREAD_S = 60.0
"""Seconds after which a connection ends whose reader takes nothing."""
KEPT_S = 120
"""Seconds after the last write in which a key expires."""
ENDED_S = 10
"""Seconds in which the end marker of a connection expires if the other side does not read it."""
REACHED_S = 10.0
"""Longest time in seconds for the first connection to the server."""
ANSWER_S = 10.0
"""Longest wait for one answer of the server, in seconds."""
BLOCK_S = 5.0
"""Longest wait for an entry at a time, in seconds."""
RETRY_S = 1.0
"""Seconds between two attempts to reach a server that fails."""
FULL_S = 0.02
"""Seconds between two attempts to append to a full stream."""
DIALS = 256
"""Largest number of dials that wait; older ones are discarded."""
MAX_CONNECTIONS = 1 << 16
"""Largest number of connections to the server. Each carried connection blocks one while it waits for entries."""
END = f"{(1 << 64) - 1}-0".encode()
"""The largest number of an entry, which marks the end of a stream."""

_APPEND = """
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('XADD', KEYS[1], ARGV[2], 'data', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
"""
_END = """
local last = redis.pcall('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if last and last[1] == ARGV[1] then
    redis.call('DEL', KEYS[1])
else
    redis.pcall('XADD', KEYS[1], ARGV[1], 'data', '')
    redis.call('EXPIRE', KEYS[1], ARGV[2])
end
redis.call('DEL', KEYS[2])
"""

LocalConnection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""A connection of this machine, as reader and writer."""


class ConnectionBroken(Exception):
    """A connection cannot continue. The text gives the reason."""


class RedisUnreachable(DeadlineError):
    """The server does not answer at the first connection."""


class RedisStreams:
    """The streams of one run on one Redis server."""

    def __init__(self, url: str, name: str, password: str | None, tell: Callable[[str], None]) -> None:
        """Make a client. ``name`` is the run's random name on the server; ``tell`` is called with warnings."""
        self.where = without_password(url)
        package = redis_package(f"the way over {self.where}")
        self.errors: tuple[type[Exception], ...] = (package.RedisError, OSError, ConnectionBroken)
        """The errors that end a connection."""
        self._package, self._say = package, tell
        self._warned: set[str] = set()
        self._prefix = f"headrace:join:{name}"
        self._codec = MessageCodec(Dial)
        try:
            self._redis = package.asyncio.Redis.from_url(
                url, password=password, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S,
                max_connections=MAX_CONNECTIONS, protocol=2,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(
                f"{self.where} is no Redis server: {error}", remedy="write redis://HOST:PORT/DB, or unix:///PATH"
            ) from None
        self._append, self._end = (self._redis.register_script(script) for script in (_APPEND, _END))

    async def connect(self) -> None:
        """Wait until the server answers. Raises :class:`RedisUnreachable` if it does not, and
        :class:`~headrace.base.errors.ConfigError` if it refuses this client."""
        package, clock = self._package, RealClock()
        until_s = clock.now() + REACHED_S
        while True:
            try:
                await self._redis.ping()
                return
            except TypeError as error:
                raise ConfigError(f"{self.where}: {error}", remedy="leave that option of the URL out") from None
            except package.RedisError as error:
                refusals = (package.AuthenticationError, package.ResponseError)
                if isinstance(error, refusals) or isinstance(error.__cause__, refusals):
                    raise ConfigError(
                        f"the Redis server at {self.where} refuses: {error}",
                        remedy="name the environment variable that holds its password: launch.join_password_env, and "
                        "on a machine that joins --password-env",
                    ) from None
                if clock.now() > until_s:
                    raise RedisUnreachable(
                        f"the Redis server at {self.where} does not answer for {REACHED_S:g} s: {error}",
                        remedy="start it, and let this machine reach it there",
                    ) from None
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._redis.aclose()

    def warn(self, words: str) -> None:
        """Report a problem, once until a dial succeeds again."""
        if words not in self._warned:
            self._warned.add(words)
            self._say(f"the Redis server at {self.where}: {words}")

    def recovered(self) -> None:
        """Report that the server works again."""
        self._warned.clear()
        self._say(f"the Redis server at {self.where} is back")

    # -- dials -------------------------------------------------------------------------------------------------------

    async def dial(self, dial: Dial) -> None:
        """Ask the run to open a connection."""
        key = self._key("dials")
        async with self._redis.pipeline() as pipe:
            pipe.xadd(key, {"data": self._codec.encode(dial)}, maxlen=DIALS)
            pipe.expire(key, KEPT_S)
            await pipe.execute()

    async def next_dials(self) -> list[bytes]:
        """Return the dials that wait, or wait a while for the first. The data are not checked."""
        key = self._key("dials")
        entries = await self._read(key, 0, DIALS)
        if entries:
            await self._redis.xdel(key, *(entry for entry, _ in entries))
            self._warned.clear()
        return [data for _, data in entries]

    async def forget_dials(self) -> None:
        """Delete the dials that wait, when the run stops accepting them."""
        with suppress(*self.errors):
            await self._redis.delete(self._key("dials"))

    # -- connections -------------------------------------------------------------------------------------------------

    def up(self, number: int) -> str:
        """Return the key of the stream from the machine that dials."""
        return self._key(f"{number:x}:up")

    def down(self, number: int) -> str:
        """Return the key of the stream to the machine that dials."""
        return self._key(f"{number:x}:down")

    async def carry(self, local: LocalConnection, *, outward: str, inward: str) -> None:
        """Carry a connection until one of its ends closes or an error occurs, then close it."""
        reader, writer = local
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(reader, outward))
                receiving = group.create_task(self._receive(inward, writer))
                await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
                sending.cancel()
                receiving.cancel()
        except* self.errors as errors:
            for error in errors.exceptions:
                if not isinstance(error, OSError):  # a broken socket of this machine is no problem of the server
                    self.warn(f"a connection over it has ended: {error}")
        finally:
            await self.end(outward, inward)
            await _closed(writer)

    async def end(self, outward: str, inward: str) -> None:
        """Mark the end of the connection; if the other side has already done so, delete its streams."""
        with suppress(*self.errors):
            await self._end(keys=[outward, inward], args=[END, ENDED_S])

    async def _send(self, reader: asyncio.StreamReader, key: str) -> None:
        number, clock = 0, RealClock()
        while data := await reader.read(ENTRY_BYTES):
            number += 1
            until_s = clock.now() + UNREAD_S
            while not await self._append(keys=[key], args=[AHEAD, f"{number}-0", data, KEPT_S]):
                if clock.now() > until_s:
                    raise ConnectionBroken(f"the other side has taken nothing for {UNREAD_S:g} s")
                await asyncio.sleep(FULL_S)

    async def _receive(self, key: str, writer: asyncio.StreamWriter) -> None:
        number = 0
        done: list[bytes] = []
        while True:
            entries = await self._read(key, number, AHEAD, done)
            for entry, data in entries:
                if entry == END:
                    return
                number += 1
                if entry != f"{number}-0".encode() or not 0 < len(data) <= ENTRY_BYTES:
                    raise ConnectionBroken("somebody else writes, or its entries are lost")
                writer.write(data)
            async with asyncio.timeout(UNREAD_S):
                await writer.drain()
            done = [entry for entry, _ in entries]

    async def _read(
        self, key: str, after: int, count: int, done: Sequence[bytes] = ()
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return number and data of the entries after ``after``, or wait a while for the first. Delete the entries that
        were read before."""
        async with self._redis.pipeline(transaction=False) as pipe:
            if done:
                pipe.xdel(key, *done)
            pipe.xread({key: f"{after}-0"}, count=count, block=int(1e3 * BLOCK_S))
            *_, found = await pipe.execute()
        return [(entry, fields.get(b"data", b"")) for _, entries in found for entry, fields in entries]

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        async with asyncio.timeout(ANSWER_S):
            await writer.wait_closed()
    writer.transport.abort()
