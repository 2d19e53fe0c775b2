"""The controller's listener for machines that join a run, and the service of each machine from its admission to its
departure.

headrace join ─JoinRequest▶ listener       at the address in the invitation
              ◀──Welcome───                addresses and key of a channel for this machine
              ──Ready─────▶ machine        then orders, answers and heartbeats, as with every part of a run
              ◀──Do────────                start a worker, report how it ended
its worker    ──Ready─────▶ environment-n  a worker as on the controller's machine, with its own channel

A worker is a process that runs episodes of the environment.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from headrace.base import __version__
from headrace.base.clock import RealClock
from headrace.base.config.addresses import host_and_port
from headrace.base.environ import raise_file_limit
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
"""Longest time in seconds from the admission of a machine until it reports that it is ready."""
LOOK_S = 1.0
"""Seconds between two checks whether a machine has sent a heartbeat."""
QUIET_LOOKS = 15
"""Number of checks without a heartbeat after which a machine counts as lost."""
LAST_LOOKS = 3
"""Number of checks without a heartbeat after which a machine counts as lost if a connection of its channel has broken.
The machine does not count as lost at once, because the broken connection may not be needed."""
MAX_REQUEST_BYTES = 1 << 16
"""Largest size of a request to join, in bytes."""
MAX_WORKERS = 1024
"""Largest number of workers of one machine."""
FILES = 16
"""Number of open files that this process needs for each machine and each worker on it, mostly for sockets."""
MOST_FILES = 1 << 16
"""Largest limit of open files that this process sets for itself, if the system allows it."""

StartWorker = Callable[[EnvironmentStart, Starter], Awaitable[Child]]
"""A function that starts a worker with the given settings, through the given starter of its machine."""


@asynccontextmanager
async def listen_for_machines(order: LaunchOrder, site: Rendezvous) -> AsyncIterator[JoinListener]:
    """Listen for requests to join the run of ``order`` while the body runs, and write an invitation into the run
    directory. ``site`` has the run's token. Yield the listener."""
    with closing(JoinListener(order, site)) as listener:
        yield listener


