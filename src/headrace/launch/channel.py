"""Messages between the controller and its parts: pyzmq over sockets that only this user can open.

Two one-way sockets per part, so that a part may send from any of its threads while its main thread waits for orders.
Who receives binds, who sends connects: a socket that connects holds its messages until the other end is there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from headrace.errors import RunError
from headrace.types.messages.codec import Codec

MAX_AT_ONCE = 256
"""Messages that are taken before others have their turn."""
MAX_QUEUED = 100_000
"""Messages that may wait in one direction; more means that the reader has stopped reading."""


def address(directory: Path, part: str, direction: str) -> str:
    """Where the socket of one direction is: ``"orders"`` to the part, ``"reports"`` from it."""
    return f"ipc://{directory / part}.{direction}"


class PartChannel:
    """A part's end: blocking, for a plain loop."""

    def __init__(self, directory: Path, part: str, receives: Any) -> None:
        self._codec = Codec(receives)
        self._context = zmq.Context()
        self._orders = _socket(self._context, zmq.PULL)
        self._orders.bind(address(directory, part, "orders"))
        self._reports = _socket(self._context, zmq.PUSH)
        self._reports.connect(address(directory, part, "reports"))
        self._sending = threading.Lock()

    def receive(self, timeout_s: float) -> list[Any]:
        """Every message that is there; waits up to ``timeout_s`` for the first."""
        messages: list[Any] = []
        if not self._orders.poll(timeout_s * 1000):
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
        self._orders.close(0)
        self._reports.close(2000)
        self._context.term()


class ControllerChannel:
    """The controller's end of the sockets of one part."""

    def __init__(self, directory: Path, part: str, receives: Any) -> None:
        self._part = part
        self._codec = Codec(receives)
        self._context = zmq.asyncio.Context()
        self._orders = _socket(zmq.Context(self._context), zmq.PUSH)
        self._reports = _socket(self._context, zmq.PULL)
        self._reports_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._reports)
        try:
            self._orders.connect(address(directory, part, "orders"))
            self._reports.bind(address(directory, part, "reports"))
        except zmq.ZMQError as error:
            self.close()
            raise RunError(
                f"the sockets of {part} cannot be made in {directory}: {error}",
                remedy="set TMPDIR to a short path (under 60 characters) that can be written",
            ) from None

    def send(self, message: Any) -> None:
        """Queue ``message``, for a part that is still starting too; never waits."""
        try:
            self._orders.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise RunError(
                f"{self._part} has not read its last {MAX_QUEUED} messages",
                remedy="look at its log in the run directory",
            ) from None

    async def receive(self) -> list[Any]:
        """Every message that is there; waits for the first. Raises :class:`~headrace.errors.RunError` for bytes that
        are none."""
        messages = [self._decoded(await self._reports.recv())]
        while len(messages) < MAX_AT_ONCE:
            try:
                messages.append(self._decoded(self._reports_now.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        """Close at once."""
        self._orders.close(0)
        self._reports.close(0)
        self._context.term()

    def _decoded(self, data: bytes) -> Any:
        try:
            return self._codec.decode(data)
        except msgspec.DecodeError as error:
            raise RunError(
                f"{self._part} sent something that is no message: {error}", remedy="look at its log"
            ) from error


def _socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
