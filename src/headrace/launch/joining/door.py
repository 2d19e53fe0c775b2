"""Where machines join a run, and what becomes of them: the run's side.

headrace join ──Knock──▶ door            one address, known from the invitation
              ◀─Welcome─                 a channel of its own
              ──Ready──▶ guest           from here as with any part: orders, answers, heartbeats
              ◀──Do────                  start a worker, tell how it ended
its worker    ──Ready──▶ environment-n   a worker like any other, with a channel of its own
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headrace import __version__
from headrace.clock import RealClock
from headrace.errors import ConfigError, DeadlineError, HeadraceError, RunError
from headrace.launch.channel import ControllerChannel, guarded
from headrace.launch.child import Child, Errand, Process, Site, Starter
from headrace.launch.clients import EnvPool
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.launch.clients.shift import Crew, Gone
from headrace.launch.far.keeper import Asked, Begin, Found
from headrace.launch.far.paths import paths_of
from headrace.launch.far.process import Broken, FarProcess, Lost, in_time
from headrace.launch.joining.invitation import INVITATION_FILE, Invitation, host_and_port, write_invitation
from headrace.launch.order import Order
from headrace.launch.starts import Briefing, EnvironmentStart
from headrace.types.messages import controller
from headrace.types.messages.codec import Codec
from headrace.types.messages.controller import Alive, Done, Failure, Leaving, Left
from headrace.types.messages.node import Do, Drop, Farewell, Knock, Refused, Welcome
from headrace.types.observation import Event

COME_S = 20.0
"""How long a machine that was let in may take to show itself."""
LOOK_S = 1.0
"""How often the time since it was last heard is looked at."""
QUIET_LOOKS = 15
"""Looks without a word after which it counts as lost."""
LAST_LOOKS = 3
"""The same where a connection broke, which may have been nobody's."""
LAST_S = 1.0
"""How long it may take to hear a last word."""
MAX_KNOCK = 1 << 16
"""Bytes of a knock."""
MAX_WORKERS = 1024
"""Of one machine."""

StartWorker = Callable[[EnvironmentStart, Starter], Awaitable[Child]]


@asynccontextmanager
async def opened_door(order: Order, site: Site) -> AsyncIterator[Door | None]:
    """A door for the body's duration, and an invitation in the run's directory; ``None`` where nobody may join."""
    if not order.launch.join:
        yield None
        return
    door = Door(order, site)
    try:
        yield door
    finally:
        door.close()


