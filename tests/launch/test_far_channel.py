"""Messages between machines: encrypted, to nobody but the part that was told the key, over a connection that is never
fixed."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from headrace.base.errors import RunError
from headrace.base.types.messages import controller, engine
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Ready
from headrace.base.types.messages.engine import Commit
from headrace.launch import channel
from headrace.launch.channel import ChannelAddresses, ControllerChannel, PartChannel
from tests.launch.workers import is_alive

HERE = "127.0.0.1"
GREETING = Ready(token="t", pid=1, facts={})
PART = """
import sys, os, msgspec, pathlib
from headrace.launch.channel import ChannelAddresses, PartChannel
from headrace.base.types.messages import engine
from headrace.base.types.messages.controller import Ready
ends = msgspec.json.decode(sys.argv[1].encode(), type=ChannelAddresses)
part = PartChannel(ends, engine.Message)
part.send(Ready(token="t", pid=os.getpid(), facts={}))
while True:
    part.receive(60.0)
"""


@asynccontextmanager
async def ours() -> AsyncIterator[ControllerChannel]:
    made = ControllerChannel(Path("/nowhere"), "engine", controller.Message, host=HERE)
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        made.close()


def test_orders_and_reports_arrive_in_order_and_whole() -> None:
    async def main() -> None:
        async with ours() as line:
            orders = [Commit(call=call, version=call) for call in range(100)] + [Shutdown()]
            for order in orders:  # nobody is there yet: they wait
                line.send(order)
            theirs = await asyncio.to_thread(PartChannel, line.addresses, engine.Message)
            try:
                theirs.send(GREETING)
                assert await line.receive() == [GREETING]
                received: list[object] = []
                while len(received) < len(orders):
                    received += await asyncio.to_thread(theirs.receive, 5.0)
                assert received == orders
                line.send(Shutdown())
                assert await asyncio.to_thread(theirs.receive, 5.0) == [Shutdown()]
            finally:
                theirs.close()

    asyncio.run(main())


def test_each_part_has_a_key_of_its_own_and_sockets_at_the_address_that_was_asked_for() -> None:
    async def main() -> None:
        async with ours() as one, ours() as other:
            assert one.addresses.key != other.addresses.key
            assert {address.rpartition(":")[0] for address in (one.addresses.orders, one.addresses.reports)} == {
                f"tcp://{HERE}"
            }

    asyncio.run(main())


@pytest.mark.parametrize("key", ["another's", "none"])
def test_whoever_does_not_know_the_key_hears_nothing_and_is_not_heard(key: str) -> None:
    async def main() -> None:
        async with ours() as line:
            line.send(Shutdown())
            with zmq.Context() as context, context.socket(zmq.PUSH) as reports, context.socket(zmq.PULL) as orders:
                come(reports, line.addresses.reports, another_key=key == "another's")
                come(orders, line.addresses.orders, another_key=key == "another's")
                with suppress(zmq.Again):  # a connection that was refused already takes nothing
                    reports.send(msgspec.msgpack.encode({"type": "Ready"}), zmq.NOBLOCK)
                assert not orders.poll(300)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(line.receive(), 0.3)

    asyncio.run(main())


def come(socket: zmq.Socket[bytes], address: str, *, another_key: bool) -> None:
    socket.linger = 0
    if another_key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_keypair()[0]
    socket.connect(address)


def test_a_part_that_cannot_reach_the_controller_says_where_it_is() -> None:
    async def main() -> ChannelAddresses:
        async with ours() as line:
            return line.addresses

    ends = asyncio.run(main())  # nobody listens there any more
    with pytest.raises(RunError, match="cannot be reached from this machine") as raised:
        PartChannel(ends, engine.Message)
    assert ends.orders in raised.value.problem
    assert ends.key not in str(raised.value)


def test_a_part_whose_controller_has_another_key_is_refused_at_once() -> None:
    async def main() -> None:
        async with ours() as line:
            ends = msgspec.structs.replace(line.addresses, key=zmq.curve_keypair()[0].decode())
            with pytest.raises(RunError, match="cannot be reached"):
                await asyncio.to_thread(PartChannel, ends, engine.Message)

    asyncio.run(main())


def test_a_message_that_is_longer_than_allowed_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_BYTES", 10_000)
    broken = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    monkeypatch.setattr(channel, "_kill_process_group", lambda: loops[0].call_soon_threadsafe(broken.set))

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        async with ours() as line:
            theirs = await asyncio.to_thread(PartChannel, line.addresses, engine.Message)
            theirs.send(Ready(token="t" * 20_000, pid=1, facts={}))
            await broken.wait()
            theirs.close()

    asyncio.run(main())


def test_a_part_ends_when_its_connection_breaks() -> None:
    async def main() -> None:
        async with ours() as line:
            ends = msgspec.json.encode(line.addresses).decode()
            with tempfile.TemporaryFile() as log:
                command = (sys.executable, "-c", PART, ends)
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, start_new_session=True)
                assert [ready.pid for ready in await line.receive()] == [process.pid]
                assert is_alive(process.pid)
                line.close()
                assert await process.wait() == -signal.SIGKILL
                log.seek(0)
                assert b"the connection to the controller is broken: this process ends" in log.read()

    asyncio.run(main())


def test_an_address_that_is_not_of_this_machine_is_refused_with_the_address() -> None:
    async def main() -> None:
        ControllerChannel(Path("/nowhere"), "engine", controller.Message, host="203.0.113.9")

    with pytest.raises(RunError, match=r"at 203\.0\.113\.9: .*") as raised:
        asyncio.run(main())
    assert raised.value.remedy == "does that address belong to this machine?"


def test_a_part_that_does_not_read_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_QUEUED", 10)

    async def main() -> None:
        async with ours() as line:
            for _ in range(11):
                line.send(Shutdown())

    with pytest.raises(RunError, match="has not read its last 10 messages"):
        asyncio.run(main())
