"""The network of a session: its own loopback interface, and the ports of it that lead outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace.base.errors import ConfigError
from headrace.wings.sandboxes import SandboxSession, SandboxSpec, SessionEnded
from headrace.wings.sandboxes.local.forwards import MOST_CONNECTIONS
from tests.wings.sandboxes.conftest import Sandboxes

PORT = 8008
SOCKETS = """python3 -c '
import sys
from socket import *
for line in sys.stdin:
    try:
        eval(f"socket({line})").close()
        print("made")
    except OSError as error:
        print(type(error).__name__)
'"""
"""A command that tries to make the sockets that its input describes."""


class Outside:
    """A server on this machine, which repeats a line and then the end of what it reads."""

    def __init__(self) -> None:
        self.open = 0
        self.server: asyncio.Server | None = None

    async def __aenter__(self) -> Outside:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.close()

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            writer.write(b"got " + await reader.readline())
            writer.write(b"then %d bytes" % len(await reader.read()))
            writer.write_eof()
        finally:
            self.open -= 1
            writer.close()


def ask(port: int, size: int = 0) -> str:
    """A command that sends a line and ``size`` bytes to a port, and prints the answer."""
    return f"""python3 -c '
import socket
with socket.create_connection(("127.0.0.1", {port})) as way:
    way.sendall(b"hello\\n" + b"x" * {size})
    way.shutdown(socket.SHUT_WR)
    data = b""
    while part := way.recv(1 << 16):
        data += part
print(data.decode(), end="")
'"""


def with_session(
    sandboxes: Sandboxes, body: Callable[[SandboxSession, Outside], Awaitable[None]], port: int = PORT
) -> None:
    async def whole() -> None:
        async with Outside() as outside:
            spec = SandboxSpec(loopback=True, forwards={port: outside.address})
            async with await sandboxes.driver.start(spec) as session:
                await body(session, outside)

    sandboxes(whole())


def test_a_port_leads_outside_also_after_a_snapshot_and_in_a_fork(sandboxes: Sandboxes) -> None:
    async def body(session: SandboxSession, outside: Outside) -> None:
        expected = "got hello\nthen 1000000 bytes"
        assert (await session.run(ask(PORT, 1_000_000))).stdout == expected
        snapshot = await session.snapshot()
        assert (await session.run(ask(PORT, 1_000_000))).stdout == expected
        async with await sandboxes.driver.fork(snapshot) as fork:
            assert (await fork.run(ask(PORT, 1_000_000))).stdout == expected
        await sandboxes.driver.release(snapshot)

    with_session(sandboxes, body)


def test_nothing_else_is_reached(sandboxes: Sandboxes) -> None:
    """Neither the machine, nor another session, nor anything over other protocols."""

    async def body(session: SandboxSession, outside: Outside) -> None:
        for port in (int(outside.address.rpartition(":")[2]), PORT + 1):
            assert "refused" in (await session.run(ask(port))).stderr.lower()
        async with await sandboxes.driver.start(SandboxSpec(loopback=True)) as other:
            assert "refused" in (await other.run(ask(PORT))).stderr.lower()
        done = await session.run("cat < /dev/tcp/10.0.0.1/80; cat /proc/net/dev")
        assert "unreachable" in done.stderr
        assert [line.split(":")[0].strip() for line in done.stdout.splitlines()[2:]] == ["lo"]
        sockets = ["AF_INET, SOCK_STREAM, 132", "AF_INET, SOCK_STREAM, 262", "AF_INET, 6", "AF_INET, SOCK_DGRAM, 1"]
        sockets += ["AF_INET6, SOCK_RAW, 58", "AF_NETLINK, SOCK_RAW", "AF_PACKET, SOCK_RAW", "40, SOCK_STREAM"]
        done = await session.run(SOCKETS, stdin="\n".join(sockets).encode())
        assert done.stdout.split() == ["PermissionError"] * len(sockets)
        sockets = ["AF_INET, SOCK_STREAM", "AF_INET6, SOCK_STREAM, 6", "AF_INET, SOCK_DGRAM, 17", "AF_UNIX"]
        done = await session.run(SOCKETS, stdin="\n".join(sockets).encode())
        assert done.stdout.split() == ["made"] * len(sockets)

    with_session(sandboxes, body)


def test_without_a_loopback_network_there_are_no_sockets(session: SandboxSession, sandboxes: Sandboxes) -> None:
    done = sandboxes(session.run("python3 -c 'from socket import *; socket(AF_INET)'"))
    assert "PermissionError" in done.stderr