class Door:
    """See :func:`opened_door`."""

    def __init__(self, order: Order, site: Site) -> None:
        self._order, self._site = order, site
        self._host, _ = host_and_port(order.launch.join)
        self._clock = RealClock()
        self._opened_s = self._clock.now()
        self._codec = Codec(Knock)
        self._token = secrets.token_hex(32)
        self._num_guests = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        key = guarded(self._socket, max_bytes=MAX_KNOCK)
        self._socket.setsockopt(zmq.IPV6, int(":" in self._host))
        try:
            self._socket.bind(f"tcp://{order.launch.join}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"launch.join={order.launch.join!r}: nobody can join there: {error.strerror}",
                remedy="name an address of this machine, and a port that is free",
            ) from None
        self._invitation = order.run_dir / INVITATION_FILE
        self._mark = order.run_dir / f".seen-{secrets.token_hex(8)}"
        self._mark.touch()
        write_invitation(self._invitation, Invitation(address=order.launch.join, key=key, token=self._token))

    def close(self) -> None:
        """Let nobody in any more; who was here has been told."""
        self._invitation.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)
        self._context.destroy(0)

    async def admit(self, pool: EnvPool, start: EnvironmentStart, start_worker: StartWorker) -> None:
        """Let machines in, and have ``pool`` use their workers; ends only by cancellation."""
        async with asyncio.TaskGroup() as visits:
            while True:
                sender, data = await self._knock()
                knock = self._refusal(data)
                if isinstance(knock, Refused):
                    await self._answer(sender, knock)
                    continue
                guest = self._guest(knock)
                ends = guest.channel.ends
                await self._answer(
                    sender,
                    Welcome(orders=ends.orders, reports=ends.reports, key=ends.key, token=self._site.token),
                )
                theirs = msgspec.structs.replace(start, entry=knock.entry or start.entry)
                crew = Crew(partial(start_worker, theirs, guest), knock.workers)
                visits.create_task(self._visit(guest, crew, pool))

    async def _knock(self) -> tuple[bytes, bytes]:
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            if len(frames) == 2:
                return frames[0], frames[1]

    async def _answer(self, sender: bytes, answer: Welcome | Refused) -> None:
        with suppress(zmq.ZMQError):  # it has left
            await self._socket.send_multipart([sender, self._codec.encode(answer)], zmq.NOBLOCK)

    def _refusal(self, data: bytes) -> Knock | Refused:
        """What was said at the door, or why whoever said it does not come in."""
        remedy = f"take the {INVITATION_FILE} of the run that goes on now, and the same version of headrace"
        try:
            knock = self._codec.decode(data)
        except msgspec.DecodeError:
            return Refused(problem="the run does not understand what this machine says", remedy=remedy)
        assert isinstance(knock, Knock)
        if not hmac.compare_digest(knock.token.encode(), self._token.encode()):
            return Refused(problem="the invitation is not of this run", remedy=remedy)
        if knock.headrace != __version__:
            return Refused(
                problem=f"this machine has headrace {knock.headrace!r}, and the run has {__version__}",
                remedy="install the same version everywhere",
            )
        if not 1 <= knock.workers <= MAX_WORKERS:
            return Refused(problem=f"{knock.workers} workers", remedy=f"offer 1 to {MAX_WORKERS}")
        return knock

    def _guest(self, knock: Knock) -> _Guest:
        name = f"node-{self._num_guests}"
        self._num_guests += 1
        channel = ControllerChannel(self._site.directory, name, controller.Message, host=self._host)
        peer = _GuestPeer(name, channel, token=self._site.token, on_spans=self._site.on_spans)
        asked = Asked(paths={}, run_dir=str(self._order.run_dir), mark=self._mark.name)
        address = knock.address[:64].encode("ascii", "replace").decode()
        terms = _Terms(home=self._host, start_timeout_s=self._order.launch.start_timeout_s, asked=asked)
        return _Guest(peer, channel, address, terms)

    async def _visit(self, guest: _Guest, crew: Crew, pool: EnvPool) -> None:
        """One machine, from its coming to its going. What goes wrong with it ends its visit, and not the run."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(guest.peer.listen())]
            try:
                if await _shows_itself(guest.peer):
                    self._tell(f"{guest.address} has joined, with {_workers(crew)}")
                    tasks += [group.create_task(self._watch(guest, crew)), group.create_task(_listen_for_breaks(guest))]
                    await pool.lodge(crew)
                    self._say_goodbye(guest)
            except HeadraceError as error:
                self._tell(f"{guest.address} cannot be used, and was sent away: {error.problem}", warning=True)
                await guest.send_away(Refused(problem=error.problem, remedy=error.remedy))
            finally:
                await guest.send_away(Farewell())
                for task in tasks:
                    task.cancel()

    def _say_goodbye(self, guest: _Guest) -> None:
        if guest.gone:
            self._tell(f"{guest.address} was lost: what ran there begins again elsewhere", warning=True)
        else:
            self._tell(f"{guest.address} has left")

    async def _watch(self, guest: _Guest, crew: Crew) -> None:
        """Have it leave when it wants to, or when it is gone."""
        quiet_looks = 0
        while quiet_looks < (LAST_LOOKS if guest.broke else QUIET_LOOKS) and not guest.peer.spoke.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await guest.peer.leaving.wait()
                    crew.leaving.set()
                    await guest.peer.spoke.wait()
            quiet_looks = 0 if guest.peer.was_heard else quiet_looks + 1
            guest.broke &= not guest.peer.was_heard
            guest.peer.was_heard = False
        crew.lose()
        guest.close()

    def _tell(self, text: str, *, warning: bool = False) -> None:
        wall_s = self._clock.now() - self._opened_s
        self._order.on_event(Event(wall_s=wall_s, text=text, level="warning" if warning else "info"))


class _GuestPeer(ForeignPeer):
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
class _Terms:
    """On which workers are started on machines that have joined."""

    home: str
    """The address of this machine, as those reach it."""
    start_timeout_s: float
    asked: Asked
    """What each is asked before: without the paths."""


class _Guest:
    """The same, as one that starts workers: see :class:`~headrace.launch.child.Starter`."""

    def __init__(self, peer: _GuestPeer, channel: ControllerChannel, address: str, terms: _Terms) -> None:
        self.peer, self.channel, self.address = peer, channel, address
        self.gone = False
        self.broke = False
        """Whether a connection to its channel broke, and it has not been heard since."""
        self.home = terms.home
        self._asked, self._timeout_s = terms.asked, terms.start_timeout_s
        self._num_keepers = 0

    async def send_away(self, word: Farewell | Refused) -> None:
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

    async def start(self, site: Site, errand: Errand) -> tuple[Peer, Process]:
        """Raises :class:`~headrace.launch.clients.shift.Gone`, or what keeps it from being started there."""
        assert isinstance(errand.start, EnvironmentStart)
        keeper = _GuestKeeper(self, self._num_keepers)
        self._num_keepers += 1
        try:
            return await self._started(keeper, site, errand, errand.start)
        except BaseException as error:
            keeper.kill()
            if isinstance(error, Lost):
                raise Gone(str(error)) from None
            if isinstance(error, Broken):
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
        self, keeper: _GuestKeeper, site: Site, errand: Errand, start: EnvironmentStart
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

    async def _look(self, keeper: _GuestKeeper, start: EnvironmentStart) -> Found:
        asked = msgspec.structs.replace(self._asked, paths=paths_of(start))
        found = msgspec.json.decode(
            await in_time(keeper.call("look", msgspec.json.encode(asked)), self._timeout_s), type=Found
        )
        for path in found.missing.values():
            raise ConfigError(
                f"{path!r}, which the environment needs, is not on {self.address}",
                remedy="put it there under the same path, or say where it is: headrace join --entry FILE.py:NAME",
            )
        return found


class _GuestKeeper:
    """See :class:`~headrace.launch.far.process.Keeping`."""

    def __init__(self, guest: _Guest, number: int) -> None:
        self._guest, self._number = guest, number

    def call(self, method: Any, *arguments: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._guest.gone:
            answer.set_exception(Lost(_LOST))
            return answer
        peer = self._guest.peer
        call = peer.next_call()

        def settle(done: asyncio.Future[Done]) -> None:
            if answer.done():
                return
            if done.cancelled():
                answer.set_exception(Lost(_LOST))
            elif error := done.exception():
                answer.set_exception(Broken(str(error)))
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


async def _listen_for_breaks(guest: _Guest) -> None:
    while True:
        await guest.channel.broken()
        guest.broke, guest.peer.was_heard = True, False


async def _shows_itself(peer: Peer) -> bool:
    await asyncio.wait([peer.ready], timeout=COME_S)
    return peer.ready.done() and not peer.ready.cancelled() and peer.ready.exception() is None


def _workers(crew: Crew) -> str:
    return f"{crew.num_workers} worker{'' if crew.num_workers == 1 else 's'}"