class JoinListener:
    """The listener of a run that admits machines; :func:`listen_for_machines` creates it."""

    def __init__(self, order: LaunchOrder, site: Rendezvous) -> None:
        """Open the listener's socket at ``launch.join`` (``HOST:PORT``), and write the invitation into the run
        directory of ``order``. ``site`` contains the run's token, which an admitted machine receives, and the directory
        of the run's channels. Raises :class:`~headrace.base.errors.ConfigError` if the socket cannot be bound."""
        self._order, self._site = order, site
        self._clock = RealClock()
        self._opened_s = self._clock.now()
        """Time at which the listener was created, in seconds on its clock."""
        self._codec = MessageCodec(JoinRequest)
        """The codec of requests to join."""
        self._token = secrets.token_hex(32)
        """The secret in the invitation, with which a request to join authenticates itself. It is not the run's
        token."""
        self._num_machines = 0
        """Number of machines admitted so far, including machines that have left; it is the number of the next
        machine."""
        self._num_processes_elsewhere = 0
        """Number of admitted machines that have not left, plus the number of workers that they offer."""
        self._most_files = raise_file_limit(MOST_FILES)
        """The largest number of files that this process may open at the same time."""
        launch = order.launch
        self._host = host_and_port(launch.join)[0]
        """The host in ``launch.join``. The channel of each machine is opened at this address, on its own ports."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        """The socket on which machines request to join."""
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
        """Path of the invitation in the run directory."""
        self._mark = order.run_dir / f".seen-{secrets.token_hex(8)}"
        """An empty file. A machine on which it exists at the same path shares the run directory with this machine."""
        self._mark.touch()
        write_invitation(self._invitation, Invitation(address=launch.join, key=key, token=self._token))

    def close(self) -> None:
        """Stop listening, and delete the invitation. Joined machines are not notified here, but when :meth:`admit` is
        cancelled."""
        self._invitation.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)
        self._context.destroy(0)

    async def admit(self, pool: EnvPool, start: EnvironmentStart, start_worker: StartWorker) -> None:
        """Answer requests to join, and add the workers of admitted machines to ``pool``, until this task is cancelled.
        ``start`` contains the settings of a worker, and ``start_worker`` starts a worker on a given machine."""
        async with asyncio.TaskGroup() as visits:
            while True:
                sender, data = await self._receive_request()
                request = self._checked_request(data)
                if isinstance(request, JoinRefused):
                    await self._answer(sender, request)
                    continue
                machine = self._make_starter(request)
                ends = machine.channel.addresses
                await self._answer(
                    sender, Welcome(orders=ends.orders, reports=ends.reports, key=ends.key, token=self._site.token)
                )
                # the environment may have another path on that machine
                theirs = msgspec.structs.replace(start, entry=request.entry or start.entry)
                workers = WorkerGroup(partial(start_worker, theirs, machine), request.workers)
                self._num_processes_elsewhere += 1 + request.workers
                visits.create_task(self._serve_machine(machine, workers, pool))

    async def _receive_request(self) -> tuple[bytes, bytes]:
        """Wait for a request to join, and return (id of the sender, encoded request). Messages with another number of
        frames are ignored."""
        while True:
            frames: list[bytes] = await self._socket.recv_multipart()
            if len(frames) == 2:
                return frames[0], frames[1]

    async def _answer(self, sender: bytes, answer: Welcome | JoinRefused) -> None:
        """Send the answer to the machine with the id ``sender``; nothing is sent if the machine has disconnected."""
        with suppress(zmq.ZMQError):  # the machine has disconnected
            await self._socket.send_multipart([sender, self._codec.encode(answer)], zmq.NOBLOCK)

    def _checked_request(self, data: bytes) -> JoinRequest | JoinRefused:
        """Return the decoded request ``data`` if its machine can be admitted; otherwise return the refusal to send."""
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
        if self._num_processes_elsewhere + 1 + request.workers > most_here:
            return JoinRefused(
                problem=f"with its {request.workers} workers the run would have more machines and workers elsewhere "
                f"than the {most_here} for which it may open files",
                remedy="offer fewer, or raise the limit of open files where the run is started (ulimit -n)",
            )
        return request

    def _make_starter(self, request: JoinRequest) -> JoinedStarter:
        """Return the starter of processes on the machine that has sent ``request``, with a new name and a new
        channel."""
        name = f"node-{self._num_machines}"
        self._num_machines += 1
        channel = ControllerChannel(self._site.directory, name, controller.Message, host=self._host)
        peer = MachinePeer(name, channel, token=self._site.token, on_spans=self._site.on_spans)
        query = NodeQuery(paths={}, run_dir=str(self._order.run_dir), mark=self._mark.name)
        address = request.address[:64].encode("ascii", "replace").decode()
        config = MachineConfig(home=self._host, start_timeout_s=self._order.launch.start_timeout_s, query=query)
        return JoinedStarter(peer, channel, address, config)

    async def _serve_machine(self, machine: JoinedStarter, workers: WorkerGroup, pool: EnvPool) -> None:
        """Serve one machine from its admission to its departure; in this time its workers belong to ``pool``. After an
        error of the machine, the machine is refused, and the run continues."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(machine.peer.listen())]
            try:
                if await _becomes_ready(machine.peer):
                    self._report_event(f"{machine.address} has joined, with {_workers_words(workers)}")
                    tasks += [
                        group.create_task(self._watch_machine(machine, workers)),
                        group.create_task(_listen_for_breaks(machine)),
                    ]
                    await pool.use_machine(workers)
                    self._report_departure(machine)
            except HeadraceError as error:
                self._report_event(
                    f"{machine.address} cannot be used, and was sent away: {error.problem}", warning=True
                )
                await machine.send_away(JoinRefused(problem=error.problem, remedy=error.remedy))
            finally:
                await machine.send_away(Farewell())
                self._num_processes_elsewhere -= 1 + workers.num_workers
                for task in tasks:
                    task.cancel()

    def _report_departure(self, machine: JoinedStarter) -> None:
        """Report to the user that a machine has left or was lost."""
        if machine.gone:
            self._report_event(f"{machine.address} was lost: what ran there begins again elsewhere", warning=True)
        else:
            self._report_event(f"{machine.address} has left")

    async def _watch_machine(self, machine: JoinedStarter, workers: WorkerGroup) -> None:
        """Remove the machine's workers from the pool when the machine requests to leave, or when it has sent no
        heartbeat for :data:`QUIET_LOOKS` checks (:data:`LAST_LOOKS` after a broken connection)."""
        quiet_looks = 0
        while quiet_looks < (LAST_LOOKS if machine.broke else QUIET_LOOKS) and not machine.peer.reported.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await machine.peer.leaving.wait()
                    workers.leaving.set()
                    await machine.peer.reported.wait()
            # a heartbeat resets the count
            quiet_looks = 0 if machine.peer.was_heard else quiet_looks + 1
            machine.broke &= not machine.peer.was_heard
            machine.peer.was_heard = False
        workers.lose()
        machine.close()

    def _report_event(self, text: str, *, warning: bool = False) -> None:
        """Report an event to the user of the run."""
        wall_s = self._clock.now() - self._opened_s
        self._order.on_event(Event(wall_s=wall_s, text=text, level="warning" if warning else "info"))


async def _listen_for_breaks(machine: JoinedStarter) -> None:
    """Set ``machine.broke`` whenever a connection of the machine's channel breaks, until this task is cancelled."""
    while True:
        await machine.channel.wait_for_break()
        machine.broke, machine.peer.was_heard = True, False


async def _becomes_ready(peer: Peer) -> bool:
    """Wait up to :data:`READY_S` seconds until the machine reports that it is ready, and return whether it does."""
    await asyncio.wait([peer.ready], timeout=READY_S)
    return peer.ready.done() and not peer.ready.cancelled() and peer.ready.exception() is None


def _workers_words(workers: WorkerGroup) -> str:
    """Return the number of workers in words."""
    return f"{workers.num_workers} worker{'' if workers.num_workers == 1 else 's'}"
