"""The listener at which machines join a run, and the life of each machine in the run.

headrace join ─JoinRequest▶ listener       one address, known from the invitation
              ◀──Welcome───                addresses and key of a channel for this machine
              ──Ready─────▶ machine        from here as with any part: orders, answers, heartbeats
              ◀──Do────────                start a worker, report how it ended
its worker    ──Ready─────▶ environment-n  a worker like any other, with a channel of its own

A worker is a process that runs episodes of the environment.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from headrace.base import __version__
from headrace.base.clock import RealClock
from headrace.base.config.addresses import host_and_port
from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.types.messages import controller
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.node import Farewell, JoinRefused, JoinRequest, Welcome
from headrace.base.types.observation import Event
from headrace.launch.channel import ControllerChannel, require_key
from headrace.launch.child import Child, Rendezvous, Starter
from headrace.launch.clients import EnvPool
from headrace.launch.clients.peer import Peer
from headrace.launch.clients.pool import WorkerGroup
from headrace.launch.config import INVITATION_FILE
from headrace.launch.order import LaunchOrder
from headrace.launch.starts import EnvironmentStart
from headrace.wings.cluster.far.supervisor import NodeQuery
from headrace.wings.cluster.joining.invitation import Invitation, write_invitation
from headrace.wings.cluster.joining.machine import JoinedStarter, MachineConfig, MachinePeer

READY_S = 20.0
"""Longest time in seconds until a machine that was admitted reports that it is ready."""
LOOK_S = 1.0
"""Seconds between two checks whether a message of a machine has come."""
QUIET_LOOKS = 15
"""Number of checks without a message after which a machine counts as lost."""
LAST_LOOKS = 3
"""Number of checks without a message after which a machine counts as lost once a connection of its channel has broken.
It is not given up at once, because nothing may depend on that connection."""
MAX_REQUEST_BYTES = 1 << 16
"""Largest size of a request to join, in bytes."""
MAX_WORKERS = 1024
"""Largest number of workers of one machine."""
FILES = 16
"""Number of open files that this process needs for each machine and each of its workers: sockets, and what belongs to
them."""
MOST_FILES = 1 << 16
"""Number of open files up to which this process raises its own limit, if allowed."""

StartWorker = Callable[[EnvironmentStart, Starter], Awaitable[Child]]
"""A function that starts a worker with the given settings, by the starter of its machine."""


@asynccontextmanager
async def listen_for_machines(order: LaunchOrder, site: Rendezvous) -> AsyncIterator[JoinListener | None]:
    """Listen for machines that join while the body runs, and write an invitation into the run's directory. Yield the
    listener, or ``None`` if ``launch.join`` is not set, so that the run admits no machines."""
    if not order.launch.join:
        yield None
        return
    listener = JoinListener(order, site)
    try:
        yield listener
    finally:
        listener.close()


class JoinListener:
    """The listener of a run that admits machines; :func:`listen_for_machines` makes it."""

    def __init__(self, order: LaunchOrder, site: Rendezvous) -> None:
        """Open the listener's socket at ``launch.join`` (``HOST:PORT``), and write the invitation into the directory of
        the run. ``site`` has the run's token, which a machine receives when it is admitted, and the directory of the
        run's channels. Raises :class:`~headrace.base.errors.ConfigError` if the socket cannot be bound."""
        self._order, self._site = order, site
        self._clock = RealClock()
        self._opened_s = self._clock.now()
        """When the listener was made, in seconds on its clock."""
        self._codec = MessageCodec(JoinRequest)
        self._token = secrets.token_hex(32)
        """The secret in the invitation, with which a machine shows that it is invited. It is not the run's token."""
        self._num_machines = 0
        """Number of machines admitted so far, including those that have left. It numbers the next machine."""
        self._num_here = 0
        """Number of machines that were admitted and have not left, plus the number of their workers."""
        self._most_files = open_files()
        """The largest number of files that this process may have open at once."""
        launch = order.launch
        self._host = host_and_port(launch.join)[0]
        """The host in ``launch.join``. The channel of each machine is opened at this address, on ports of its own."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        key = require_key(self._socket, max_bytes=MAX_REQUEST_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(":" in self._host))
        try:
            self._socket.bind(f"tcp://{launch.join}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"launch.join={order.launch.join!r}: nobody can join there: {error.strerror}",
                remedy="name an address of this machine, and a port that is free",
            ) from None
        self._invitation = order.run_dir / INVITATION_FILE
        self._mark = order.run_dir / f".seen-{secrets.token_hex(8)}"
        """An empty file. A machine that sees it at the same path has the run's directory in common with this one."""
        self._mark.touch()
        write_invitation(self._invitation, Invitation(address=launch.join, key=key, token=self._token))

    def close(self) -> None:
        """Stop listening, and delete the invitation. Machines that have joined are notified of the end elsewhere."""
        self._invitation.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)
        self._context.destroy(0)

    async def admit(self, pool: EnvPool, start: EnvironmentStart, start_worker: StartWorker) -> None:
        """Admit machines that ask to join, and give their workers to ``pool``, until this is cancelled. ``start`` has
        the settings of a worker, and ``start_worker`` starts one on a given machine."""
        async with asyncio.TaskGroup() as visits:
            while True:
                sender, data = await self._receive_request()
                request = self._refusal(data)
                if isinstance(request, JoinRefused):
                    await self._answer(sender, request)
                    continue
                machine = self._machine(request)
                ends = machine.channel.addresses
                await self._answer(
                    sender,
                    Welcome(orders=ends.orders, reports=ends.reports, key=ends.key, token=self._site.token),
                )
                # the environment may lie under another path there
                theirs = msgspec.structs.replace(start, entry=request.entry or start.entry)
                workers = WorkerGroup(partial(start_worker, theirs, machine), request.workers)
                self._num_here += 1 + request.workers
                visits.create_task(self._serve_machine(machine, workers, pool))

    async def _receive_request(self) -> tuple[bytes, bytes]:
        """Wait for a request to join, and return the sender's id and the message; messages of another form are
        ignored."""
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            if len(frames) == 2:
                return frames[0], frames[1]

    async def _answer(self, sender: bytes, answer: Welcome | JoinRefused) -> None:
        """Send the answer to the machine with the id ``sender``; nothing happens if it has disconnected."""
        with suppress(zmq.ZMQError):  # the machine has disconnected
            await self._socket.send_multipart([sender, self._codec.encode(answer)], zmq.NOBLOCK)

    def _refusal(self, data: bytes) -> JoinRequest | JoinRefused:
        """Return the request to join in ``data``, or the refusal to send if the machine cannot be admitted."""
        remedy = f"take the {INVITATION_FILE} of the run that is running now, and the same version of headrace"
        try:
            request = self._codec.decode(data)
        except msgspec.DecodeError:
            return JoinRefused(problem="the run does not understand what this machine says", remedy=remedy)
        assert isinstance(request, JoinRequest)
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            return JoinRefused(problem="the invitation is not of this run", remedy=remedy)
        if request.headrace != __version__:
            return JoinRefused(
                problem=f"this machine has headrace {request.headrace!r}, and the run has {__version__}",
                remedy="install the same version everywhere",
            )
        if not 1 <= request.workers <= MAX_WORKERS:
            return JoinRefused(problem=f"{request.workers} workers", remedy=f"offer 1 to {MAX_WORKERS}")
        most_here = self._most_files // 2 // FILES
        if self._num_here + 1 + request.workers > most_here:
            return JoinRefused(
                problem=f"with its {request.workers} workers the run would have more machines and workers elsewhere "
                f"than the {most_here} for which it may open files",
                remedy="offer fewer, or raise the limit of open files where the run is started (ulimit -n)",
            )
        return request

    def _machine(self, request: JoinRequest) -> JoinedStarter:
        """Return the starter of processes on a machine that is admitted, with a name and a channel of its own."""
        name = f"node-{self._num_machines}"
        self._num_machines += 1
        channel = ControllerChannel(self._site.directory, name, controller.Message, host=self._host)
        peer = MachinePeer(name, channel, token=self._site.token, on_spans=self._site.on_spans)
        query = NodeQuery(paths={}, run_dir=str(self._order.run_dir), mark=self._mark.name)
        address = request.address[:64].encode("ascii", "replace").decode()
        config = MachineConfig(home=self._host, start_timeout_s=self._order.launch.start_timeout_s, query=query)
        return JoinedStarter(peer, channel, address, config)

    async def _serve_machine(self, machine: JoinedStarter, workers: WorkerGroup, pool: EnvPool) -> None:
        """Serve one machine from its arrival to its departure: its workers belong to ``pool`` meanwhile. An error of
        the machine sends it away, and does not end the run."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(machine.peer.listen())]
            try:
                if await _becomes_ready(machine.peer):
                    self._tell(f"{machine.address} has joined, with {_workers(workers)}")
                    tasks += [
                        group.create_task(self._watch(machine, workers)),
                        group.create_task(_listen_for_breaks(machine)),
                    ]
                    await pool.use_machine(workers)
                    self._say_goodbye(machine)
            except HeadraceError as error:
                self._tell(f"{machine.address} cannot be used, and was sent away: {error.problem}", warning=True)
                await machine.send_away(JoinRefused(problem=error.problem, remedy=error.remedy))
            finally:
                await machine.send_away(Farewell())
                self._num_here -= 1 + workers.num_workers
                for task in tasks:
                    task.cancel()

    def _say_goodbye(self, machine: JoinedStarter) -> None:
        """Tell the user that a machine has left or was lost."""
        if machine.gone:
            self._tell(f"{machine.address} was lost: what ran there begins again elsewhere", warning=True)
        else:
            self._tell(f"{machine.address} has left")

    async def _watch(self, machine: JoinedStarter, workers: WorkerGroup) -> None:
        """Take the machine's workers out of the pool when it asks to leave, or when no message of it has come for some
        time."""
        quiet_looks = 0
        while quiet_looks < (LAST_LOOKS if machine.broke else QUIET_LOOKS) and not machine.peer.reported.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await machine.peer.leaving.wait()
                    workers.leaving.set()
                    await machine.peer.reported.wait()
            # any message resets the count
            quiet_looks = 0 if machine.peer.was_heard else quiet_looks + 1
            machine.broke &= not machine.peer.was_heard
            machine.peer.was_heard = False
        workers.lose()
        machine.close()

    def _tell(self, text: str, *, warning: bool = False) -> None:
        """Report an event to the user of the run."""
        wall_s = self._clock.now() - self._opened_s
        self._order.on_event(Event(wall_s=wall_s, text=text, level="warning" if warning else "info"))


async def _listen_for_breaks(machine: JoinedStarter) -> None:
    """Note whenever a connection of the machine's channel breaks, until this is cancelled."""
    while True:
        await machine.channel.broken()
        machine.broke, machine.peer.was_heard = True, False


async def _becomes_ready(peer: Peer) -> bool:
    """Wait up to :data:`READY_S` seconds until the machine reports that it is ready, and return whether it does."""
    await asyncio.wait([peer.ready], timeout=READY_S)
    return peer.ready.done() and not peer.ready.cancelled() and peer.ready.exception() is None


def _workers(workers: WorkerGroup) -> str:
    """Return the number of workers in words."""
    return f"{workers.num_workers} worker{'' if workers.num_workers == 1 else 's'}"


def open_files() -> int:
    """Raise this process's limit of open files up to :data:`MOST_FILES` if that is allowed, and return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_FILES
    limit = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit, soft)
