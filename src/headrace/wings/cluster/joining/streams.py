"""Connections that are carried over a Redis server, where no TCP connection leads from one machine to the other.

    who dials ───up──▶ who is dialled     a stream each way, for each connection. Its entries are what was read of a
              ◀─down──                    socket, numbered 1, 2, ... without a gap; the last number there is is the end

A writer is at most ``AHEAD`` entries ahead of its reader, who deletes what it has written to its own socket. Whatever
is not the next entry ends the connection, and so does every error of the server: something may be missing then. What
they carry is for the two ends of the connection to judge, and is not looked at. All keys expire, for nobody may be left
who could delete them.
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
"""Of one entry, at most. One is on its way at a time."""
AHEAD = 8
"""Entries of one stream that wait to be read, at most: 2 MiB."""
UNREAD_S = 60.0
"""A connection of which nothing is taken for so long is ended."""
KEPT_S = 120
"""Keys that nobody writes to any more are gone after this time."""
ENDED_S = 10
"""The same, where one side has ended a connection, and the other has not heard of it."""
REACHED_S = 10.0
"""How long a server may be away when it is first asked."""
ANSWER_S = 10.0
"""How long one answer may take."""
BLOCK_S = 5.0
"""How long to wait for an entry at a time."""
AGAIN_S = 1.0
"""After which time a server that is away is asked again."""
ROOM_S = 0.02
"""After which time a stream that was full is looked at again."""
DIALS = 256
"""Of them so many may wait."""
MAX_CONNECTIONS = 1 << 16
"""To the server. Each that is carried waits in one of its own."""
END = f"{(1 << 64) - 1}-0".encode()
"""Nothing can follow it."""

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

Local = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""A connection of this machine."""


class Garbled(Exception):
    """A connection cannot go on: why, in words."""


class Unreached(DeadlineError):
    """A server that does not answer when it is first asked."""


class RedisStreams:
    """Those of one run, on one server."""

    def __init__(self, url: str, name: str, password: str | None, tell: Callable[[str], None]) -> None:
        """``name``: of the run, drawn for it. ``tell`` hears what goes wrong."""
        self.where = without_password(url)
        package = redis_package(f"the way over {self.where}")
        self.errors: tuple[type[Exception], ...] = (package.RedisError, OSError, Garbled)
        """By which a connection ends."""
        self._package, self._tell = package, tell
        self._told: set[str] = set()
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

    async def reach(self) -> None:
        """Raises :class:`Unreached` where the server does not answer,
        :class:`~headrace.base.errors.ConfigError` where it refuses to."""
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
                    raise Unreached(
                        f"the Redis server at {self.where} does not answer for {REACHED_S:g} s: {error}",
                        remedy="start it, and let this machine reach it there",
                    ) from None
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        """Let go of the server."""
        await self._redis.aclose()

    def trouble(self, words: str) -> None:
        """Tell it, once until something is dialled again."""
        if words not in self._told:
            self._told.add(words)
            self._tell(f"the Redis server at {self.where}: {words}")

    def recovered(self) -> None:
        """Tell that it works again."""
        self._told.clear()
        self._tell(f"the Redis server at {self.where} is back")

    # -- dials -------------------------------------------------------------------------------------------------------

    async def dial(self, dial: Dial) -> None:
        """Have a connection taken on the other side."""
        key = self._key("dials")
        async with self._redis.pipeline() as pipe:
            pipe.xadd(key, {"data": self._codec.encode(dial)}, maxlen=DIALS)
            pipe.expire(key, KEPT_S)
            await pipe.execute()

    async def dialled(self) -> list[bytes]:
        """The dials that wait; waits a while for the first. Whatever stands there in their place is left out."""
        key = self._key("dials")
        entries = await self._read(key, 0, DIALS)
        if entries:
            await self._redis.xdel(key, *(entry for entry, _ in entries))
            self._told.clear()
        return [data for _, data in entries]

    async def forget_dials(self) -> None:
        """Nobody takes any more."""
        with suppress(*self.errors):
            await self._redis.delete(self._key("dials"))

    # -- connections -------------------------------------------------------------------------------------------------

    def up(self, number: int) -> str:
        """From who dials to who is dialled."""
        return self._key(f"{number:x}:up")

    def down(self, number: int) -> str:
        """Back."""
        return self._key(f"{number:x}:down")

    async def carry(self, local: Local, *, outward: str, inward: str) -> None:
        """Carry a connection until one of its ends closes, or something keeps it from going on; it is closed then."""
        reader, writer = local
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(reader, outward))
                taking = group.create_task(self._take(inward, writer))
                await asyncio.wait({sending, taking}, return_when=asyncio.FIRST_COMPLETED)
                sending.cancel()
                taking.cancel()
        except* self.errors as errors:
            for error in errors.exceptions:
                if not isinstance(error, OSError):  # that a socket of this machine breaks is nothing to be told
                    self.trouble(f"a connection over it has ended: {error}")
        finally:
            await self.end(outward, inward)
            await _closed(writer)

    async def end(self, outward: str, inward: str) -> None:
        """Say that there is no more; or, where the other side has said so, leave nothing."""
        with suppress(*self.errors):
            await self._end(keys=[outward, inward], args=[END, ENDED_S])

    async def _send(self, reader: asyncio.StreamReader, key: str) -> None:
        number, clock = 0, RealClock()
        while data := await reader.read(ENTRY_BYTES):
            number += 1
            until_s = clock.now() + UNREAD_S
            while not await self._append(keys=[key], args=[AHEAD, f"{number}-0", data, KEPT_S]):
                if clock.now() > until_s:
                    raise Garbled(f"the other side has taken nothing for {UNREAD_S:g} s")
                await asyncio.sleep(ROOM_S)

    async def _take(self, key: str, writer: asyncio.StreamWriter) -> None:
        number = 0
        taken: list[bytes] = []
        while True:
            entries = await self._read(key, number, AHEAD, taken)
            for entry, data in entries:
                if entry == END:
                    return
                number += 1
                if entry != f"{number}-0".encode() or not 0 < len(data) <= ENTRY_BYTES:
                    raise Garbled("somebody else writes, or its entries are lost")
                writer.write(data)
            async with asyncio.timeout(UNREAD_S):
                await writer.drain()
            taken = [entry for entry, _ in entries]

    async def _read(
        self, key: str, after: int, count: int, taken: Sequence[bytes] = ()
    ) -> Sequence[tuple[bytes, bytes]]:
        """Number and data of what is there behind ``after``; waits a while for the first. Those that were ``taken``
        before are deleted."""
        async with self._redis.pipeline(transaction=False) as pipe:
            if taken:
                pipe.xdel(key, *taken)
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