def test_programs_of_a_session_reach_each_other_by_name(sandboxes: Sandboxes) -> None:
    async def body(session: SandboxSession, outside: Outside) -> None:
        await session.write({"index.html": "inside"})
        await session.run("(python3 -m http.server 9009 > /dev/null 2>&1 &)")
        program = 'import urllib.request as u; print(u.urlopen("http://localhost:9009/").read().decode())'
        done = await session.run(
            f"until (: < /dev/tcp/localhost/9009) 2> /dev/null; do :; done; python3 -c '{program}'"
        )
        assert done.stdout == "inside\n"

    with_session(sandboxes, body)


def test_commands_inherit_no_socket_of_the_network(sandboxes: Sandboxes) -> None:
    async def body(session: SandboxSession, outside: Outside) -> None:
        async with await sandboxes.driver.start(SandboxSpec()) as other:
            for each in (session, other):
                names = (await each.run("for f in /proc/self/fd/*; do readlink $f; done")).stdout
                assert "socket:" not in names

    with_session(sandboxes, body)


def test_more_connections_than_allowed_are_closed_and_all_end_with_the_session(sandboxes: Sandboxes) -> None:
    program = f"""python3 -c '
import socket, time
ways = [socket.create_connection(("127.0.0.1", {PORT})) for _ in range({MOST_CONNECTIONS + 20})]
closed = 0
for way in ways:
    way.settimeout(0.2)
    try:
        closed += way.recv(1) == b""
    except ConnectionResetError:
        closed += 1
    except TimeoutError:
        break
print(sum(1 for way in ways if way.fileno() >= 0), flush=True)
time.sleep(100)
' > opened & until [ -s opened ]; do :; done"""

    async def body(session: SandboxSession, outside: Outside) -> None:
        await session.run(program)
        while not outside.open:  # noqa: ASYNC110 - the program may be told of connections first
            await asyncio.sleep(0.01)
        assert outside.open <= MOST_CONNECTIONS
        await session.stop()
        while outside.open:  # noqa: ASYNC110 - what another task counts
            await asyncio.sleep(0.01)
        with pytest.raises(SessionEnded):
            await session.run("true")

    with_session(sandboxes, body)


def test_a_connection_to_a_silent_server_outside_ends_with_the_session(sandboxes: Sandboxes) -> None:
    """Neither end closes it by itself: the program is killed, and the server waits for ever."""

    async def body() -> None:
        begun, over = asyncio.Event(), asyncio.Event()

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begun.set()
            await over.wait()
            writer.close()

        async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            session = await sandboxes.driver.start(SandboxSpec(loopback=True, forwards={PORT: address}))
            await session.run(f"(exec 3<>/dev/tcp/127.0.0.1/{PORT}; sleep 100 <&3 &)")
            await begun.wait()
            await session.stop()
            async with asyncio.timeout(20):
                while len(asyncio.all_tasks()) > 2:  # noqa: ASYNC110 - this one, and the server's
                    await asyncio.sleep(0.01)
            over.set()

    sandboxes(body())


def test_an_address_that_cannot_be_reached_closes_the_connection_of_the_program(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        async with Outside() as outside:
            address = outside.address
        spec = SandboxSpec(loopback=True, forwards={PORT: address})
        async with await sandboxes.driver.start(spec) as session:
            done = await session.run(ask(PORT))
            assert done.stdout == "" or "reset" in done.stderr.lower()
            assert (await session.run("echo on")).stdout == "on\n"

    sandboxes(body())


@pytest.mark.parametrize(
    ("loopback", "forwards"),
    [
        (False, {PORT: "127.0.0.1:80"}),
        (True, {80: "127.0.0.1:80"}),
        (True, {PORT: "127.0.0.1"}),
        (True, {PORT: "127.0.0.1:http"}),
        (True, {PORT: ":80"}),
        (True, {PORT: "127.0.0.1:70000"}),
    ],
)
def test_ways_that_cannot_be_are_refused_by_name(
    sandboxes: Sandboxes, loopback: bool, forwards: dict[int, str]
) -> None:
    with pytest.raises(ConfigError, match="forwards="):
        sandboxes.start(loopback=loopback, forwards=forwards)


def test_the_user_of_a_session_and_of_its_forks_has_a_name(sandboxes: Sandboxes) -> None:
    """Programs of Node.js and git ask for it."""

    async def body() -> None:
        async with await sandboxes.driver.start(SandboxSpec()) as session:
            assert (await session.run("whoami; id -gn")).stdout == "agent\nagent\n"
            snapshot = await session.snapshot()
            async with await sandboxes.driver.fork(snapshot) as fork:
                assert (await fork.run("whoami; id -gn")).stdout == "agent\nagent\n"
            await sandboxes.driver.release(snapshot)

    sandboxes(body())
