"""Connections carried over the streams of a real Redis server: what can be dialled, and how much waits there."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import RunError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.node import Dial
from headrace.wings.cluster.joining import streams
from headrace.wings.cluster.joining.relay import RelayRoute, relay_from_machine, relay_to_run
from headrace.wings.cluster.joining.streams import AHEAD, ENTRY_BYTES, RedisStreams
from tests.redis_server import RedisServer, redis_server
from tests.wings.cluster.test_joining import until


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server(appendonly="no") as server:
        yield server


@asynccontextmanager
async def ways(redis: RedisServer, directory: Path, most: int = 100) -> AsyncIterator[tuple[RelayRoute, list[str]]]:
    """Both ends in this process, of what can be dialled in ``directory``; what they had to say."""
    told: list[str] = []
    async with AsyncExitStack() as stack:
        ours, theirs = (RedisStreams(redis.url, "run", None, told.append) for _ in range(2))
        await stack.enter_async_context(relay_to_run(ours, directory, most))
        yield await stack.enter_async_context(relay_from_machine(theirs)), told


async def opened(way: RelayRoute, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection((await way.to(name)).removeprefix("ipc://"))


async def repeats(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says what it hears."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("name", ["secret", "../outside", "..", "", ".", "far", "\0", "x" * 1000])
def test_what_does_not_lie_where_it_may_be_dialled_cannot_be_reached(
    tmp_path: Path, redis: RedisServer, name: str
) -> None:
    async def main() -> None:
        (directory := tmp_path / "far").mkdir()
        server = await asyncio.start_unix_server(repeats, tmp_path / "outside")
        async with ways(redis, directory) as (way, _):
            number = 7
            await way._streams.dial(Dial(to=name, number=number))
            down = f"headrace:join:run:{number:x}:down"
            await until(lambda: bool(redis.client().exists(down)))
            ((entry, fields),) = redis.client().xrange(down)
            assert (entry, fields) == (streams.END, {b"data": b""})
        server.close()

    asyncio.run(main())


def test_dials_that_are_none_are_passed_over(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "BLOCK_S", 0.2)

    async def main() -> None:
        server = await asyncio.start_unix_server(repeats, tmp_path / "echo")
        async with ways(redis, tmp_path) as (way, told):
            there, key = redis.client(), "headrace:join:run:dials"
            for data in (b"", b"\xc1", os.urandom(1 << 20), b"\x91" * 60_000, MessageCodec(Dial).encode({"to": 1})):
                there.xadd(key, {"data": data})
            there.xadd(key, {"else": b"x"})
            again = MessageCodec(Dial).encode(Dial(to="echo", number=1))
            for _ in range(3):  # the same
                there.xadd(key, {"data": again})
            reader, writer = await opened(way, "echo")
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
            there.delete(key)
            there.set(key, "no stream")
            await until(lambda: bool(told))
            assert "WRONGTYPE" in told[0]
            there.delete(key)
            await until(lambda: told[-1].endswith("is back"))
            reader, writer = await opened(way, "echo")
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            writer.close()
        server.close()

    asyncio.run(main())


def test_more_connections_than_there_is_room_for_end_at_once(tmp_path: Path, redis: RedisServer) -> None:
    async def main() -> None:
        server = await asyncio.start_unix_server(repeats, tmp_path / "echo")
        async with ways(redis, tmp_path, most=1) as (way, told):
            first, to_first = await opened(way, "echo")
            to_first.write(b"first")
            assert await first.readexactly(5) == b"first"
            second, to_second = await opened(way, "echo")
            assert await second.read() == b""
            assert "1 connections are carried, and there are files for no more" in told[0]
            to_first.write(b"again")
            assert await first.readexactly(5) == b"again"
            to_first.close()
            to_second.close()
        server.close()

    asyncio.run(main())


def test_a_writer_waits_for_its_reader_and_nothing_is_lost(tmp_path: Path, redis: RedisServer) -> None:
    sent = os.urandom(32 << 20)
    go = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        heard = await reader.readexactly(len(sent))
        writer.write(b"same" if heard == sent else b"else")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(slow, tmp_path / "slow")
        async with ways(redis, tmp_path) as (way, _):
            reader, writer = await opened(way, "slow")
            writer.write(sent)
            there = redis.client()

            def is_full() -> bool:
                return any(there.xlen(key) == AHEAD for key in there.keys("*:up"))

            await until(is_full)
            await asyncio.sleep(0.3)
            (key,) = there.keys("*:up")
            assert there.xlen(key) == AHEAD
            assert there.memory_usage(key) < 2 * AHEAD * ENTRY_BYTES
            go.set()
            assert await reader.read() == b"same"
            writer.close()
        server.close()
        assert not redis.client().keys("*:up")

    asyncio.run(main())


def an_entry(key: str, there: Any) -> None:
    there.xadd(key, {"data": b"x"})


def a_number_too_far(key: str, there: Any) -> None:
    there.xadd(key, {"data": b"x"}, id="99999999-0")


def no_data(key: str, there: Any) -> None:
    there.xadd(key, {"other": b"x"}, id="2-0")


def a_long_entry(key: str, there: Any) -> None:
    there.xadd(key, {"data": bytes(ENTRY_BYTES + 1)}, id="2-0")


def another_type(key: str, there: Any) -> None:
    there.set(key, b"x")


@pytest.mark.parametrize("spoil", [an_entry, a_number_too_far, no_data, a_long_entry, another_type])
@pytest.mark.parametrize("which", ["up", "down"])
def test_whatever_others_write_into_a_stream_its_connection_ends_and_no_other(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[str, Any], None], which: str
) -> None:
    monkeypatch.setattr(streams, "BLOCK_S", 0.2)

    async def main() -> None:
        server = await asyncio.start_unix_server(repeats, tmp_path / "echo")
        async with ways(redis, tmp_path) as (way, told):
            reader, writer = await opened(way, "echo")
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            (key,) = redis.client().keys(f"*:{which}")
            spoil(key, redis.client())
            assert await reader.read() == b""
            assert ("somebody else writes" in told[0]) or ("WRONGTYPE" in told[0])
            writer.close()
            reader, writer = await opened(way, "echo")
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            writer.close()
        server.close()

    asyncio.run(main())


def test_a_connection_that_nobody_takes_is_ended(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "UNREAD_S", 0.2)

    async def main() -> None:
        told: list[str] = []
        async with relay_from_machine(RedisStreams(redis.url, "run", None, told.append)) as way:
            reader, writer = await opened(way, "anything")
            writer.write(bytes(32 << 20))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            assert "the other side has taken nothing for 0.2 s" in told[0]
            writer.close()

    asyncio.run(main())


def test_a_connection_whose_socket_does_not_read_is_ended(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "UNREAD_S", 0.2)
    monkeypatch.setattr(streams, "ANSWER_S", 0.2)

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(str(tmp_path / "deaf"))
            deaf.listen()
            async with ways(redis, tmp_path) as (way, _):
                reader, writer = await opened(way, "deaf")
                writer.write(bytes(32 << 20))
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()

    asyncio.run(main())


def test_a_place_for_sockets_that_is_too_deep_is_named(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deep := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def main() -> None:
        async with ways(redis, tmp_path) as (way, _):
            await way.to("door")

    with pytest.raises(RunError, match=r"a socket cannot be made at .* AF_UNIX path too long"):
        asyncio.run(main())
