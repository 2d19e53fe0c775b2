"""The program ``headrace join``: a machine that offers a run workers for its environments.

It starts the processes that the run orders, each with a supervisor as on a cluster (far/supervisor.py), and reports how
they ended. When the run ends, or the connection to it breaks, all processes that it has started end too.
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
from headrace.wings.cluster.far.supervisor import Begin, ProcessSupervisor
from headrace.wings.cluster.joining.invitation import Invitation, read_invitation

ANSWER_S = 10.0
"""Longest wait for the answer to a request to join, in seconds."""
RETRY_S = 2.0
"""Seconds between two attempts to find a run that does not answer."""
WAIT_S = 0.5
"""Longest wait for orders at a time, in seconds."""
ALIVE_S = 1.0
"""Seconds between two heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The offer of this machine to a run, from the options of ``headrace join``."""

    workers: int
    """Largest number of worker processes on this machine."""
    entry: str = ""
    """Where this machine has the environment, ``FILE.py:NAME`` or a command; empty: where the run names it."""
    wait_s: float = 0.0
    """Seconds for which this machine tries to reach a run that admits it; 0: it tries once."""


class RunUnreachable(DeadlineError):
    """The error that no run answers at the address of an invitation."""


def join(path: Path, offer: Offer, say: Callable[[str], None]) -> None:
    """Work for the run whose invitation is at ``path`` until the run ends, or until a signal asks to leave. ``say`` is
    called with lines for the user.

    Raises :class:`~headrace.base.errors.DataError` if there is no invitation, :class:`RunUnreachable` if no run
    answers, and :class:`~headrace.base.errors.RunError` if the run refuses this machine, or if the connection breaks.
    """
    asyncio.run(_join(path, offer, say))


async def _join(path: Path, offer: Offer, say: Callable[[str], None]) -> None:
    """Join the run and serve it until it ends. If no run can be reached, try again until ``offer.wait_s`` has
    passed."""
    clock, is_reported = RealClock(), False
    until_s = clock.now() + offer.wait_s
    while True:
        try:
            invitation = read_invitation(path)  # read again each time: a run that starts again writes a new one
            await _serve(invitation, await _request_to_join(invitation, offer), say)
            return
        except (RunUnreachable, DataError) as error:
            if clock.now() + RETRY_S > until_s:
                raise
            if not is_reported:
                say(f"waiting for the run: {error.problem}")
                is_reported = True
        await asyncio.sleep(RETRY_S)


async def _request_to_join(invitation: Invitation, offer: Offer) -> Welcome:
    """Send the request to join, and return the run's welcome, which has the addresses of a channel. Raises
    :class:`RunUnreachable` if no run answers, and :class:`~headrace.base.errors.RunError` if it refuses this
    machine."""
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
            async with asyncio.timeout(ANSWER_S):  # sending waits too, where the connection has ended
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
    """Decode a message of the run. Raises :class:`~headrace.base.errors.RunError` if it is not one."""
    try:
        return codec.decode(data)
    except msgspec.DecodeError as error:
        raise RunError(
            f"the run's answer is none: {error}", remedy="install the same version of headrace everywhere"
        ) from None


def _absolute_entry(entry: str) -> str:
    """Return ``entry`` with an absolute path if it is a ``file.py:name`` in the current directory. Other entries are
    commands, or names of a bridge."""
    path, colon, name = entry.rpartition(":")
    return f"{Path(path).absolute()}:{name}" if colon and Path(path).is_file() else entry


def _own_address(invitation: Invitation) -> str:
    """Return the address of this machine on its route to the run. Raises :class:`RunUnreachable` if there is no
    route."""
    host, port = host_and_port(invitation.address)
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name
        raise RunUnreachable(
            f"no way leads from this machine to {invitation.address}: {error}",
            remedy="is launch.join an address by which this machine reaches that one?",
        ) from None


async def _serve(invitation: Invitation, welcome: Welcome, say: Callable[[str], None]) -> None:
    """Serve the run: carry out its orders until it ends, a signal arrives or the connection breaks; then end all
    processes that were started here. Raises :class:`~headrace.base.errors.RunError` if the connection breaks or the run
    sends this machine away."""
    loop = asyncio.get_running_loop()
    receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orders")
    ended: asyncio.Future[None] = loop.create_future()
    ends = ChannelAddresses(orders=welcome.orders, reports=welcome.reports, key=welcome.key)
    on_broken = partial(loop.call_soon_threadsafe, _give_up, ended, _BROKEN)
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
    """Receive the run's orders in a thread, and let the dispatcher carry them out, until this machine's part in the run
    ends."""
    loop = asyncio.get_running_loop()
    while not dispatcher.ended.done():
        try:
            messages = await loop.run_in_executor(receiver, dispatcher.channel.receive, WAIT_S)
        except msgspec.DecodeError as error:
            words = f"the run says something that is not a message: {error}"
            _give_up(dispatcher.ended, RunError(words, remedy="use one version of headrace"))
            return
        for message in messages:
            dispatcher.handle(message)


async def _send_heartbeats(dispatcher: _NodeDispatcher) -> None:
    """Send a sign of life to the run every :data:`ALIVE_S` seconds, until this is cancelled."""
    while True:
        dispatcher.send(Alive())
        await asyncio.sleep(ALIVE_S)


def _give_up(ended: asyncio.Future[None], error: RunError) -> None:
    """End this machine's part in the run with ``error``, unless it has ended."""
    if not ended.done():
        ended.set_exception(error)


