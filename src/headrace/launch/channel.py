"""The channels through which the controller exchanges messages with its *parts*: the processes of a run, such as
engines, the learner and workers. A message to a part is an *order*, and a message from a part is a *report*. Each part
has two one-way sockets (pyzmq), so that it can send from any of its threads while its main thread waits for orders.

    on this machine    Sockets in a directory that only this user can enter. The receiver binds, the sender connects: a
                       socket that connects holds its messages until the other end exists.
    between machines   TCP under CURVE: encrypted, and both ends prove their identity. The controller binds, with a key
                       made for this one part; connections without the key are not even answered. A connection that
                       breaks is not made again, since messages might be missing unnoticed: the part ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.base.clock import RealClock
from headrace.base.errors import RunError
from headrace.base.types.messages.codec import MessageCodec

MAX_AT_ONCE = 256
"""Number of messages that are received before other tasks of the event loop run."""
MAX_QUEUED = 100_000
"""Number of messages that may wait in one direction. If more wait, the receiver has stopped reading."""
MAX_SOCKETS = 1 << 15
"""Number of sockets that the controller may have open. It needs two per part, or four for a part on another machine."""
MAX_BYTES = 1 << 30
"""Largest message between machines, in bytes. A longer one is refused before memory is allocated for it."""
CONNECT_S = 20.0
"""Seconds for which a part tries to connect to a controller on another machine."""
HEARTBEAT_S = 5
"""Seconds between the heartbeats of a connection between machines."""
SILENCE_S = 60
"""Seconds without a message or heartbeat after which a connection between machines counts as broken."""
RETRY_MS = 10
"""Milliseconds between two attempts to connect to a part of this machine that is starting. Its first order arrives at
most so much later than it could."""
DELIVERY_MS = 2000
"""Milliseconds for which a part that closes its channel keeps undelivered messages."""
SEND_TIMEOUT_S = 2
"""Seconds for which sending waits for a connection that may be broken."""
TO_SELF = "inproc://orders"
"""The address at which a part receives the orders that it sends to itself."""
_CHANNEL_NUMBERS = itertools.count()
"""Numbers for the file names of sockets. A part that is started again gets new sockets."""
_BROKEN_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)  # fmt: skip
"""The events of a connection that mean that it has broken."""
_WATCHED_EVENTS = _BROKEN_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED
"""The events of a connection that :class:`_Connections` monitors."""


class ChannelAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of the two sockets of one part, as zmq addresses (``ipc://…`` or ``tcp://…``). The controller
    creates them and passes them to the part when it starts."""

    orders: str
    """The address of messages to the part, from the controller and from other parts of this machine."""
    reports: str
    """The address of messages from the part to the controller."""
    key: str = ""
    """The key that the part needs to connect from another machine: the public half of a key pair that the controller
    has created for this part only. Empty for a part on this machine."""


def local_addresses(directory: Path, part: str) -> ChannelAddresses:
    """Return the addresses of the two sockets of ``part``, a part on this machine. The sockets are files in
    ``directory``."""
    return ChannelAddresses(orders=f"ipc://{directory / part}.orders", reports=f"ipc://{directory / part}.reports")


def answers_address(addresses: ChannelAddresses) -> str:
    """Return the address at which a process that sends requests to engines directly receives their answers.
    ``addresses`` are the addresses of the process's own channel.

    >>> answers_address(ChannelAddresses(orders="ipc:///x/rollout-0.3.orders", reports="ipc:///x/rollout-0.3.reports"))
    'ipc:///x/rollout-0.3.answers'
    """
    return f"{addresses.reports.removesuffix('.reports')}.answers"


class OrdersEnd(Protocol):
    """The controller's end of the channel to one part."""

    @property
    def local_orders(self) -> str:
        """The address at which other parts on this machine can send orders to the part; empty if they cannot."""
        ...

    def send(self, message: Any) -> None:
        """Queue ``message`` for the part, without waiting."""
        ...

    async def receive(self) -> list[Any]:
        """Wait until the part has sent a message, and return all messages that have arrived."""
        ...

    def close(self) -> None:
        """Close the channel at once. Queued messages are lost."""
        ...


