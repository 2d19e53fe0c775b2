"""Connections that stand still are cut, and those that move are not."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from headrace.base.net.connection import Connection, mark_authorized
from tests.wings.serve.server_process import CONTEXT, TOKEN, make_model, served

IDLE_S = 0.1
HEAD = b"GET / HTTP/1.1\r\nhost: me\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def within(
    app: Any,
    test: Callable[[Callable[[], Awaitable[Streams]]], Awaitable[None]],
    *,
    places: int | None = None,
    idle_s: float = IDLE_S,
) -> None:
    """Run ``test`` with a way to connect to ``app``, in time; the server has no connection left then."""

    async def run() -> None:
        config = uvicorn.Config(app, lifespan="off", timeout_keep_alive=idle_s, limit_concurrency=places)  # type: ignore[arg-type]
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        made = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
        port = made.sockets[0].getsockname()[1]
        async with asyncio.timeout(20), made:
            await test(lambda: asyncio.open_connection("127.0.0.1", port))
            assert not state.connections

    asyncio.run(run())


async def answer(send: Any, parts: list[bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"end"})


async def until_cut(reader: asyncio.StreamReader) -> bytes:
    data = b""
    try:
        while part := await reader.read(2**16):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_a_connection_that_brings_no_whole_request_is_cut_before_and_after_an_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, [])

    async def test(connect: Callable[[], Awaitable[Streams]]) -> None:
        for said, heard in ((b"", 0), (HEAD, 0), (HEAD + b"\r\n", 1), (HEAD + b"\r\n" + HEAD, 1)):
            reader, writer = await connect()
            writer.write(said)
            assert (await until_cut(reader)).count(b"200 OK") == heard
            writer.close()

    within(app, test)


def test_an_answer_may_take_longer_than_a_connection_may_be_idle() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with asyncio.timeout(20):
            gone = asyncio.ensure_future(_message(receive, "http.disconnect"))
            await asyncio.wait([gone], timeout=3 * IDLE_S)
            await answer(send, [b"gone" if gone.done() else b"there"])
            gone.cancel()

    async def test(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(HEAD + b"\r\n")
        assert b"there" in await until_cut(reader)
        writer.close()

    within(app, test)


def test_a_client_that_reads_nothing_of_its_answer_is_taken_for_gone() -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.ensure_future(_message(receive, "http.disconnect"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        left.set()

    async def test(connect: Callable[[], Awaitable[Streams]]) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD + b"\r\n")
        await left.wait()
        writer.transport.abort()

    within(app, test)


def test_a_new_connection_takes_the_place_of_the_one_that_matters_least() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if b"token" in dict(scope["headers"]):
            mark_authorized(scope)
        if scope["path"] == "/slow":
            await _message(receive, "http.disconnect")
            return
        await answer(send, [])

    async def ask(streams: Streams, path: str = "/", token: str = "") -> bytes:
        streams[1].write(f"GET {path} HTTP/1.1\r\nhost: me\r\n{token}\r\n".encode())
        return b"" if path == "/slow" else await streams[0].readuntil(b"end\r\n0\r\n\r\n")

    async def test(connect: Callable[[], Awaitable[Streams]]) -> None:
        busy, waiting = await connect(), await connect()
        await ask(busy, "/slow", "token: yes\r\n")
        assert b"200 OK" in await ask(waiting, "/", "token: yes\r\n")
        strangers = []
        for path in ("/slow", "", "/slow", "", ""):
            stranger = await connect()
            strangers.append(stranger)
            if path:
                await ask(stranger, path)
            else:
                stranger[1].write(HEAD)
        for reader, _ in strangers[:3]:
            assert await until_cut(reader) == b""
        assert b"200 OK" in await ask(waiting, "/", "token: yes\r\n")
        owner = await connect()
        assert b"200 OK" in await ask(owner, "/", "token: yes\r\n")
        for reader, writer in (busy, waiting, owner, *strangers):
            if (reader, writer) not in strangers:
                writer.write_eof()
            await until_cut(reader)
            writer.close()

    within(app, test, places=5, idle_s=0.5)


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", "transfer-encoding: chunked\r\ncontent-length: 3\r\n"),
        ("1.1", "content-length: 3\r\ntransfer-encoding: chunked\r\n"),
        ("1.0", "transfer-encoding: chunked\r\n"),
        ("1.1", "content-length: 3\r\ncontent-length: 4\r\n"),
        ("1.1", "transfer-encoding: chunked, chunked\r\n"),
        ("1.1", "transfer-encoding : chunked\r\n"),
    ],
)
def test_a_request_whose_end_is_ambiguous_is_refused_and_its_connection_closed(version: str, headers: str) -> None:
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        await answer(send, [])

    async def test(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        smuggled = "GET /smuggled HTTP/1.1\r\nhost: me\r\n\r\n"
        writer.write(f"POST / HTTP/{version}\r\nhost: me\r\n{headers}\r\n0\r\n\r\n{smuggled}".encode())
        heard = await until_cut(reader)
        assert (heard.count(b"HTTP/1.1"), heard.count(b"HTTP/1.1 400 Bad Request")) == (1, 1)
        writer.close()

    within(app, test, idle_s=5.0)
    assert not calls


async def _message(receive: Any, kind: str) -> None:
    while (await receive())["type"] != kind:
        pass


def test_clients_that_leave_in_the_middle_of_a_stream_are_counted_and_not_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = json.dumps({"prompt": "a", "n": 32, "stream": True, "max_tokens": CONTEXT - 5, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: me\r\nauthorization: Bearer {TOKEN}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with served(make_model(tmp_path / "little")) as server:
        port = int(server.url.rpartition(":")[2])
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall((head + body).encode())
                client.recv(2**12)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # gone at once
        while server.figures()["headrace_clients_gone_total"] < 3:
            pass
    assert capfd.readouterr().err.count("socket.send") == 0
