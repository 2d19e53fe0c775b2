"""What keeps one process of the run on another machine: an actor of a cluster, or a part of the program ``headrace
join``. Where that, or its machine, ends, the pipe that it holds is closed, and the process ends with all it started.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import msgspec
import psutil

from headrace import __version__
from headrace.base.clock import RealClock
from headrace.base.environ import shared_memory_root
from headrace.base.errors import RunError
from headrace.launch.child import LOG_LINES
from headrace.launch.here import Home, LocalProcess, begun, exit_words, lines_of
from headrace.launch.leases import Lease, sweep
from headrace.launch.starts import Briefing


class NodeQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a node before a process is started there."""

    paths: dict[str, str]
    """What has to be there, by the setting that names it."""
    run_dir: str
    mark: str
    """A file that the controller has made in the run directory: where it is not seen, that is another folder."""


class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    address: str
    """Of the node, at which the others reach it."""
    interface: str
    """The network interface with that address; empty where none has it."""
    headrace: str
    """Version."""
    missing: dict[str, str]
    """Those of the paths that are not there."""
    shared: bool
    """Whether the run directory is the controller's."""
    port: int
    """One that was free a moment ago."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is to be started."""

    name: str
    briefing: Briefing
    token: str
    num_threads: int
    log: str
    """Empty: the node does not see the run directory, and keeps the log while the process lives."""


class FarExit(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the process."""

    code: int
    """Its exit code, negative for a signal."""
    words: str
    """The same, to follow its name."""
    lines: list[str]
    """The last ones of its log."""


class ProcessKeeper:
    """One process, from its start to its end. Its methods take and give bytes of JSON, strings and numbers."""

    def __init__(self, address: str) -> None:
        """``address``: of this machine, at which the others reach it."""
        self._address = address
        self._process: LocalProcess | None = None
        self._log = Path()
        for root in (Path(tempfile.gettempdir()), shared_memory_root()):
            sweep(root)  # what killed runs left
        self._directory = Lease.directory(Path(tempfile.gettempdir()))

    def look(self, asked: bytes) -> bytes:
        """What this node has of what is asked."""
        question, address = msgspec.json.decode(asked, type=NodeQuery), self._address
        with socket.socket(family_of(address)) as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        found = NodeReply(
            address=address,
            interface=_interface(address),
            headrace=__version__,
            missing={setting: path for setting, path in question.paths.items() if not Path(path).exists()},
            shared=Path(question.run_dir, question.mark).exists(),
            port=port,
        )
        return msgspec.json.encode(found)

    def clock_s(self) -> float:
        """The monotonic clock of this node."""
        return RealClock().now()

    async def begin(self, order: bytes) -> int:
        """Start the process; its number. Raises ``OSError`` where the system refuses."""
        told = msgspec.json.decode(order, type=Begin)
        self._log = Path(told.log) if told.log else self._directory.path / "log"
        home = Home(directory=self._directory.path, log=self._log, token=told.token, num_threads=told.num_threads)
        self._process = await begun(told.name, told.briefing, home)
        return self._process.pid

    async def ended(self) -> bytes:
        """Wait for its end, and end what it started."""
        process = self._running()
        await process.wait()
        await process.kill()
        code = process.returncode
        assert code is not None
        answer = FarExit(code=code, words=exit_words(code), lines=lines_of(self._log)[-LOG_LINES:])
        process.close()
        self._directory.end()
        return msgspec.json.encode(answer)

    async def drop(self) -> None:
        """End the process now, if there is one."""
        if self._process is None:
            self._directory.end()
        else:
            await self._process.kill()

    async def computed_s(self) -> float:
        """Processor time that it has used, or waited for; 0 where nobody can tell any more."""
        return await self._running().computed_s()

    async def halted(self) -> bytes:
        """What keeps it from going on, in words (UTF-8); empty where nothing does."""
        return (await self._running().halted()).encode()

    def _running(self) -> LocalProcess:
        if self._process is None:
            raise RunError("this keeper has no process", remedy="start one first")
        return self._process


def family_of(address: str) -> socket.AddressFamily:
    """Of the sockets that may have that address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interface(address: str) -> str:
    """Which network interface has that address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""
