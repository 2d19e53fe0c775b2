"""Messages between the controller and a part: what gets through, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import DeadlineError, HeadraceError, RunError, WeightsError
from headrace.base.types.messages import controller, engine
from headrace.base.types.messages.codec import MessageCodec, Shutdown
from headrace.base.types.messages.controller import Chunks, EngineStats, Failure, Ready, Staged
from headrace.base.types.messages.engine import Abort, Commit
from headrace.launch import channel
from headrace.launch.channel import ControllerChannel, PartChannel
from headrace.launch.clients.peer import Peer

TOKEN = "the-token-of-this-run"


class Line:
    """Both ends of one part's sockets, in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ours = ControllerChannel(directory, "engine", controller.Message)
        self.peer = Peer("engine", self.ours, token=TOKEN, on_spans=lambda _: None)
        self.theirs = PartChannel(self.ours.addresses, engine.Message)

    def say_raw(self, data: bytes) -> None:
        """Bytes in place of a message of the part."""
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(self.ours.addresses.reports)
            socket.send(data)


class Unused:
    """A channel that is not used."""

    local_orders = ""

    def send(self, message: Any) -> None:
        raise AssertionError(message)

    async def receive(self) -> list[Any]:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


@asynccontextmanager
async def line(*, greeted: bool = True) -> AsyncIterator[Line]:
    with tempfile.TemporaryDirectory(prefix="hr-test-") as directory:
        made = Line(Path(directory))
        if greeted:
            made.peer.ready.set_result(Ready(token=TOKEN, pid=1, facts={}))
        try:
            async with asyncio.timeout(20):
                yield made
        finally:
            made.theirs.close()
            made.peer.close()


def refused(main: Coroutine[Any, Any, None]) -> HeadraceError:
    with pytest.raises(HeadraceError) as error:
        asyncio.run(main)
    return error.value


def test_orders_and_reports_arrive_in_order_and_whole() -> None:
    async def main() -> None:
        async with line() as at:
            at.theirs.send(Ready(token=TOKEN, pid=1, facts={}))  # sockets connect before they are spoken to
            assert [ready.pid for ready in await at.ours.receive()] == [1]
            orders = [Commit(call=call, version=call) for call in range(100)] + [Shutdown()]
            for order in orders:
                at.peer.send(order)
            received: list[object] = []
            while len(received) < len(orders):
                received += await asyncio.to_thread(at.theirs.receive, 5.0)
            assert received == orders
            assert at.theirs.receive(0) == []

    asyncio.run(main())


def test_a_flood_of_reports_is_received_in_pieces_between_which_other_tasks_run() -> None:
    turns = []

    async def main() -> None:
        async with line() as ends:
            for call in range(3 * channel.MAX_AT_ONCE):
                ends.theirs.send(Staged(call=call, version=0, seconds=0.0))
            calls: list[int] = []
            while len(calls) < 3 * channel.MAX_AT_ONCE:
                asyncio.get_running_loop().call_soon(turns.append, len(calls))
                messages = await ends.ours.receive()
                assert len(messages) <= channel.MAX_AT_ONCE
                assert turns[-1] == len(calls), "another task has run before"
                calls += [message.call for message in messages]
            assert calls == list(range(3 * channel.MAX_AT_ONCE))

    asyncio.run(main())


def test_an_answer_reaches_who_asked_and_one_that_nobody_waits_for_any_more_is_let_go() -> None:
    async def main() -> None:
        async with line() as at, asyncio.TaskGroup() as group:
            listening = group.create_task(at.peer.listen())
            left, asked = at.peer.next_call(), at.peer.next_call()
            at.peer.expect(left, Staged).cancel()
            future = at.peer.expect(asked, Staged)
            await asyncio.sleep(0)
            for call in (left, asked):
                at.theirs.send(Staged(call=call, version=call, seconds=0.0))
            assert (await at.peer.answer(future, "stage", 5.0)).version == asked
            listening.cancel()

    asyncio.run(main())


def test_a_failure_reaches_who_asked_as_the_error_it_was() -> None:
    async def main() -> None:
        async with line() as at, asyncio.TaskGroup() as group:
            listening = group.create_task(at.peer.listen())
            call = at.peer.next_call()
            future = at.peer.expect(call, Staged)
            at.theirs.send(Failure(call=call, kind="WeightsError", problem="torn", remedy="again"))
            with pytest.raises(WeightsError, match="torn"):
                await at.peer.answer(future, "stage", 5.0)
            at.theirs.send(Failure(call=None, kind="annotations", problem="gone", remedy="restart"))
            await at.peer.reported.wait()
            assert type(at.peer.reported_error) is RunError
            listening.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02",
        msgspec.msgpack.encode({"type": "Ready"}),
        msgspec.msgpack.encode({"type": "Staged", "call": "x", "version": 1, "seconds": 0.0}),
        MessageCodec(engine.Message).encode(Abort(request_ids=(1,))),
        b"\x83\xa4type\xa6Staged\xa4call\xa2\xff\xff",  # text that is not UTF-8
    ],
)
def test_bytes_that_are_no_message_end_the_run_in_words(data: bytes) -> None:
    async def main() -> None:
        async with line() as at:
            at.say_raw(data)
            await at.peer.listen()

    assert refused(main()).problem.startswith("engine sent something that is not a message: ")


@given(st.binary(max_size=64))
def test_no_bytes_whatever_do_more_than_be_refused(data: bytes) -> None:
    for receives in (controller.Message, engine.Message):
        with contextlib.suppress(msgspec.DecodeError):
            MessageCodec(receives).decode(data)