_BROKEN = RunError(
    "the connection to the run is broken: what ran here has ended",
    remedy="look at the run; if it is still running, join again",
)


@dataclass(slots=True, kw_only=True)
class _NodeDispatcher:
    """The object that carries out the orders of the run on this machine, with the supervisors of the processes that run
    here."""

    channel: PartChannel
    """The channel to the run."""
    address: str
    """The address of this machine, as the run reaches it."""
    ended: asyncio.Future[None]
    """A future that is done when this machine's part in the run has ended; it holds the error, if there is one."""
    say: Callable[[str], None]
    """The function that shows a line to the user."""
    tasks: asyncio.TaskGroup
    """The tasks that carry out orders."""
    supervisors: dict[int, ProcessSupervisor] = field(default_factory=dict)
    """The supervisors by the numbers that the run gives them."""
    watched: set[int] = field(default_factory=set)
    """Numbers of the supervisors of which the run waits for the end of their process."""
    asked_to_leave: bool = False
    """Whether the user has asked to leave the run."""

    def send(self, message: object) -> None:
        """Send ``message`` to the run; it is dropped if the run cannot be reached."""
        with contextlib.suppress(zmq.Again):
            self.channel.send(message)

    def handle(self, message: node.Message) -> None:
        """Carry out one message of the run: call a method of a supervisor, end one, or end this machine's part in the
        run."""
        match message:
            case Do():
                self.tasks.create_task(self._do(message))
            case Drop():
                self.tasks.create_task(self._drop(message.supervisor))
            case JoinRefused():
                self.send(Left())
                words = f"the run sends this machine away: {message.problem}"
                _give_up(self.ended, RunError(words, remedy=message.remedy))
            case Farewell() if not self.ended.done():
                self.send(Left())
                self.say("left: what ran here has ended" if self.asked_to_leave else "the run has ended")
                self.ended.set_result(None)

    def leave(self) -> None:
        """Ask the run to let the episodes here end and then let this machine go; called a second time, leave at once.
        This handles Ctrl-C."""
        if not self.asked_to_leave:
            self.asked_to_leave = True
            self.say("leaving, when the episodes that run here have ended; Ctrl-C again: at once")
            self.send(Leaving())
        elif not self.ended.done():
            self.ended.set_result(None)

    async def drop_all(self) -> None:
        """End all processes that were started here."""
        await asyncio.gather(*(self._drop(number) for number in self.supervisors))

    async def _do(self, order: Do) -> None:
        """Call the method of a supervisor that one order names, and send its result or its error. A supervisor that is
        not known yet is made."""
        answer: bytes | int | float = b""
        try:
            supervisor = self.supervisors.get(order.supervisor) or ProcessSupervisor(self.address)
            self.supervisors[order.supervisor] = supervisor
            match order.what:
                case "look":
                    answer = supervisor.look(order.asked)
                case "begin":
                    answer = await supervisor.begin(_checked_start(order.asked))
                case "computed_s":
                    answer = await supervisor.computed_s()
                case "halted":
                    answer = await supervisor.halted()
                case "ended":
                    self.watched.add(order.supervisor)
                    answer = await supervisor.ended()
                    self._forget(order.supervisor)
        except (OSError, RunError, msgspec.DecodeError) as error:
            self.send(Failure(call=order.call, kind="RunError", problem=str(error), remedy="look at that machine"))
        else:
            self.send(Done(call=order.call, answer=answer))

    async def _drop(self, number: int) -> None:
        """End the process of a supervisor, which is then forgotten unless the run waits for its end."""
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


def _checked_start(order: bytes) -> bytes:
    """Return the order to start a process as it is. Raises :class:`~headrace.base.errors.RunError` if it would start
    anything but an environment, since a machine that joins runs only these."""
    begin = msgspec.json.decode(order, type=Begin)
    if not isinstance(begin.briefing.start, EnvironmentStart):
        what = type(begin.briefing.start).__name__
        raise RunError(f"the run wants to start {what} here", remedy="only environments run here")
    return order
