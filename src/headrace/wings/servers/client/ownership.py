"""The ownership of a server by one run, which alone may load weights into it: a second run on this machine is refused,
one on another machine is detected in the server's answers."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import sys
from collections.abc import Iterator

from headrace.base.environ import run_token
from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit
from headrace.wings.servers.client.wire import Address

EXIT_S = 3.0
"""Longest time in seconds that a killed process needs to exit."""
REMEDY = "give each run a server of its own (engine.server.urls)"


@contextlib.contextmanager
def owned(address: Address) -> Iterator[None]:
    """Own the server at ``address`` while the body runs, among the processes of this machine. Raises
    :class:`~headrace.base.errors.ConfigError` if another process owns it and does not exit within :data:`EXIT_S`. On
    other systems than Linux nothing is checked."""
    # an abstract socket: it has no file, and ends with this process
    name = f"\0headrace gives weights to {_numeric(address.host)[:60]}:{address.port}"
    with socket.socket(socket.AF_UNIX) as claim:
        if sys.platform == "linux" and not _claim(claim, name):
            raise ConfigError(f"the server at {address} gets its weights from another run", remedy=REMEDY)
        yield


def public_name() -> str:
    """Return a name that is the same in all processes of a run and differs between runs. It is a hash, so that it does
    not reveal the run's token."""
    token = run_token() or secrets.token_hex(8)
    return hashlib.blake2b(token.encode(), digest_size=8).hexdigest()


def _claim(claim: socket.socket, name: str) -> bool:
    """Bind the abstract socket ``name`` to ``claim``, and return whether that succeeded: only one process of this
    machine can have it. If another one has it, wait once for its end."""
    for _ in range(2):
        with contextlib.suppress(OSError):
            claim.bind(name)
            claim.listen()
            return True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as holder:
            holder.settimeout(EXIT_S)
            holder.connect(name)
            holder.recv(1)  # returns when the owner exits, since it never sends
    return False


def _numeric(host: str) -> str:
    """Return the numeric address of ``host``, or ``host`` itself if it cannot be resolved."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return host


class Labels:
    """The names under which one engine's versions are known to the server: a version and the run's name.

    >>> labels = Labels("vLLM at http://10.9.0.2:8000", run="5f3a")
    >>> labels.of(7), labels.version("7:5f3a")
    ('7:5f3a', 7)
    >>> labels.version("7:99d1")
    Traceback (most recent call last):
    ...
    headrace.base.errors.EngineUnfit: vLLM at http://10.9.0.2:8000 has got weights from another run ('7:99d1')
      remedy: give each run a server of its own (engine.server.urls), and resume this one
    """

    def __init__(self, server: str, run: str | None = None) -> None:
        """Make labels. ``server`` is a name for display. ``run`` distinguishes runs; it is empty if the weights never
        change, so that several runs may use one server."""
        self._server, self._run = server, secrets.token_hex(4) if run is None else run

    def of(self, version: int) -> str:
        """Return the label of ``version``."""
        return f"{version}:{self._run}"

    def version(self, label: str) -> int:
        """Return the version of a label that the server has reported. Raises ``ValueError`` if it is not a number, and
        :class:`~headrace.base.errors.ComponentDied` for weights that this run did not load."""
        version, mark, run = label.partition(":")
        if not mark:
            raise ComponentDied(
                f"{self._server} has other weights than this run gave it ({label[:80]!r}): was it started again?",
                remedy="look at its log",
            )
        if run != self._run:
            raise EngineUnfit(
                f"{self._server} has got weights from another run ({label[:80]!r})",
                remedy=f"{REMEDY}, and resume this one",
            )
        return int(version)
