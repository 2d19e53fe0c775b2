"""The controller's representation of a machine that has joined the run: its peer (:class:`MachinePeer`), and the
starter of processes on the machine (:class:`JoinedStarter`)."""

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
from headrace.launch.clients.pool import MachineGone
from headrace.launch.starts import Briefing, EnvironmentStart
from headrace.wings.cluster.far.process import FarProcess, SupervisorLost, SupervisorUnusable, wait_for_answer
from headrace.wings.cluster.far.supervisor import FarExit, NodeQuery, NodeReply, StartOrder, list_required_paths

LAST_S = 1.0
"""Longest wait for a machine's confirmation that it leaves, in seconds."""


class MachinePeer(ForeignPeer):
    """The controller's side of the channel to a joined machine: it sends orders, and matches answers to orders."""

    def __init__(self, *args: Any, **more: Any) -> None:
        """Create the peer with the arguments of its base class."""
        super().__init__(*args, **more)
        self.was_heard = True
        """Whether the machine has sent a heartbeat since the listener's last check."""
        self.leaving = asyncio.Event()
        """Set when the machine requests to leave."""
        self.left = asyncio.Event()
        """Set when the machine confirms that it leaves."""

    async def listen(self) -> None:
        """Receive messages until the machine leaves. A machine that sends a wrong token counts as failed."""
        try:
            await super().listen()
        except RunError:  # the machine has sent a wrong token
            self.reported.set()

    def handle(self, message: object) -> None:
        """Handle one message: a heartbeat, a request to leave, the confirmation of leaving, or an answer to an
        order."""
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
        """Let the order fail that the failure names; a failure without an order is of the whole machine."""
        if message.call is None:
            super()._fail(message)
        else:
            Peer._fail(self, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """The settings with which workers are started on a joined machine."""

    home: str
    """Address of the controller's machine, under which joined machines reach it."""
    start_timeout_s: float
    """Longest time for the start of a worker, in seconds."""
    query: NodeQuery
    """The query that is sent to a machine before a process is started there; its ``paths`` are empty here."""


class JoinedStarter:
    """A starter of workers (:class:`~headrace.launch.child.Starter`) on one joined machine."""

    def __init__(self, peer: MachinePeer, channel: ControllerChannel, address: str, config: MachineConfig) -> None:
        """Create the starter for a machine with the given ``peer`` and ``channel``. ``address`` is the machine's
        address for messages, and ``config`` has the settings with which workers are started."""
        self.peer, self.channel, self.address = peer, channel, address
        self.gone = False
        """Whether the machine has left or was lost."""
        self.broke = False
        """Whether a connection of the machine's channel has broken, and no heartbeat has arrived since."""
        self.host_address = config.home
        self._query, self._timeout_s = config.query, config.start_timeout_s
        self._num_supervisors = 0
        """Number of supervisors that were created on the machine, which is the number of the next one."""

    async def send_away(self, word: Farewell | JoinRefused) -> None:
        """Send the machine the ``word`` that the run has ended or that the machine is refused, wait up to
        :data:`LAST_S` seconds for its confirmation, and close its channel."""
        if self.gone:
            return
        try:
            self.peer.send(word)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self.peer.left.wait()
        finally:  # also if the run is cancelled during the wait, or the machine does not receive the message
            self.close()

    def close(self) -> None:
        """Mark the machine as gone, and close its channel. Pending calls of its supervisors fail."""
        if not self.gone:
            self.gone = True
            self.peer.close()

    async def start(self, site: Rendezvous, spec: ProcessSpec) -> tuple[Peer, Process]:
        """Start the worker that ``spec`` describes on the machine, and return the controller's side of the worker's
        channel and a handle of the process. ``site`` has the run's token. Raises
        :class:`~headrace.launch.clients.pool.MachineGone` if the machine was lost, and another error of the library,
        with the reason, if the worker cannot be started."""
        assert isinstance(spec.start, EnvironmentStart)
        supervisor = _MachineSupervisor(self, self._num_supervisors)
        self._num_supervisors += 1
        try:
            return await self._start_through(supervisor, site, spec, spec.start)
        except BaseException as error:
            supervisor.kill()
            if isinstance(error, SupervisorLost):
                raise MachineGone(str(error)) from None
            if isinstance(error, SupervisorUnusable):
                raise RunError(
                    f"{spec.name} cannot be started on {self.address}: {error}", remedy="look at that machine"
                ) from None
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"{self.address} has not started {spec.name} within {self._timeout_s:g} s",
                    remedy="is that machine overloaded?",
                ) from None
            raise

    async def _start_through(
        self, supervisor: _MachineSupervisor, site: Rendezvous, spec: ProcessSpec, start: EnvironmentStart
    ) -> tuple[Peer, Process]:
        """Start the worker that ``spec`` describes, with the settings ``start``, through ``supervisor``, and return the
        controller's side of the worker's channel and a handle of the process. ``site`` has the run's token."""
        found = await self._query_node(supervisor, start)
        channel = ControllerChannel(site.directory, spec.name, controller.Message, host=self.host_address)
        peer = spec.make_peer(channel)
        try:
            order = StartOrder(
                name=spec.name,
                briefing=Briefing(start=start, addresses=channel.addresses),
                token=site.token,
                num_threads=spec.num_threads,
                log=str(site.logs / f"{spec.name}.log") if found.shared else "",
            )
            pid = await wait_for_answer(supervisor.call("start", msgspec.json.encode(order)), self._timeout_s)
        except BaseException:
            peer.close()
            raise
        return peer, FarProcess(supervisor, pid, self.address, kept=start.keep is not None)

    async def _query_node(self, supervisor: _MachineSupervisor, start: EnvironmentStart) -> NodeReply:
        """Return the machine's reply to the query about the environment's paths and the run directory. Raises
        :class:`~headrace.base.errors.ConfigError` if the machine lacks one of the paths."""
        query = msgspec.structs.replace(self._query, paths=list_required_paths(start))
        found = msgspec.json.decode(
            await wait_for_answer(supervisor.call("describe_node", msgspec.json.encode(query)), self._timeout_s),
            type=NodeReply,
        )
        for path in found.missing.values():
            raise ConfigError(
                f"{path!r}, which the environment needs, is not on {self.address}",
                remedy="put it there under the same path, or say where it is: headrace join --entry FILE.py:NAME",
            )
        return found