class PartEnd(Protocol):
    """The part's end of its channel. Hosts use it."""

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for an order, and return whether an order has arrived. The order is not
        received yet."""
        ...

    def receive(self, timeout_s: float) -> list[Any]:
        """Wait up to ``timeout_s`` seconds for an order, and return all orders that have arrived; empty if none has
        arrived."""
        ...

    def send(self, message: Any) -> None:
        """Send ``message`` to the controller; any thread may call this."""
        ...

    def send_to_self(self, message: Any) -> None:
        """Queue ``message`` as if it were an order to this part; any thread may call this."""
        ...


class PartChannel:
    """The part's end of its two sockets, with blocking calls. ``message_type`` is the union of the message types that
    the part can receive. Raises :class:`~headrace.base.errors.RunError` if a controller on another machine cannot be
    reached."""

    def __init__(
        self, addresses: ChannelAddresses, message_type: Any, on_broken: Callable[[], object] | None = None
    ) -> None:
        """Open the sockets at ``addresses``. ``on_broken`` is called, in another thread, when a connection to another
        machine breaks; from then on :meth:`send` raises ``zmq.Again``. If ``on_broken`` is ``None``, this process and
        all processes in its process group are killed when a connection breaks."""
        self.addresses = addresses
        self._codec = MessageCodec(message_type)
        self._context = zmq.Context()
        self._orders = _make_socket(self._context, zmq.PULL)
        """The socket that receives orders, also those of this part to itself."""
        self._orders.bind(TO_SELF)
        self._to_self = _make_socket(self._context, zmq.PUSH)
        self._to_self.connect(TO_SELF)
        self._to_self_lock = threading.Lock()  # held while a thread sends through _to_self
        self._reports = _make_socket(self._context, zmq.PUSH)
        self._remote = _Connections(addresses, self._orders, self._reports, on_broken) if addresses.key else None
        """The monitored connections to a controller on another machine; ``None`` if the controller is on this one."""
        self._reports_lock = threading.Lock()  # held while a thread sends through _reports
        self._parts: dict[str, zmq.Socket[bytes]] = {}
        """The sockets that send orders to other parts, by the parts' addresses."""
        self._readers: dict[str, zmq.Socket[bytes]] = {}
        """The sockets that send answers to processes other than the controller, by the processes' addresses."""
        if on_broken is not None:
            self._reports.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_S * 1000)
        if self._remote is None:
            self._orders.bind(addresses.orders)
            self._reports.connect(addresses.reports)
            return
        try:
            self._remote.connect()
        except RunError:
            self._context.destroy(0)
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for an order, and return whether an order has arrived. The order is not
        received yet."""
        return bool(self._orders.poll(timeout_s * 1000))

    def receive(self, timeout_s: float) -> list[Any]:
        """Wait up to ``timeout_s`` seconds for an order, and return all orders that have arrived; empty if none has
        arrived."""
        messages: list[Any] = []
        if not self.wait(timeout_s):
            return messages
        while True:
            try:
                messages.append(self._codec.decode(self._orders.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: Any) -> None:
        """Send ``message`` to the controller; any thread may call this."""
        data = self._codec.encode(message)
        with self._reports_lock:
            self._reports.send(data)

    def send_to(self, parts: Collection[str], message: Any) -> None:
        """Send ``message`` to other parts on this machine, which receive orders at the addresses ``parts``. Only one
        thread may call this. The call never waits. A part that is stopped receives the message when it continues: its
        connection is kept until a later call without its address. A part that has ended does not receive the
        message."""
        data = self._codec.encode(message)
        for address in self._parts.keys() - set(parts):
            self._parts.pop(address).close(0)
        for address in parts:
            if address not in self._parts:
                self._parts[address] = _make_socket(self._context, zmq.PUSH)
                self._parts[address].connect(address)
            self._parts[address].send(data, zmq.NOBLOCK)

    def answer(self, reader: str, message: Any) -> None:
        """Send ``message`` to another process on this machine, which receives answers at the address ``reader``. Only
        one thread may call this. The call never waits, so a stopped process delays no other process: its unread
        messages are kept. Their number is bounded by the number of requests that the process has running."""
        if reader not in self._readers:
            self._readers[reader] = _make_socket(self._context, zmq.PUSH)
            self._readers[reader].setsockopt(zmq.SNDHWM, 0)
            self._readers[reader].connect(reader)
        self._readers[reader].send(self._codec.encode(message), zmq.NOBLOCK)

    def forget_reader(self, reader: str) -> None:
        """Discard all unread messages for the process at the address ``reader``, because the process has died."""
        if reader in self._readers:
            self._readers.pop(reader).close(0)

    def send_to_self(self, message: Any) -> None:
        """Queue ``message`` among the orders of this part, and wake its loop; any thread may call this."""
        data = self._codec.encode(message)
        with self._to_self_lock:
            self._to_self.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets. Undelivered messages to the controller are kept for up to :data:`DELIVERY_MS`."""
        if self._remote is not None:
            self._remote.stop_watching()
        with self._to_self_lock:
            self._to_self.close(0)
        self._orders.close(0)
        for socket in (self._reports, *self._parts.values(), *self._readers.values()):
            socket.close(DELIVERY_MS)
        self._context.term()


