"""The program ``headrace join``, with which a machine offers workers to a run for its environments.

The program starts a process for every order of the run, each with a supervisor as on a cluster (far/supervisor.py), and
reports how each process ends. When the run ends, or the connection to the run breaks, the program ends all processes
that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from headrace.base import __version__
from headrace.base.clock import RealClock
from headrace.base.config.addresses import host_and_port
from headrace.base.errors import DataError, DeadlineError, RunError
from headrace.base.types.messages import node
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Alive, Done, Failure, Leaving, Left, Ready
from headrace.base.types.messages.node import Do, Drop, Farewell, JoinAnswer, JoinRefused, JoinRequest, Welcome
from headrace.launch.channel import ChannelAddresses, PartChannel, present_key
from headrace.launch.starts import EnvironmentStart
from headrace.wings.cluster.far.supervisor import ProcessSupervisor, StartOrder
from headrace.wings.cluster.joining.invitation import Invitation, read_invitation

ANSWER_S = 10.0
"""Longest wait for the answer to a request to join, in seconds."""
RETRY_S = 2.0
"""Seconds between two attempts to join a run that does not answer."""
WAIT_S = 0.5
"""Longest duration of one wait for orders, in seconds."""
ALIVE_S = 1.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The offer of this machine to a run, from the options of ``headrace join``."""

    workers: int
    """Largest number of worker processes on this machine."""
    entry: str = ""
    """The environment's entry on this machine, ``FILE.py:NAME`` or a command; empty: the entry that the run names."""
    wait_s: float = 0.0
    """Seconds for which this machine repeats its request until a run answers; 0: it sends the request once."""


class RunUnreachable(DeadlineError):
    """The error for an invitation at whose address no run answers."""


def join(path: Path, offer: Offer, say: Callable[[str], None]) -> None:
    """Join the run whose invitation is at ``path``, and serve it until the run ends or a signal requests to leave.
    ``offer`` is what this machine offers. ``say`` is called with lines for the user.

    Raises :class:`~headrace.base.errors.DataError` if there is no valid invitation, :class:`RunUnreachable` if no run
    answers, and :class:`~headrace.base.errors.RunError` if the run refuses this machine, or if the connection breaks.
    """
    asyncio.run(_join_and_serve(path, offer, say))


async def _join_and_serve(path: Path, offer: Offer, say: Callable[[str], None]) -> None:
    """Join the run whose invitation is at ``path``, and serve it until it ends. If no run can be reached, try again
    until ``offer.wait_s`` has passed. ``say`` is called with lines for the user."""
    clock, is_reported = RealClock(), False
    until_s = clock.now() + offer.wait_s
    while True:
        try:
            invitation = read_invitation(path)  # read for each attempt: a restarted run writes a new invitation
            await _serve_run(invitation, await _request_to_join(invitation, offer), say)
            return
        except (RunUnreachable, DataError) as error:
            if clock.now() + RETRY_S > until_s:
                raise
            if not is_reported:
                say(f"waiting for the run: {error.problem}")
                is_reported = True
        await asyncio.sleep(RETRY_S)


async def _request_to_join(invitation: Invitation, offer: Offer) -> Welcome:
    """Send the ``offer`` to the run of ``invitation`` as a request to join, and return the run's welcome, which
    contains the addresses of a channel. Raises :class:`RunUnreachable` if no run answers, and
    :class:`~headrace.base.errors.RunError` if the run refuses this machine."""
    request = JoinRequest(
        token=invitation.token,
        headrace=__version__,
        address=_own_address(invitation),
        workers=offer.workers,
        entry=_absolute_entry(offer.entry),
    )
    codec = MessageCodec(JoinAnswer)
    address = f"tcp://{invitation.address}"
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        try:
            present_key(line, address, invitation.key)
        except zmq.ZMQError:
            raise DataError("the key in the invitation is none", remedy="copy the whole file again") from None
        line.connect(address)
        try:
            async with asyncio.timeout(ANSWER_S):  # sending waits too if the connection has ended
                await line.send(codec.encode(request))
                data = await line.recv()
        except TimeoutError:
            raise RunUnreachable(
                f"nobody answers at {invitation.address} for {ANSWER_S:g} s: no run admits machines there, or "
                "it has another key than this invitation",
                remedy="is the run still running, is this its newest invitation, and may this machine open TCP "
                "connections to that one?",
            ) from None
        answer = _decode(codec, data)
    if isinstance(answer, JoinRefused):
        raise RunError(f"the run refuses this machine: {answer.problem}", remedy=answer.remedy)
    assert isinstance(answer, Welcome)
    return answer


