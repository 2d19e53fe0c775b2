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
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from headrace import __version__
from headrace.base.clock import RealClock
from headrace.base.config.redis import password_in
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.types.messages import controller
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.node import Farewell, JoinRefused, JoinRequest, Welcome
from headrace.base.types.observation import Event
from headrace.launch.channel import ControllerChannel, guarded
from headrace.launch.child import Child, Rendezvous, Starter
from headrace.launch.clients import EnvPool
from headrace.launch.clients.peer import Peer
from headrace.launch.clients.shift import WorkerGroup
from headrace.launch.order import LaunchOrder
from headrace.launch.starts import EnvironmentStart
from headrace.wings.cluster.far.keeper import NodeQuery
from headrace.wings.cluster.joining.files import open_files
from headrace.wings.cluster.joining.guest import GuestConfig, GuestPeer, JoinedStarter
from headrace.wings.cluster.joining.invitation import INVITATION_FILE, Invitation, host_and_port, write_invitation
from headrace.wings.cluster.joining.relay import DOOR, answering, dialled_in
from headrace.wings.cluster.joining.streams import RedisStreams

COME_S = 20.0
"""How long a machine that was let in may take to show itself."""
LOOK_S = 1.0
"""How often the time since it was last heard is looked at."""
QUIET_LOOKS = 15
"""Looks without a word after which it counts as lost."""
LAST_LOOKS = 3
"""The same where a connection broke, which may have been nobody's."""
MAX_KNOCK = 1 << 16
"""Bytes of a knock."""
MAX_WORKERS = 1024
"""Of one machine."""
FILES = 16
"""Open files that a worker elsewhere takes here, and a machine: sockets, and what they need."""
FILES_CARRIED = 4
"""More of them, where connections are carried over a Redis server: each of its two has a socket here, and one there."""

StartWorker = Callable[[EnvironmentStart, Starter], Awaitable[Child]]


@asynccontextmanager
async def opened_door(order: LaunchOrder, site: Rendezvous) -> AsyncIterator[JoinListener | None]:
    """A door for the body's duration, and an invitation in the run's directory; ``None`` where nobody may join."""
    if not order.launch.join:
        yield None
        return
    door = JoinListener(order, site)
    try:
        async with door.carried():
            yield door
    finally:
        door.close()


