"""A TCP connection that can be cut without anybody being told: a proxy that stops forwarding and closes nothing."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Cable:
    """From a port of its own to ``target``."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = threading.Event()
        self._whole.set()
        self._over = False
        self._peers: dict[socket.socket, socket.socket] = {}
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listening.getsockname()
        self._eyes = selectors.DefaultSelector()
        self._eyes.register(self._listening, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Nothing comes through any more; connections are still made, and none is closed."""
        self._whole.clear()

    def fix(self) -> None:
        """What has waited comes through."""
        self._whole.set()

    def close(self) -> None:
        self._over = True
        self._whole.set()
        self._thread.join(5)
        for each in (self._listening, *self._peers):
            each.close()
        self._eyes.close()

    def _forward(self) -> None:
        while not self._over:
            for key, _ in self._eyes.select(0.05):
                self._whole.wait()
                if self._over:
                    return
                if key.fileobj is self._listening:
                    self._meet()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass(key.fileobj)

    def _meet(self) -> None:
        near, _ = self._listening.accept()
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._eyes.register(one, selectors.EVENT_READ)

    def _pass(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._peers[end].sendall(data)
                return
        except OSError:
            pass
        other = self._peers.pop(end, None)
        for each in filter(None, (end, other)):
            self._peers.pop(each, None)
            with contextlib.suppress(KeyError, ValueError):
                self._eyes.unregister(each)
            each.close()


@contextmanager
def cable(host: str, port: int) -> Iterator[Cable]:
    made = Cable((host, port))
    try:
        yield made
    finally:
        made.close()
