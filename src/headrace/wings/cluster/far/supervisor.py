"""The supervisor of one process of the run on another machine (a node): an actor of a cluster, or a part of the program
``headrace join``. When the supervisor or its machine ends, the pipe that it holds closes, and the process ends with all
that it started."""

from __future__ import annotations

import shlex
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from headrace.base import __version__
from headrace.base.clock import RealClock
from headrace.base.environ import shared_memory_root
from headrace.base.errors import RunError
from headrace.launch.child import LOG_LINES
from headrace.launch.leases import Lease, sweep
from headrace.launch.local_process import LocalProcess, ProcessResources, exit_words, lines_of, start_process
from headrace.launch.starts import Briefing, EngineStart, EnvironmentStart, LearnerStart, ScorerStart, Start


class NodeQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A question about a node that the controller asks before a process is started there."""

    paths: dict[str, str]
    """Paths that must exist on the node, by the setting that names them."""
    run_dir: str
    """Path of the run directory on the controller's machine."""
    mark: str
    """Name of a file that the controller has made in the run directory. If the node does not see it, its run directory
    is another folder."""


class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a node to a :class:`NodeQuery`."""

    address: str
    """Address at which other machines reach the node."""
    interface: str
    """Network interface with that address; empty if no interface has it."""
    headrace: str
    """Version of Headrace on the node."""
    missing: dict[str, str]
    """The paths of the query that do not exist on the node, by the setting that names each of them."""
    shared: bool
    """Whether the node sees the controller's run directory."""
    port: int
    """A port that was free when the query was answered."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The order to a supervisor to start its process, sent as JSON."""

    name: str
    """Name of the process in the run."""
    briefing: Briefing
    """What the process is to do, and the addresses of its channel to the controller."""
    token: str
    """The run's secret, which the process must show."""
    num_threads: int
    """Number of threads that the process may compute with."""
    log: str
    """Path of the log; empty if the node does not see the run directory. The log is then a file of the supervisor,
    which is deleted when the process ends."""


class FarExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process on another machine, as its supervisor reports it."""

    code: int
    """Exit code; negative for a signal."""
    words: str
    """How the process ended, in words that follow its name in a sentence."""
    lines: list[str]
    """The last lines of the process's log."""


class ProcessSupervisor:
    """The supervisor of one process, from its start to its end. The run calls its methods over the network, so they
    take and return JSON as bytes, strings and numbers."""

    def __init__(self, address: str) -> None:
        """Make a supervisor without a process. ``address`` is that at which other machines reach this one."""
        self._address = address
        self._process: LocalProcess | None = None
        self._log = Path()
        for root in (Path(tempfile.gettempdir()), shared_memory_root()):
            sweep(root)  # removes directories that killed runs have left
        self._directory = Lease.directory(Path(tempfile.gettempdir()))

    def look(self, query: bytes) -> bytes:
        """Return the encoded :class:`NodeReply` to the encoded :class:`NodeQuery` ``query``."""
        question, address = msgspec.json.decode(query, type=NodeQuery), self._address
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
        """Return the time of the node's monotonic clock in seconds, by which the run aligns times of different
        machines."""
        return RealClock().now()

    async def begin(self, order: bytes) -> int:
        """Start the process that the encoded :class:`Begin` ``order`` describes, and return its process id. Raises
        ``OSError`` if the system refuses."""
        begin = msgspec.json.decode(order, type=Begin)
        self._log = Path(begin.log) if begin.log else self._directory.path / "log"
        home = ProcessResources(
            directory=self._directory.path, log=self._log, token=begin.token, num_threads=begin.num_threads
        )
        self._process = await start_process(begin.name, begin.briefing, home)
        return self._process.pid

    async def ended(self) -> bytes:
        """Wait for the process to end, end all that it started, and return the encoded :class:`FarExit`."""
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
        """Kill the process now, if there is one, and delete the directory of the supervisor."""
        if self._process is None:
            self._directory.end()
        else:
            await self._process.kill()

    async def computed_s(self) -> float:
        """Return the processor time that the process has used or waited for, in seconds; 0 if it is not known any
        more."""
        return await self._running().computed_s()

    async def halted(self) -> bytes:
        """Return the reason why the process makes no progress, such as a signal that stopped it, as UTF-8 text; empty
        if there is none."""
        return (await self._running().halted()).encode()

    def _running(self) -> LocalProcess:
        """Return the process. Raises :class:`~headrace.base.errors.RunError` if none was started."""
        if self._process is None:
            raise RunError("this supervisor has no process", remedy="start one first")
        return self._process


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of sockets for an ``address``: IPv6 if it has a colon, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _interface(address: str) -> str:
    """Return the name of this machine's network interface that has ``address``; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""


def paths_of(start: Start) -> dict[str, str]:
    """Return the paths that must exist on the machine of a process that starts with ``start``, by the setting that
    names them.

    >>> paths_of(ScorerStart(reward={"kind": "function", "ref": "/code/reward.py:reward"}))
    {'env.reward': '/code/reward.py'}
    """
    paths: dict[str, str] = {}
    match start:
        case EngineStart():
            paths = {"model.path": str(start.model["path"]), "sync.tls_certificate": start.route.tls_certificate}
            paths["sync.tls_key"] = start.route.tls_key
        case LearnerStart():
            paths = {"model.path": str(start.model["path"]), "sync.tls_certificate": start.route.tls_certificate}
            paths["the snapshot"] = start.snapshot
        case ScorerStart():
            paths = {"env.reward": str(start.reward.get("ref", "")).rpartition(":")[0]}
        case EnvironmentStart():
            paths = {f"env ({path})": path for path in _files_of(start.entry)}
    return {setting: path for setting, path in paths.items() if path}


def _files_of(entry: str) -> Sequence[str]:
    """Return the absolute paths in an environment's entry: the file of a ``file.py:name``, or those words of a command
    that are files on this machine."""
    found = []
    for word in shlex.split(entry):
        file = word.rpartition(":")[0] if ".py:" in word else word
        if file.startswith("/") and (file != word or Path(file).exists()):
            found.append(file)
    return found