class _MachineSupervisor:
    """A handle of one supervisor on a joined machine, with the interface of
    :class:`~headrace.wings.cluster.far.process.SupervisorHandle`."""

    def __init__(self, machine: JoinedStarter, number: int) -> None:
        """Create a handle of the supervisor with this ``number``, which the machine creates at the first call."""
        self._machine, self._number = machine, number

    def call(self, method: Any, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the supervisor on its machine, and return a future of the result. The future fails with
        :class:`SupervisorLost` if the machine is gone, and with :class:`SupervisorUnusable` if the machine answers with
        an error or with a value of another type."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._machine.gone:
            answer.set_exception(SupervisorLost(_LOST))
            return answer
        peer = self._machine.peer
        call = peer.next_call()

        def settle(done: asyncio.Future[Done]) -> None:
            """Set the future to the machine's answer or error."""
            if answer.done():
                return
            if done.cancelled():
                answer.set_exception(SupervisorLost(_LOST))
            elif error := done.exception():
                answer.set_exception(SupervisorUnusable(str(error)))
            elif not _has_result_type(method, done.result().answer):
                answer.set_exception(SupervisorUnusable(f"its machine answers {method!r} with something else"))
            else:
                answer.set_result(done.result().answer)
                return
            answer.exception()  # marks the error as retrieved, since the caller may have been cancelled

        peer.expect(call, Done).add_done_callback(settle)
        peer.send(Do(call=call, supervisor=self._number, method=method, argument=arguments[0] if arguments else b""))
        return answer

    def kill(self) -> None:
        """Send the machine the order to end the supervisor and its process, unless the machine is gone."""
        if not self._machine.gone:
            self._machine.peer.send(Drop(supervisor=self._number))


_LOST = "was lost with its machine"


def _has_result_type(method: str, answer: bytes | int | float) -> bool:
    """Return whether ``answer`` has the type that the supervisor's ``method`` returns. Answers of a joined machine are
    checked because they are not trusted."""
    try:
        match method:
            case "describe_node":
                msgspec.json.decode(msgspec.convert(answer, bytes), type=NodeReply)
            case "wait_until_ended":
                msgspec.json.decode(msgspec.convert(answer, bytes), type=FarExit)
            case "halt_reason":
                msgspec.convert(answer, bytes)
            case _:
                msgspec.convert(answer, int if method == "start" else float)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