def test_a_process_without_the_token_of_the_run_is_refused() -> None:
    async def main() -> None:
        async with line(greeted=False) as at:
            at.theirs.send(Ready(token="a guess", pid=1, facts={}))
            await at.peer.listen()

    error = refused(main())
    assert "a process that is not of this run claims to be engine" in error.problem
    assert TOKEN not in str(error)


@pytest.mark.parametrize(
    "message", [Staged(call=7, version=1, seconds=0.0), Chunks(chunks=(), stats=EngineStats())], ids=["answer", "news"]
)
def test_an_answer_to_a_question_that_was_never_asked_is_refused(message: object) -> None:
    async def main() -> None:
        async with line() as at:
            at.theirs.send(message)
            await at.peer.listen()

    assert refused(main()).problem == f"engine sent an unexpected {type(message).__name__}"


def test_an_answer_that_does_not_come_is_told_by_part_and_order() -> None:
    async def main() -> None:
        async with line() as at:
            await at.peer.answer(at.peer.expect(at.peer.next_call(), Staged), "stage version 3", 0.01)

    error = refused(main())
    assert isinstance(error, DeadlineError)
    assert error.problem == "engine has not answered for 0.01 s: stage version 3"


def test_the_time_in_which_a_part_is_stopped_does_not_count_as_lateness() -> None:
    async def main() -> float:
        engine = Peer("engine", Unused(), token=TOKEN, on_spans=lambda _: None)
        asyncio.get_running_loop().call_later(4.5, setattr, engine, "halted", "is stopped (SIGSTOP)")
        asyncio.get_running_loop().call_later(64.5, setattr, engine, "halted", "")
        with pytest.raises(DeadlineError):
            await engine.answer(engine.expect(engine.next_call(), Staged), "stage version 3", 16.0)
        return VirtualClock().now()

    assert run_virtual(main()) == 76.0


def test_orders_to_a_part_that_is_still_starting_or_has_just_ended_are_no_error() -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="hr-test-") as directory:
            ours = ControllerChannel(Path(directory), "engine", controller.Message)
            try:
                ours.send(Shutdown())  # nobody is there
                theirs = PartChannel(ours.addresses, engine.Message)
                try:
                    assert await asyncio.to_thread(theirs.receive, 5.0) == [Shutdown()]
                finally:
                    theirs.close()
                for _ in range(20):
                    ours.send(Shutdown())
                    await asyncio.sleep(0.01)
            finally:
                ours.close()

    asyncio.run(main())


def test_part_sends_to_another_part_and_not_to_one_that_has_its_name_later() -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="hr-test-") as directory, ExitStack() as channels:
            lives = []
            for name in ("learner", "engine", "engine"):
                ours = ControllerChannel(Path(directory), name, controller.Message)
                channels.callback(ours.close)
                lives.append((ours, PartChannel(ours.addresses, engine.Message)))
            (_, learner), (first, before), (second, after) = lives
            learner.send_to([first.local_orders], Abort(request_ids=(1,)))
            assert await asyncio.to_thread(before.receive, 5.0) == [Abort(request_ids=(1,))]
            before.close()
            learner.send_to([first.local_orders], Abort(request_ids=(2,)))
            learner.send_to([second.local_orders], Abort(request_ids=(3,)))
            assert await asyncio.to_thread(after.receive, 5.0) == [Abort(request_ids=(3,))]
            assert after.receive(0.2) == []
            learner.close()
            after.close()

    asyncio.run(main())


def test_an_order_from_part_to_part_waits_for_a_part_that_does_not_answer_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "DELIVERY_MS", 1)

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="hr-test-") as directory, ExitStack() as channels:
            late = ControllerChannel(Path(directory), "engine", controller.Message)
            channels.callback(late.close)
            async with line() as at:
                at.theirs.send_to([late.local_orders], Abort(request_ids=(1,)))
                assert not await asyncio.to_thread(at.theirs.wait, 0.1)
                part = PartChannel(late.addresses, engine.Message)  # it answers after this time
                channels.callback(part.close)
                assert await asyncio.to_thread(part.receive, 5.0) == [Abort(request_ids=(1,))]

    asyncio.run(main())


def test_a_part_gets_every_order_that_it_sends_to_itself() -> None:
    async def main() -> None:
        async with line() as at:
            for number in range(100):
                at.theirs.send_to_self(Abort(request_ids=(number,)))
            assert at.theirs.receive(5.0) == [Abort(request_ids=(number,)) for number in range(100)]

    asyncio.run(main())


def test_a_part_that_does_not_read_is_told_apart_from_a_queue_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_QUEUED", 10)

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="hr-test-") as directory:
            ours = ControllerChannel(Path(directory), "engine", controller.Message)
            try:
                for _ in range(11):
                    ours.send(Shutdown())
            finally:
                ours.close()

    assert refused(main()).problem == "engine has not read its last 10 messages"


def test_nothing_is_believed_of_a_process_that_has_not_shown_the_token() -> None:
    async def main() -> None:
        async with line(greeted=False) as at:
            at.peer.expect(at.peer.next_call(), Staged)
            at.theirs.send(Staged(call=0, version=1, seconds=0.0))
            await at.peer.listen()

    assert refused(main()).problem == "engine sent a Staged before it proved to be of this run"


def test_sockets_in_a_directory_with_too_long_a_name_are_refused_with_a_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        ControllerChannel(deep, "engine", controller.Message)

    assert "set TMPDIR to a short path" in refused(main()).remedy


def test_closing_lets_nobody_wait_for_ever() -> None:
    async def main() -> None:
        async with line() as at:
            future = at.peer.expect(at.peer.next_call(), Staged)
            at.peer.close()
            at.peer.close()
            assert future.cancelled()

    asyncio.run(main())