def _decode(codec: MessageCodec, data: bytes) -> object:
    """Return the decoded message of the run. Raises :class:`~headrace.base.errors.RunError` if ``data`` is not a
    message of this version."""
    try:
        return codec.decode(data)
    except msgspec.DecodeError as error:
        raise RunError(
            f"the run's answer is none: {error}", remedy="install the same version of headrace everywhere"
        ) from None


def _absolute_entry(entry: str) -> str:
    """Return ``entry`` with an absolute path if it is ``file.py:name`` with an existing file. Return other entries,
    which are commands or names of a bridge, unchanged."""
    path, colon, name = entry.rpartition(":")
    return f"{Path(path).absolute()}:{name}" if colon and Path(path).is_file() else entry


def _own_address(invitation: Invitation) -> str:
    """Return the address of this machine from which it connects to the run. Raises :class:`RunUnreachable` if there is
    no route to the run."""
    host, port = host_and_port(invitation.address)
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
        raise RunUnreachable(
            f"no way leads from this machine to {invitation.address}: {error}",
            remedy="is launch.join an address by which this machine reaches that one?",
        ) from None


async def _serve_run(invitation: Invitation, welcome: Welcome, say: Callable[[str], None]) -> None:
    """Execute the orders of the run of ``invitation`` until the run ends, a signal arrives or the connection breaks;
    then end all processes that were started here. Raises :class:`~headrace.base.errors.RunError` if the connection
    breaks or the run refuses this machine. ``welcome`` is the run's answer to the request to join, and ``say`` is
    called with lines for the user."""
    loop = asyncio.get_running_loop()
    receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orders")
    ended: asyncio.Future[None] = loop.create_future()
    ends = ChannelAddresses(orders=welcome.orders, reports=welcome.reports, key=welcome.key)
    on_broken = partial(loop.call_soon_threadsafe, _end_with_error, ended, _BROKEN)
    channel = await asyncio.to_thread(PartChannel, ends, node.Message, on_broken)
    try:
        async with asyncio.TaskGroup() as tasks:
            dispatcher = _NodeDispatcher(
                channel=channel, address=_own_address(invitation), ended=ended, say=say, tasks=tasks
            )  # fmt: skip
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, dispatcher.leave)
            dispatcher.send(Ready(token=welcome.token, pid=os.getpid(), facts={}))
            say(f"joined the run at {invitation.address}; Ctrl-C leaves it")
            receiving, heartbeats = (
                tasks.create_task(_receive_orders(dispatcher, receiver)),
                tasks.create_task(_send_heartbeats(dispatcher)),
            )
            await asyncio.wait([ended])
            heartbeats.cancel()
            await asyncio.wait([receiving])  # no socket is closed while another thread reads it
            await dispatcher.drop_all()
        ended.result()
    finally:
        await asyncio.to_thread(channel.close)  # waits until the last messages are sent
        receiver.shutdown()


async def _receive_orders(dispatcher: _NodeDispatcher, receiver: ThreadPoolExecutor) -> None:
    """Receive the run's messages in a thread, and pass them to the dispatcher, until ``dispatcher.ended`` is done. A
    message that cannot be decoded ends the service with an error."""
    loop = asyncio.get_running_loop()
    while not dispatcher.ended.done():
        try:
            messages = await loop.run_in_executor(receiver, dispatcher.channel.receive, WAIT_S)
        except msgspec.DecodeError as error:
            words = f"the run says something that is not a message: {error}"
            _end_with_error(dispatcher.ended, RunError(words, remedy="use one version of headrace"))
            return
        for message in messages:
            dispatcher.handle(message)


async def _send_heartbeats(dispatcher: _NodeDispatcher) -> None:
    """Send a heartbeat to the run every :data:`ALIVE_S` seconds, until this task is cancelled."""
    while True:
        dispatcher.send(Alive())
        await asyncio.sleep(ALIVE_S)


def _end_with_error(ended: asyncio.Future[None], error: RunError) -> None:
    """Set the future ``ended`` to ``error``, which ends the service of the run; do nothing if it is already done."""
    if not ended.done():
        ended.set_exception(error)


