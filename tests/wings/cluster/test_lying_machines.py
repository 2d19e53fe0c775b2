"""Machines that have an invitation, and do not keep to the protocol: their visit ends, the run continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from headrace import __version__
from headrace.base.types.messages import environment, node
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Alive, Done, Leaving, Ready
from headrace.base.types.messages.node import Do, Drop, Farewell, JoinAnswer, JoinRefused, JoinRequest, Welcome
from headrace.launch.channel import ChannelAddresses, PartChannel
from headrace.wings.cluster.far.supervisor import FarExit, NodeReply, StartOrder
from headrace.wings.cluster.joining.invitation import read_invitation
from tests.rollout.environments.pools import RunningPool, running_pool
from tests.wings.cluster.test_joining import PLACES, free_address, joined, knocked, until

FOUND = msgspec.json.encode(NodeReply(address="", interface="", headrace="", missing={}, shared=False, port=1))
ENDED = msgspec.json.encode(FarExit(code=1, words="ended", lines=[]))
Answer = bytes | int | float


@dataclass(slots=True, kw_only=True)
class Liar:
    """A machine that answers what it is told to answer; its workers are threads."""

    path: Path
    """Of the invitation."""
    answers: dict[str, Answer] = field(default_factory=dict)
    """In place of the true ones."""
    worker: Callable[[PartChannel, StartOrder, Liar], None] | None = None
    """What each of its workers does."""
    to_say: list[object] = field(default_factory=list)
    waiting: list[Do] = field(default_factory=list)
    """What is answered only when it is to leave."""
    num_prompt: int | None = None
    """How many of its workers begin at once; the others begin only then. ``None``: all."""
    begun: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    """By which the run waits for the end of a process, by supervisor."""
    stopped: threading.Event = field(default_factory=threading.Event)

    def live(self) -> None:
        """Until it is stopped, or sent away."""
        welcome = knock(self.path)
        assert isinstance(welcome, Welcome)
        ends = ChannelAddresses(orders=welcome.orders, reports=welcome.reports, key=welcome.key)
        channel = PartChannel(ends, node.Message, on_broken=self.stopped.set)
        channel.send(Ready(token=welcome.token, pid=1, facts={}))
        while not self.stopped.is_set():
            for message in channel.receive(0.1):
                self._hear(message)
            for word in (Alive(), *self.to_say):
                channel.send(word)
            self.to_say.clear()
        channel.close()

    def _hear(self, message: object) -> None:
        match message:
            case Do(method="wait_until_ended"):
                self.calls[message.supervisor] = message.call
                if "wait_until_ended" in self.answers:
                    self.to_say.append(Done(call=message.call, answer=self.answers["wait_until_ended"]))
            case Do():
                self._do(message)
            case Drop() if message.supervisor in self.calls:
                self.to_say.append(Done(call=self.calls[message.supervisor], answer=ENDED))
            case Farewell():
                self.to_say += [Done(call=each.call, answer=7) for each in self.waiting]
                self.waiting.clear()

    def _do(self, order: Do) -> None:
        if order.method == "start":
            self.begun += 1
            if self.num_prompt is not None and self.begun > self.num_prompt:
                self.waiting.append(order)
                return
            begin = msgspec.json.decode(order.argument, type=StartOrder)
            if self.worker is not None:
                threading.Thread(target=self._work, args=(begin,), daemon=True).start()
        true = FOUND if order.method == "describe_node" else 7
        self.to_say.append(Done(call=order.call, answer=self.answers.get(order.method, true)))

    def _work(self, begin: StartOrder) -> None:
        channel = PartChannel(begin.briefing.addresses, environment.Message, on_broken=self.stopped.is_set)
        assert self.worker is not None
        self.worker(channel, begin, self)
        self.stopped.wait(20)
        channel.close()


def knock(path: Path, **more: object) -> object:
    """What the door answers to somebody who has the invitation."""
    invitation = read_invitation(path)
    words = {"token": invitation.token, "headrace": __version__, "address": "liar", "workers": 1, **more}
    return knocked(
        invitation, MessageCodec(JoinAnswer).encode(msgspec.convert(words | {"type": "JoinRequest"}, JoinRequest))
    )


@asynccontextmanager
async def living(liar: Liar) -> AsyncIterator[None]:
    life = asyncio.ensure_future(asyncio.to_thread(liar.live))
    try:
        yield
    finally:
        liar.stopped.set()
        await life


async def goes_on(at: RunningPool) -> bool:
    return set(map(type, await at.run("pid", "pid"))) == {float} and not at.keeping.done()


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        *[("describe_node", answer) for answer in (b"\xff", 5, b"{}")],
        *[("start", b"x"), ("start", 1.5), ("wait_until_ended", b"x"), ("wait_until_ended", 5)],
    ],
)
def test_whatever_a_machine_answers_it_is_sent_away_and_the_run_goes_on(
    tmp_path: Path, what: str, answer: Answer
) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", join=free_address()) as at:
            async with living(Liar(path=at.invitation, answers={what: answer})):
                await until(lambda: len(at.events) == 2)
            assert "liar cannot be used, and was sent away" in at.events[1]
            assert f"its machine answers '{what}' with something else" in at.events[1]
            assert await goes_on(at)

    asyncio.run(main())


def garbage(channel: PartChannel, _: StartOrder, __: Liar) -> None:
    channel.send("nonsense")


def test_a_worker_elsewhere_that_talks_nonsense_before_it_is_ready_ends_the_visit_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", join=free_address()) as at:
            async with living(Liar(path=at.invitation, worker=garbage)):
                await until(lambda: len(at.events) == 2)
            assert "was sent away: environment-1 sent something that is not a message" in at.events[1]
            assert await goes_on(at)

    asyncio.run(main())


def dies_with_its_first(channel: PartChannel, begin: StartOrder, liar: Liar) -> None:
    """It takes an episode, and nonsense has it ended."""
    channel.send(Ready(token=begin.token, pid=1, facts={}))
    while not channel.wait(0.1) and not liar.stopped.is_set():
        channel.send(Alive())
    channel.send("nonsense")


def test_an_episode_that_was_to_begin_again_on_a_machine_that_leaves_waits_for_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", join=free_address(), num_workers=0) as at:
            liar = Liar(path=at.invitation, worker=dies_with_its_first, num_prompt=2)
            async with living(liar):
                running = asyncio.ensure_future(at.run("pid"))
                await until(lambda: len(liar.waiting) == 2)  # after two deaths, the suspect has one of its own, too
                liar.to_say.append(Leaving())
                await until(lambda: at.events[-1].endswith("has left"))
                await until(lambda: not liar.waiting)
            async with joined(at.invitation):
                assert set(map(type, await running)) == {float}

    asyncio.run(main())


def test_so_many_may_come_as_there_are_files_for_whether_they_show_themselves_or_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", join=free_address()) as at:
            answers = [await asyncio.to_thread(knock, at.invitation, workers=1024) for _ in range(3)]
            assert isinstance(answers[-1], JoinRefused)
            assert "for which it may open files" in answers[-1].problem
            assert await goes_on(at)

    asyncio.run(main())
