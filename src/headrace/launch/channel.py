"""Messages between the controller and its parts: pyzmq, two one-way sockets per part, so that a part may send from any
of its threads while its main thread waits for orders.

    on this machine    sockets of a directory that only this user can enter. Who receives binds, who sends connects: a
                       socket that connects holds its messages until the other end is there.
    between machines   TCP under CURVE (encrypted; both ends prove who they are). The controller binds, with a key made
                       for this one part: who has not been told the key is not even answered. A connection that breaks
                       is not made again, for what was on its way would be missing unnoticed: the part ends.
    carried over       the same from socket to socket of a directory, where something else carries the bytes from one
                       machine to the other (joining/relay.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from headrace.base.clock import RealClock
from headrace.base.errors import RunError
from headrace.base.types.messages.codec import MessageCodec

MAX_AT_ONCE = 256
"""Messages that are taken before others have their turn."""
MAX_QUEUED = 100_000
"""Messages that may wait in one direction; more means that the reader has stopped reading."""
MAX_BYTES = 1 << 30
"""Of one message between machines: what claims to be longer is refused before there is room made for it."""
CONNECT_S = 20.0
"""How long a part tries to reach a controller on another machine."""
HEARTBEAT_S = 5
"""How often each end of a connection between machines shows that it is there."""
SILENCE_S = 60
"""A connection between machines on which nothing was heard for so long is broken."""
TOLD_S = 2
"""How long a message waits for a connection that may be broken."""
_BROKEN = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)  # fmt: skip
_WATCHED = _BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two sockets of one part are."""

    orders: str
    """To the part."""
    reports: str
    """From it."""
    key: str = ""
    """Between machines: the controller's, which nobody else is told. Empty: both are on this machine."""


def ends_in(directory: Path, part: str) -> Ends:
    """Of a part on this machine."""
    return Ends(orders=f"ipc://{directory / part}.orders", reports=f"ipc://{directory / part}.reports")