_BROKEN = RunError(
    "the connection to the run is broken: what ran here has ended",
    remedy="look at the run; if it is still running, join again",
)


@dataclass(slots=True, kw_only=True)
class _NodeDispatcher:
    """The dispatcher of the run's orders on this machine. It owns the supervisors of the processes that run here."""

    channel: PartChannel
    """The channel to the run."""
    address: str
    """The address of this machine, under which the run reaches it."""
    ended: asyncio.Future[None]
    """A future that is done when this machine's service of the run has ended, with the error if there is one."""
    say: Callable[[str], None]
    """A function that prints a line for the user."""
    tasks: asyncio.TaskGroup
    """The task group in which orders are executed."""
    supervisors: dict[int, ProcessSupervisor] = field(default_factory=dict)
    """The supervisors, by the numbers that the run assigns to them."""
    watched: set[int] = field(default_factory=set)
    """Numbers of the supervisors for which a call of ``wait_until_ended`` is pending."""
    asked_to_leave: bool = False
    """Whether the user has requested to leave the run."""

    def send(self, message: object) -> None:
        """Send ``message`` to the run; the message is dropped if the run cannot be reached."""
        with contextlib.suppress(zmq.Again):
            self.channel.send(message)

    def handle(self, message: node.Message) -> None:
        """Handle one message of the run: call a method of a supervisor, end a supervisor, or end the service of the
        run."""
        match message:
            case Do():
                self.tasks.create_task(self._carry_out(message))
            case Drop():
                self.tasks.create_task(self._drop(message.supervisor))
            case JoinRefused():
                self.send(Left())
                words = f"the run sends this machine away: {message.problem}"
                _end_with_error(self.ended, RunError(words, remedy=message.remedy))
            case Farewell() if not self.ended.done():
                self.send(Left())
                self.say("left: what ran here has ended" if self.asked_to_leave else "the run has ended")
                self.ended.set_result(None)

    def leave(self) -> None:
        """Handle Ctrl-C: request to leave the run when the episodes that run here have ended. A second call ends the
        service immediately."""
        if not self.asked_to_leave:
            self.asked_to_leave = True
            self.say("leaving, when the episodes that run here have ended; Ctrl-C again: at once")
            self.send(Leaving())
        elif not self.ended.done():
            self.ended.set_result(None)

    async def drop_all(self) -> None:
        """End all processes that were started here."""
        await asyncio.gather(*(self._drop(number) for number in self.supervisors))

    async def _carry_out(self, order: Do) -> None:
        """Call the method that ``order`` names of a supervisor of this machine, and send the result or the error to the
        run. A supervisor is created at its first order, and removed when its process has ended."""
        answer: bytes | int | float = b""
        try:
            supervisor = self.supervisors.get(order.supervisor) or ProcessSupervisor(self.address)
            self.supervisors[order.supervisor] = supervisor
            match order.method:
                case "describe_node":
                    answer = supervisor.describe_node(order.argument)
                case "start":
                    answer = await supervisor.start(_require_environment(order.argument))
                case "computed_s":
                    answer = await supervisor.computed_s()
                case "halt_reason":
                    answer = await supervisor.halt_reason()
                case "wait_until_ended":
                    self.watched.add(order.supervisor)
                    answer = await supervisor.wait_until_ended()
                    self._forget(order.supervisor)
        except (OSError, RunError, msgspec.DecodeError) as error:
            self.send(Failure(call=order.call, kind="RunError", problem=str(error), remedy="look at that machine"))
        else:
            self.send(Done(call=order.call, answer=answer))

    async def _drop(self, number: int) -> None:
        """End the process of a supervisor, and remove the supervisor unless a call of its ``wait_until_ended`` is
        pending."""
        supervisor = self.supervisors.get(number)
        if supervisor is None:
            return
        await supervisor.drop()
        if number not in self.watched:
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Remove a supervisor whose process has ended."""
        self.watched.discard(number)
        self.supervisors.pop(number, None)


def _require_environment(order: bytes) -> bytes:
    """Return the encoded :class:`StartOrder` ``order`` unchanged. Raises :class:`~headrace.base.errors.RunError` if it
    would start anything other than an environment, since joined machines run only environments."""
    start = msgspec.json.decode(order, type=StartOrder)
    if not isinstance(start.briefing.start, EnvironmentStart):
        what = type(start.briefing.start).__name__
        raise RunError(f"the run wants to start {what} here", remedy="only environments run here")
    return order