class JoinListener:
    """See :func:`opened_door`."""

    def __init__(self, order: LaunchOrder, site: Rendezvous) -> None:
        self._order, self._site = order, site
        self._clock = RealClock()
        self._opened_s = self._clock.now()
        self._codec = MessageCodec(JoinRequest)
        self._token = secrets.token_hex(32)
        self._num_guests = 0
        self._num_here = 0
        """Machines that have been let in and have not gone, and the workers that they offer."""
        self._most_files = open_files()
        launch = order.launch
        self._sockets = dialled_in(site.directory) if launch.relayed else None
        """Where those lie that others reach over a Redis server."""
        self._relay = secrets.token_hex(8) if launch.relayed else ""
        if self._sockets is not None:
            self._sockets.mkdir(mode=0o700)
        self._home = str(self._sockets or host_and_port(launch.join)[0])
        """Where channels for others are made."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        key = guarded(self._socket, max_bytes=MAX_KNOCK)
        self._socket.setsockopt(zmq.IPV6, int(":" in self._home))
        try:
            self._socket.bind(f"ipc://{self._sockets / DOOR}" if self._sockets else f"tcp://{launch.join}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"launch.join={order.launch.join!r}: nobody can join there: {error.strerror}",
                remedy="name an address of this machine, and a port that is free",
            ) from None
        self._invitation = order.run_dir / INVITATION_FILE
        self._mark = order.run_dir / f".seen-{secrets.token_hex(8)}"
        self._mark.touch()
        invitation = Invitation(
            address=launch.join, key=key, token=self._token, relay=self._relay, password_env=launch.join_password_env
        )
        write_invitation(self._invitation, invitation)

    def carried(self) -> AbstractAsyncContextManager[None]:
        """While this is open, others reach the sockets that they need, where that goes over a Redis server."""
        launch = self._order.launch
        if self._sockets is None:
            return nullcontext()
        password = password_in("launch.join_password_env", launch.join_password_env)
        streams = RedisStreams(launch.join, self._relay, password, partial(self._tell, warning=True))
        return answering(streams, self._sockets, self._most_files // 8)

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
                if isinstance(knock, JoinRefused):
                    await self._answer(sender, knock)
                    continue
                guest = self._guest(knock)
                ends = guest.channel.ends
                await self._answer(
                    sender,
                    Welcome(orders=ends.orders, reports=ends.reports, key=ends.key, token=self._site.token),
                )
                theirs = msgspec.structs.replace(start, entry=knock.entry or start.entry)
                crew = WorkerGroup(partial(start_worker, theirs, guest), knock.workers, knock.programs[:64])
                self._num_here += 1 + knock.workers
                visits.create_task(self._visit(guest, crew, pool))

    async def _knock(self) -> tuple[bytes, bytes]:
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            if len(frames) == 2:
                return frames[0], frames[1]

    async def _answer(self, sender: bytes, answer: Welcome | JoinRefused) -> None:
        with suppress(zmq.ZMQError):  # it has left
            await self._socket.send_multipart([sender, self._codec.encode(answer)], zmq.NOBLOCK)

    def _refusal(self, data: bytes) -> JoinRequest | JoinRefused:
        """What was said at the door, or why whoever said it does not come in."""
        remedy = f"take the {INVITATION_FILE} of the run that goes on now, and the same version of headrace"
        try:
            knock = self._codec.decode(data)
        except msgspec.DecodeError:
            return JoinRefused(problem="the run does not understand what this machine says", remedy=remedy)
        assert isinstance(knock, JoinRequest)
        if not hmac.compare_digest(knock.token.encode(), self._token.encode()):
            return JoinRefused(problem="the invitation is not of this run", remedy=remedy)
        if knock.headrace != __version__:
            return JoinRefused(
                problem=f"this machine has headrace {knock.headrace!r}, and the run has {__version__}",
                remedy="install the same version everywhere",
            )
        if not 1 <= knock.workers <= MAX_WORKERS:
            return JoinRefused(problem=f"{knock.workers} workers", remedy=f"offer 1 to {MAX_WORKERS}")
        most_here = self._most_files // 2 // (FILES + FILES_CARRIED if self._relay else FILES)
        if self._num_here + 1 + knock.workers > most_here:
            return JoinRefused(
                problem=f"with its {knock.workers} workers the run would have more machines and workers elsewhere than "
                f"the {most_here} for which it may open files",
                remedy="offer fewer, or raise the limit (ulimit -n) of whoever starts the run",
            )
        return knock

    def _guest(self, knock: JoinRequest) -> JoinedStarter:
        name = f"node-{self._num_guests}"
        self._num_guests += 1
        channel = ControllerChannel(self._site.directory, name, controller.Message, host=self._home)
        peer = GuestPeer(name, channel, token=self._site.token, on_spans=self._site.on_spans)
        asked = NodeQuery(paths={}, run_dir=str(self._order.run_dir), mark=self._mark.name)
        address = knock.address[:64].encode("ascii", "replace").decode()
        terms = GuestConfig(home=self._home, start_timeout_s=self._order.launch.start_timeout_s, asked=asked)
        return JoinedStarter(peer, channel, address, terms)

    async def _visit(self, guest: JoinedStarter, crew: WorkerGroup, pool: EnvPool) -> None:
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
                await guest.send_away(JoinRefused(problem=error.problem, remedy=error.remedy))
            finally:
                await guest.send_away(Farewell())
                self._num_here -= 1 + crew.num_workers
                for task in tasks:
                    task.cancel()

    def _say_goodbye(self, guest: JoinedStarter) -> None:
        if guest.gone:
            self._tell(f"{guest.address} was lost: what ran there begins again elsewhere", warning=True)
        else:
            self._tell(f"{guest.address} has left")

    async def _watch(self, guest: JoinedStarter, crew: WorkerGroup) -> None:
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


async def _listen_for_breaks(guest: JoinedStarter) -> None:
    while True:
        await guest.channel.broken()
        guest.broke, guest.peer.was_heard = True, False


async def _shows_itself(peer: Peer) -> bool:
    await asyncio.wait([peer.ready], timeout=COME_S)
    return peer.ready.done() and not peer.ready.cancelled() and peer.ready.exception() is None


def _workers(crew: WorkerGroup) -> str:
    return f"{crew.num_workers} worker{'' if crew.num_workers == 1 else 's'}"