class PartChannel:
    """A part's end: blocking, for a plain loop. Where the controller is on another machine and cannot be reached,
    :class:`~headrace.base.errors.RunError`."""

    def __init__(self, ends: Ends, receives: Any, on_broken: Callable[[], object] | None = None) -> None:
        """``on_broken`` is called, in another thread, where a connection to another machine breaks, and :meth:`send`
        raises ``zmq.Again`` from then on; unset: this process ends at once, with whatever it has started."""
        self._codec = MessageCodec(receives)
        self._context = zmq.Context()
        self._orders = _socket(self._context, zmq.PULL)
        self._reports = _socket(self._context, zmq.PUSH)
        self._far = _Connections(ends, self._orders, self._reports, on_broken) if ends.key else None
        self._sending = threading.Lock()
        if on_broken is not None:
            self._reports.setsockopt(zmq.SNDTIMEO, TOLD_S * 1000)
        if self._far is None:
            self._orders.bind(ends.orders)
            self._reports.connect(ends.reports)
            return
        try:
            self._far.meet()
        except RunError:
            self._context.destroy(0)
            raise

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is there, or comes within ``timeout_s``."""
        return bool(self._orders.poll(timeout_s * 1000))

    def receive(self, timeout_s: float) -> list[Any]:
        """Every message that is there; waits up to ``timeout_s`` for the first."""
        messages: list[Any] = []
        if not self.wait(timeout_s):
            return messages
        while True:
            try:
                messages.append(self._codec.decode(self._orders.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: Any) -> None:
        """Send ``message``; any thread may."""
        data = self._codec.encode(message)
        with self._sending:
            self._reports.send(data)

    def close(self) -> None:
        """Send what is queued and close."""
        if self._far is not None:
            self._far.forget()
        self._orders.close(0)
        self._reports.close(2000)
        self._context.term()


class ControllerChannel:
    """The controller's end of the sockets of one part: in ``directory``, or, for a part on another machine, at
    ``host``: an address of this machine that the other can reach, or a directory from which connections are carried to
    it."""

    def __init__(self, directory: Path, part: str, receives: Any, *, host: str = "") -> None:
        self._part = part
        self._codec = MessageCodec(receives)
        self._context = zmq.asyncio.Context()
        self._orders = _socket(zmq.Context(self._context), zmq.PUSH)
        self._reports = _socket(self._context, zmq.PULL)
        self._reports_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._reports)
        self._unsent: deque[bytes] = deque()
        self._monitor: Any = None
        self._may_wait = MAX_QUEUED if host else 0  # a socket that binds holds nothing for whoever is not there
        try:
            self.ends = self._bound(host) if host else self._met(directory)
        except zmq.ZMQError as error:
            self.close()
            where, remedy = f"in {directory}", "set TMPDIR to a short path (under 60 characters) that can be written"
            if host and not host.startswith("/"):
                where, remedy = f"at {host}", "does that address belong to this machine?"
            raise RunError(f"the sockets of {part} cannot be made {where}: {error}", remedy=remedy) from None

    def send(self, message: Any) -> None:
        """Queue ``message``, for a part that is still starting too; never waits."""
        self._unsent.append(self._codec.encode(message))
        self._flush()
        if len(self._unsent) > self._may_wait:
            raise RunError(
                f"{self._part} has not read its last {MAX_QUEUED} messages",
                remedy="look at its log in the run directory",
            )

    async def receive(self) -> list[Any]:
        """Every message that is there; waits for the first. Raises :class:`~headrace.base.errors.RunError` for bytes
        that
        are none."""
        messages = [self._decoded(await self._reports.recv())]
        while len(messages) < MAX_AT_ONCE:
            try:
                messages.append(self._decoded(self._reports_now.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        self._flush()
        return messages

    async def broken(self) -> None:
        """Wait until somebody's connection from another machine has broken: that of the part, or of one that had no
        key."""
        if self._monitor is None:
            self._monitor = self._reports.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        await self._monitor.recv_multipart()

    def close(self) -> None:
        """Close at once."""
        if self._monitor is not None:
            self._reports.disable_monitor()
            self._monitor.close(0)
        self._orders.close(0)
        self._reports.close(0)
        self._context.term()

    def _met(self, directory: Path) -> Ends:
        ends = ends_in(directory, self._part)
        self._orders.connect(ends.orders)
        self._reports.bind(ends.reports)
        return ends

    def _bound(self, host: str) -> Ends:
        key = guarded(self._orders, self._reports)
        anywhere = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        ends = ends_in(Path(host), self._part) if host.startswith("/") else Ends(orders=anywhere, reports=anywhere)
        bound: list[str] = []
        for socket, address in ((self._orders, ends.orders), (self._reports, ends.reports)):
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.bind(address)
            bound.append(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        return Ends(orders=bound[0], reports=bound[1], key=key)

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._orders.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _decoded(self, data: bytes) -> Any:
        try:
            return self._codec.decode(data)
        except msgspec.DecodeError as error:
            raise RunError(
                f"{self._part} sent something that is no message: {error}", remedy="look at its log"
            ) from error


def guarded(*sockets: Any, max_bytes: int | None = None) -> str:
    """Have sockets that will be bound talk to nobody but those who know the key, which is returned. A message has at
    most ``max_bytes``; unset: as many as any may have."""
    public, secret = zmq.curve_keypair()
    for socket in sockets:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        _between_machines(socket, max_bytes or MAX_BYTES)
    return public.decode()


def admitted(socket: Any, address: str, key: str) -> None:
    """Have a socket that will be connected to ``address`` prove that it knows that key. Its connection is made once."""
    socket.setsockopt(zmq.IPV6, int("[" in address))
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    _between_machines(socket, MAX_BYTES)


class _Connections:
    """The two connections of a part to a controller on another machine, made once. What happens when one of them
    breaks its owner says; else the part ends at once, with whatever it has started."""

    def __init__(
        self,
        ends: Ends,
        orders: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        on_broken: Callable[[], object] | None,
    ) -> None:
        self._addresses = {ends.orders: orders, ends.reports: reports}
        self._on_broken = on_broken or _end_all
        for address, socket in self._addresses.items():
            admitted(socket, address, ends.key)
        self._monitors = [socket.get_monitor_socket(_WATCHED) for socket in self._addresses.values()]
        self._watching = threading.Thread(target=self._watch, daemon=True, name="connections")

    def meet(self) -> None:
        """Make them; :class:`~headrace.base.errors.RunError` where that cannot be."""
        for (address, socket), monitor in zip(self._addresses.items(), self._monitors, strict=True):
            socket.connect(address)
            if not self._is_met(monitor):
                raise RunError(
                    f"the controller at {address} cannot be reached from this machine",
                    remedy="let this machine open TCP connections to every port of that one, and use one version of "
                    "headrace",
                )
        self._watching.start()

    def forget(self) -> None:
        """They are about to be closed, as they should."""
        for socket in self._addresses.values():
            socket.disable_monitor()
        self._watching.join()
        for monitor in self._monitors:
            monitor.close(0)

    def _is_met(self, monitor: zmq.Socket[bytes]) -> bool:
        """Whether the other end has proved who it is, and heard who this is."""
        clock = RealClock()
        deadline_s = clock.now() + CONNECT_S
        while (left_s := deadline_s - clock.now()) > 0:
            if monitor.poll(int(left_s * 1000)):
                return _event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return False

    def _watch(self) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        events = [_event(monitor) for monitor, _ in poller.poll()]
        if zmq.EVENT_MONITOR_STOPPED not in events:
            self._on_broken()


def _event(monitor: zmq.Socket[bytes]) -> int:
    return int(parse_monitor_message(monitor.recv_multipart())["event"])


def _end_all() -> None:
    sys.stderr.write("the connection to the controller is broken: this process ends\n")
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def _between_machines(socket: Any, max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_S * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_S * 1000)
