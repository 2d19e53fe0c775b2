"""A server takes weights from one run: another is refused where it is seen, and noticed in the answers where not."""

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

GOES_S = 3.0
"""A process that was killed may take so long until it is gone."""
REMEDY = "give each run a server of its own (engine.server.urls)"


@contextlib.contextmanager
def owned(address: Address) -> Iterator[None]:
    """Be the only process of this machine that gives the server at ``address`` weights; others, and those of systems
    other than Linux, are not seen. Raises :class:`~headrace.base.errors.ConfigError` where another one does, and goes
    on doing so."""
    name = f"\0headrace gives weights to {_numeric(address.host)[:60]}:{address.port}"  # of no file: ends with us
    with socket.socket(socket.AF_UNIX) as held:
        if sys.platform == "linux" and not _bound(held, name):
            raise ConfigError(f"the server at {address} gets its weights from another run", remedy=REMEDY)
        yield


def public_name() -> str:
    """What tells this run from others; the same in all processes of a run."""
    token = run_token() or secrets.token_hex(8)
    return hashlib.blake2b(token.encode(), digest_size=8).hexdigest()


def _bound(held: socket.socket, name: str) -> bool:
    for _ in range(2):
        with contextlib.suppress(OSError):
            held.bind(name)
            held.listen()
            return True
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as holder:
            holder.settimeout(GOES_S)
            holder.connect(name)
            holder.recv(1)  # says nothing until it is gone
    return False


def _numeric(host: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return host


class Labels:
    """What one engine's process calls its versions at the server.

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
        """``server``: for people. ``run``: what tells it from others; empty where weights never change, and several may
        ask one server."""
        self._server, self._run = server, secrets.token_hex(4) if run is None else run

    def of(self, version: int) -> str:
        """The label of ``version``."""
        return f"{version}:{self._run}"

    def version(self, label: str) -> int:
        """The version of a label that the server has said. ``ValueError`` for what is no number;
        :class:`~headrace.base.errors.ComponentDied` for weights that this run has not given it."""
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
