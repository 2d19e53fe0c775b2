"""A machine that has joined a run, as the run sees it, and the processes that it starts there."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, DeadlineError, RunError
from headrace.base.types.messages import controller
from headrace.base.types.messages.controller import Alive, Done, Failure, Leaving, Left
from headrace.base.types.messages.node import Do, Drop, Farewell, JoinRefused
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Process, ProcessSpec, Rendezvous
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.launch.clients.shift import Gone
from headrace.launch.starts import Briefing, EnvironmentStart
from headrace.wings.cluster.far.keeper import Begin, FarExit, NodeQuery, NodeReply
from headrace.wings.cluster.far.paths import paths_of
from headrace.wings.cluster.far.process import FarProcess, KeeperLost, KeeperUnusable, in_time

LAST_S = 1.0
"""How long it may take to hear a last word."""


class GuestPeer(ForeignPeer):
    """A machine that has joined, as the controller hears it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.was_heard = True
        """Since that was looked at last."""
        self.leaving = asyncio.Event()
        """Whether it wants to go."""
        self.left = asyncio.Event()
        """Whether it goes."""

    async def listen(self) -> None:
        try:
            await super().listen()
        except RunError:  # it is not of this run
            self.spoke.set()

    def handle(self, message: object) -> None:
        match message:
            case Alive():
                self.was_heard = True
            case Leaving():
                self.leaving.set()
            case Left():
                self.left.set()
            case _:
                super().handle(message)

    def _fail(self, message: Failure) -> None:
        if message.call is None:
            super()._fail(message)
        else:
            Peer._fail(self, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestConfig:
    """On which workers are started on machines that have joined."""

    home: str
    """The address of this machine, as those reach it; or the directory from which sockets are carried to them."""
    start_timeout_s: float
    asked: NodeQuery
    """What each is asked before: without the paths."""


class JoinedStarter:
    """The same, as one that starts workers: see :class:`~headrace.launch.child.Starter`."""

    def __init__(self, peer: GuestPeer, channel: ControllerChannel, address: str, terms: GuestConfig) -> None:
        self.peer, self.channel, self.address = peer, channel, address
        self.gone = False
        self.broke = False
        """Whether a connection to its channel broke, and it has not been heard since."""
        self.home = terms.home
        self._asked, self._timeout_s = terms.asked, terms.start_timeout_s
        self._num_keepers = 0

    async def send_away(self, word: Farewell | JoinRefused) -> None:
        """Tell it why it is of no use any more."""
        if not self.gone:
            self.peer.send(word)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self.peer.left.wait()
            self.close()

    def close(self) -> None:
        """It is gone: whatever is waited for there is lost."""
        if not self.gone:
            self.gone = True
            self.peer.close()

    async def start(self, site: Rendezvous, errand: ProcessSpec) -> tuple[Peer, Process]:
        """Raises :class:`~headrace.launch.clients.shift.Gone`, or what keeps it from being started there."""
        assert isinstance(errand.start, EnvironmentStart)
        keeper = _GuestKeeper(self, self._num_keepers)
        self._num_keepers += 1
        try:
            return await self._started(keeper, site, errand, errand.start)
        except BaseException as error:
            keeper.kill()
            if isinstance(error, KeeperLost):
                raise Gone(str(error)) from None
            if isinstance(error, KeeperUnusable):
                raise RunError(
                    f"{errand.name} cannot be started on {self.address}: {error}", remedy="look at that machine"
                ) from None
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"{self.address} has not started {errand.name} within {self._timeout_s:g} s",
                    remedy="is that machine overloaded?",
                ) from None
            raise

    async def _started(
        self, keeper: _GuestKeeper, site: Rendezvous, errand: ProcessSpec, start: EnvironmentStart
    ) -> tuple[Peer, Process]:
        found = await self._look(keeper, start)
        channel = ControllerChannel(site.directory, errand.name, controller.Message, host=self.home)
        peer = errand.make_peer(channel)
        try:
            order = Begin(
                name=errand.name,
                briefing=Briefing(start=start, ends=channel.ends),
                token=site.token,
                num_threads=errand.num_threads,
                log=str(site.logs / f"{errand.name}.log") if found.shared else "",
            )
            pid = await in_time(keeper.call("begin", msgspec.json.encode(order)), self._timeout_s)
        except BaseException:
            peer.close()
            raise
        return peer, FarProcess(keeper, pid, self.address, kept=start.keep is not None)

    async def _look(self, keeper: _GuestKeeper, start: EnvironmentStart) -> NodeReply:
        asked = msgspec.structs.replace(self._asked, paths=paths_of(start))
        found = msgspec.json.decode(
            await in_time(keeper.call("look", msgspec.json.encode(asked)), self._timeout_s), type=NodeReply
        )
        for path in found.missing.values():
            raise ConfigError(
                f"{path!r}, which the environment needs, is not on {self.address}",
                remedy="put it there under the same path, or say where it is: headrace join --entry FILE.py:NAME",
            )
        return found


class _GuestKeeper:
    """See :class:`~headrace.wings.cluster.far.process.Keeping`."""

    def __init__(self, guest: JoinedStarter, number: int) -> None:
        self._guest, self._number = guest, number

    def call(self, method: Any, *arguments: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._guest.gone:
            answer.set_exception(KeeperLost(_LOST))
            return answer
        peer = self._guest.peer
        call = peer.next_call()

        def settle(done: asyncio.Future[Done]) -> None:
            if answer.done():
                return
            if done.cancelled():
                answer.set_exception(KeeperLost(_LOST))
            elif error := done.exception():
                answer.set_exception(KeeperUnusable(str(error)))
            elif not _is_sound(method, done.result().answer):
                answer.set_exception(KeeperUnusable(f"its machine answers {method!r} with something else"))
            else:
                answer.set_result(done.result().answer)
                return
            answer.exception()  # whoever asked may have left

        peer.expect(call, Done).add_done_callback(settle)
        peer.send(Do(call=call, keeper=self._number, what=method, asked=arguments[0] if arguments else b""))
        return answer

    def kill(self) -> None:
        if not self._guest.gone:
            self._guest.peer.send(Drop(keeper=self._number))


_LOST = "was lost with its machine"


def _is_sound(method: str, answer: bytes | int | float) -> bool:
    """Whether a keeper can have said that."""
    try:
        match method:
            case "look" | "ended":
                msgspec.json.decode(msgspec.convert(answer, bytes), type=NodeReply if method == "look" else FarExit)
            case "halted":
                msgspec.convert(answer, bytes)
            case _:
                msgspec.convert(answer, int if method == "begin" else float)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