class ControllerChannel:
    """The controller's end of the sockets of the part named ``part``. For a part on this machine, the sockets are files
    in ``directory``. For a part on another machine they are TCP ports at ``host``, an address of this machine that the
    other machine can reach. ``message_type`` is the union of the message types that the part may send. Raises
    :class:`~headrace.base.errors.RunError` if the sockets cannot be created."""

    def __init__(self, directory: Path, part: str, message_type: Any, *, host: str = "") -> None:
        """Open both sockets. The class describes the arguments; ``host`` is empty for a part on this machine."""
        self._part = part
        self._codec = MessageCodec(message_type)
        self._orders = _make_socket(_controller_context(), zmq.PUSH)
        self._reports = _make_socket(_controller_context(), zmq.PULL)
        self._report_reader = _SocketReader(self._reports)
        self._unsent: deque[bytes] = deque()
        """The encoded orders that the socket has not accepted yet, oldest first."""
        self.largest_bytes = 0
        """The size of the largest message so far, in either direction."""
        self._monitor: Any = None
        """The socket that reports broken connections; ``None`` before the first call of :meth:`wait_for_break`."""
        self._monitor_reader: _SocketReader | None = None
        self._max_unsent = MAX_QUEUED if host else 0
        """The largest number of unsent orders. A bound socket has no queue for a peer that has not connected, so orders
        to a part on another machine wait here."""
        try:
            self.addresses = self._open_remote(host) if host else self._open_local(directory)
        except zmq.ZMQError as error:
            self.close()
            location, remedy = f"in {directory}", "set TMPDIR to a short path (under 60 characters) that can be written"
            if host:
                location, remedy = f"at {host}", "does that address belong to this machine?"
            raise RunError(f"the sockets of {part} cannot be made {location}: {error}", remedy=remedy) from None

    @property
    def local_orders(self) -> str:
        """The address at which other parts on this machine send orders to the part; empty for a part on another
        machine."""
        return "" if self.addresses.key else self.addresses.orders

    def send(self, message: Any) -> None:
        """Queue the order ``message`` without waiting. The part may still be starting. Raises
        :class:`~headrace.base.errors.RunError` if so many orders are queued that the part must have stopped reading."""
        data = self._codec.encode(message)
        self.largest_bytes = max(self.largest_bytes, len(data))
        self._unsent.append(data)
        self._flush()
        if len(self._unsent) > self._max_unsent:
            raise RunError(
                f"{self._part} has not read its last {MAX_QUEUED} messages",
                remedy="look at its log in the run directory",
            )

    async def receive(self) -> list[Any]:
        """Wait until the part has sent a message, and return all messages that have arrived, at most
        :data:`MAX_AT_ONCE`. Raises :class:`~headrace.base.errors.RunError` for data that is not a message."""
        arrived = await self._report_reader.take()
        self._flush()
        return [self._decode(data) for data in arrived]

    async def wait_for_break(self) -> None:
        """Wait until a connection from another machine breaks. It may be the connection of the part, or a connection
        that was refused because the other end did not know the key."""
        if self._monitor is None:
            self._monitor = self._reports.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._monitor_reader = _SocketReader(self._monitor)
        assert self._monitor_reader is not None
        await self._monitor_reader.take()

    def close(self) -> None:
        """Close the channel at once. Queued messages in both directions are lost."""
        if self._monitor is not None and self._monitor_reader is not None:
            self._monitor_reader.close()
            self._reports.disable_monitor()
            self._monitor.close(0)
        self._report_reader.close()
        self._orders.close(0)
        self._reports.close(0)

    def _open_local(self, directory: Path) -> ChannelAddresses:
        """Open sockets in ``directory`` for a part on this machine, and return their addresses."""
        # A part that is started again has new sockets, so that it does not receive messages to its earlier process.
        addresses = local_addresses(directory, f"{self._part}.{next(_CHANNEL_NUMBERS)}")
        self._orders.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)  # the part binds its socket later
        self._orders.connect(addresses.orders)
        self._reports.bind(addresses.reports)
        return addresses

    def _open_remote(self, host: str) -> ChannelAddresses:
        """Open encrypted TCP sockets on the interface ``host`` of this machine, at free ports, for a part on another
        machine, and return their addresses."""
        key = require_key(self._orders, self._reports)
        address = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        addresses: list[str] = []
        for socket in (self._orders, self._reports):
            socket.setsockopt(zmq.IPV6, int("[" in address))
            socket.bind(address)
            addresses.append(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        return ChannelAddresses(orders=addresses[0], reports=addresses[1], key=key)

    def _flush(self) -> None:
        """Send queued orders, the oldest first, as long as the socket accepts them without blocking."""
        while self._unsent:
            try:
                self._orders.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _decode(self, data: bytes) -> Any:
        """Decode a message of the part. Raises :class:`~headrace.base.errors.RunError` if ``data`` is not a message."""
        self.largest_bytes = max(self.largest_bytes, len(data))
        try:
            return self._codec.decode(data)
        except msgspec.DecodeError as error:
            text = f"{self._part} sent something that is not a message: {error}"
            raise RunError(text, remedy="look at its log") from error


class AnswerListener:
    """The socket at which a process on this machine receives the answers of all engines to which it sends requests
    directly, without the controller. ``message_type`` is the type of these messages. Raises
    :class:`~headrace.base.errors.RunError` if the socket cannot be created."""

    def __init__(self, address: str, message_type: Any) -> None:
        """Listen at ``address``. The first event loop that receives messages owns the socket."""
        self._codec = MessageCodec(message_type)
        self._socket = _make_socket(_controller_context(), zmq.PULL)
        self._reader = _SocketReader(self._socket)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise RunError(
                f"answers of engines cannot be received at {address}: {error}", remedy="make room in that directory"
            ) from None

    async def receive(self) -> list[Any]:
        """Wait until an engine has sent a message, and return all messages that have arrived, at most
        :data:`MAX_AT_ONCE`."""
        return [self._codec.decode(data) for data in await self._reader.take()]

    def close(self) -> None:
        """Close the socket at once. Messages that were not received are lost."""
        self._reader.close()
        self._socket.close(0)


class DirectOrders:
    """The end of a channel through which a process other than the controller sends orders to an engine on its machine
    (:class:`OrdersEnd`). The engine sends its answers to an :class:`AnswerListener`."""

    local_orders = ""
    """Always empty: only the learner and the controller announce weights."""

    def __init__(self, address: str) -> None:
        """Connect to the engine that receives orders at ``address``."""
        self._codec = MessageCodec(Any)
        self._socket = _make_socket(_controller_context(), zmq.PUSH)
        self._socket.connect(address)

    def send(self, message: Any) -> None:
        """Queue the order ``message`` without waiting. Raises :class:`~headrace.base.errors.RunError` if
        :data:`MAX_QUEUED` orders are queued already."""
        try:
            self._socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise RunError(f"an engine has not read its last {MAX_QUEUED} orders", remedy="look at its log") from None

    async def receive(self) -> list[Any]:
        """Return no messages, because the engine sends its answers to an :class:`AnswerListener`."""
        return []

    def close(self) -> None:
        """Close the socket at once. Queued orders are lost."""
        self._socket.close(0)


def require_key(*sockets: Any, max_bytes: int | None = None) -> str:
    """Make ``sockets``, which will be bound, accept only encrypted connections whose other end knows a new key. Return
    this key, for :func:`present_key` at the other end. A message may have at most ``max_bytes`` bytes; ``None`` means
    :data:`MAX_BYTES`."""
    public, secret = zmq.curve_keypair()
    for socket in sockets:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        _set_network_options(socket, max_bytes or MAX_BYTES)
    return public.decode()


def present_key(socket: Any, address: str, key: str) -> None:
    """Make a socket that will be connected to ``address`` prove that it knows ``key``, which :func:`require_key`
    returned at the other end. After the connection breaks, it is not opened again."""
    socket.setsockopt(zmq.IPV6, int("[" in address))
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    _set_network_options(socket, MAX_BYTES)


class _Connections:
    """The two connections of a part to a controller on another machine. They are opened once. When one of them breaks,
    ``on_broken`` is called; by default it kills this process and all processes of its group."""

    def __init__(
        self,
        addresses: ChannelAddresses,
        orders: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        on_broken: Callable[[], object] | None,
    ) -> None:
        """Prepare the part's sockets ``orders`` and ``reports`` to prove the key of ``addresses``, and start monitoring
        them. The connections are not opened yet."""
        self._sockets = {addresses.orders: orders, addresses.reports: reports}
        self._on_broken = on_broken or _kill_process_group
        for address, socket in self._sockets.items():
            present_key(socket, address, addresses.key)
        self._monitors = [socket.get_monitor_socket(_WATCHED_EVENTS) for socket in self._sockets.values()]
        """The sockets that report the events of the connections."""
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="connections")

    def connect(self) -> None:
        """Open the connections. Raises :class:`~headrace.base.errors.RunError` if the controller cannot be reached."""
        for (address, socket), monitor in zip(self._sockets.items(), self._monitors, strict=True):
            socket.connect(address)
            if not self._handshake_succeeded(monitor):
                raise RunError(
                    f"the controller at {address} cannot be reached from this machine",
                    remedy="let this machine open TCP connections to every port of that one, and use one version of "
                    "headrace",
                )
        self._watcher.start()

    def stop_watching(self) -> None:
        """Stop watching the connections before they are closed on purpose."""
        for socket in self._sockets.values():
            socket.disable_monitor()
        self._watcher.join()
        for monitor in self._monitors:
            monitor.close(0)

    def _handshake_succeeded(self, monitor: zmq.Socket[bytes]) -> bool:
        """Wait up to :data:`CONNECT_S` for the handshake of a connection, which ``monitor`` reports. Return whether
        both ends have proved their identity in that time."""
        clock = RealClock()
        deadline_s = clock.now() + CONNECT_S
        while (left_s := deadline_s - clock.now()) > 0:
            if monitor.poll(int(left_s * 1000)):
                return _receive_event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return False

    def _watch(self) -> None:
        """Wait for the first event of the monitored connections, and call ``on_broken`` unless the monitors were
        stopped. This is the body of a thread."""
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        events = [_receive_event(monitor) for monitor, _ in poller.poll()]
        if zmq.EVENT_MONITOR_STOPPED not in events:
            self._on_broken()


