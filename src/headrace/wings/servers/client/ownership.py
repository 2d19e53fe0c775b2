"""The ownership of a server by one run. Only the owner may load weights into the server: :func:`own_server` refuses a
second run on this machine, and :class:`Labels` detects a run on another machine in the server's answers."""

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
def own_server(address: Address) -> Iterator[None]:
    """Return a context in which this process owns the server at ``address``, among the processes of this machine.
    Raises :class:`~headrace.base.errors.ConfigError` if another process owns the server and does not exit within
    :data:`EXIT_S`. Nothing is checked on systems other than Linux."""
    # an abstract Unix socket has no file, and the kernel removes it when this process ends
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
    """Bind ``claim`` to the abstract socket ``name``, and return whether that succeeded, since only one process of this
    machine can bind a name. If another process has bound it, wait once for the exit of that process, and try again."""
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
    """The labels by which the server names one engine's versions. A label consists of the version and a name of the
    run.

    >>> labels = Labels("vLLM at http://10.9.0.2:8000", run="5f3a")
    >>> labels.make(7), labels.parse("7:5f3a")
    ('7:5f3a', 7)
    >>> labels.parse("7:99d1")
    Traceback (most recent call last):
    ...
    headrace.base.errors.EngineUnfit: vLLM at http://10.9.0.2:8000 has got weights from another run ('7:99d1')
      remedy: give each run a server of its own (engine.server.urls), and resume this one
    """

    def __init__(self, server: str, run: str | None = None) -> None:
        """Create labels. ``server`` is a name for error messages. ``run`` is the name of the run (``None``: a random
        one); it is empty if the weights never change, so that several runs may use one server."""
        self._server, self._run = server, secrets.token_hex(4) if run is None else run

    def make(self, version: int) -> str:
        """Return the label of ``version``."""
        return f"{version}:{self._run}"

    def parse(self, label: str) -> int:
        """Return the version in a ``label`` that the server has reported. Raises ``ValueError`` if the version is not a
        number, and :class:`~headrace.base.errors.ComponentDied` for the label of weights that this run did not load."""
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