def _receive_event(monitor: zmq.Socket[bytes]) -> int:
    """Wait for the next event of the connection that ``monitor`` monitors, and return zmq's number for the event."""
    return int(parse_monitor_message(monitor.recv_multipart())["event"])


def _kill_process_group() -> None:
    """Kill this process and all processes of its group at once. This is the default when the connection to the
    controller breaks, because the part cannot receive orders any more."""
    sys.stderr.write("the connection to the controller is broken: this process ends\n")
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


class _SocketReader:
    """The messages that arrive at one zmq socket, for one task of the event loop. It replaces ``zmq.asyncio`` at a
    fifth of the cost per message. The cost matters if a thousand engines send to one process."""

    def __init__(self, socket: Any) -> None:
        """Create a reader of ``socket``. The event loop watches the socket after the first call of :meth:`take`."""
        self._socket = socket
        self._fd: int = socket.FD
        """The descriptor by which zmq signals that the state of the socket has changed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that watches the descriptor; ``None`` if none does."""
        self._arrived: list[bytes] = []
        """The messages that :meth:`take` has not returned."""
        self._has_messages = asyncio.Event()  # set while there may be such messages

    async def take(self) -> list[bytes]:
        """Wait until messages have arrived, and return them, at most :data:`MAX_AT_ONCE`. Other tasks of the event loop
        run first."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._receive)
        # zmq signals only changes, so messages may already be waiting without a signal
        self._receive()
        if self._has_messages.is_set():
            await asyncio.sleep(0)
        else:
            await self._has_messages.wait()
        self._has_messages.clear()
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Stop watching the socket, before it is closed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._loop = None

    def _receive(self) -> None:
        """Receive messages from the socket, at most :data:`MAX_AT_ONCE`. If this limit is reached, the socket is not
        watched until :meth:`take` returns the messages."""
        try:
            while len(self._arrived) < MAX_AT_ONCE:
                self._arrived.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        else:
            self.close()
        if self._arrived:
            self._has_messages.set()


@cache
def _controller_context() -> zmq.Context[Any]:
    """Return the zmq context that all controller ends in this process share. A context has threads of its own, so that
    a thousand contexts would take seconds to start."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def _make_socket(context: Any, kind: int) -> Any:
    """Return a new socket of type ``kind`` (``zmq.PUSH`` or ``zmq.PULL``) with queues of :data:`MAX_QUEUED` messages.
    It discards unsent messages when it is closed."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def _set_network_options(socket: Any, max_bytes: int) -> None:
    """Configure ``socket`` for connections between machines: the longest message that it accepts, in bytes, and the
    heartbeats that detect a lost connection."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_S * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_S * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_S * 1000)
