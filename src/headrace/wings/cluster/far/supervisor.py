"""The supervisor of one process of the run on another machine (a node). It is a Ray actor, or an object in the program
``headrace join``. When the supervisor ends, its pipe to the process closes, and the process ends with all its child
processes."""

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
from headrace.launch.local_process import LocalProcess, ProcessResources, describe_exit, read_lines, start_process
from headrace.launch.starts import Briefing, EngineStart, EnvironmentStart, LearnerStart, ScorerStart, Start


class NodeQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's query about a node, sent before a process is started there."""

    paths: dict[str, str]
    """Paths that must exist on the node, by the setting that names the path."""
    run_dir: str
    """Path of the run directory on the controller's machine."""
    mark: str
    """Name of a file that the controller has created in the run directory. If the file does not exist on the node, the
    node does not share the run directory."""


class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a node to a :class:`NodeQuery`."""

    address: str
    """Address at which other machines reach the node."""
    interface: str
    """Network interface with that address; empty if no interface has it."""
    headrace: str
    """Version of Headrace on the node."""
    missing: dict[str, str]
    """The paths of the query that do not exist on the node, by the setting that names the path."""
    shared: bool
    """Whether the node shares the controller's run directory under the same path."""
    port: int
    """A TCP port of the node that was free when the query was answered."""


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to a supervisor to start its process, sent as JSON."""

    name: str
    """Name of the process in the run."""
    briefing: Briefing
    """The settings of the process, and the addresses of its channel to the controller."""
    token: str
    """The run's secret, with which the process authenticates itself."""
    num_threads: int
    """Number of threads with which the process may compute."""
    log: str
    """Path of the log; empty if the node does not share the run directory. The log is then in the supervisor's
    directory, which is deleted when the process ends."""


class FarExit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process on another machine, as its supervisor reports it."""

    code: int
    """Exit code; negative for a signal."""
    words: str
    """How the process has ended, in words that follow its name in a sentence."""
    lines: list[str]
    """The last lines of the process's log."""


class ProcessSupervisor:
    """The supervisor of one process, from its start to its end. The controller calls its methods over the network, so
    they accept and return only bytes (JSON), strings and numbers."""

    def __init__(self, address: str) -> None:
        """Create a supervisor without a process. ``address`` is the address of this machine, under which other machines
        reach it."""
        self._address = address
        self._process: LocalProcess | None = None
        """The process; ``None`` before its start."""
        self._log = Path()
        """Path of the process's log."""
        for root in (Path(tempfile.gettempdir()), shared_memory_root()):
            sweep(root)  # removes directories that killed runs have left
        self._directory = Lease.create_directory(Path(tempfile.gettempdir()))
        """The lease of the supervisor's directory, which contains the log if the run directory is not shared."""

    def describe_node(self, query: bytes) -> bytes:
        """Return the encoded :class:`NodeReply` to the encoded :class:`NodeQuery` ``query``."""
        question, address = msgspec.json.decode(query, type=NodeQuery), self._address
        with socket.socket(get_socket_family(address)) as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        found = NodeReply(
            address=address,
            interface=_find_interface(address),
            headrace=__version__,
            missing={setting: path for setting, path in question.paths.items() if not Path(path).exists()},
            shared=Path(question.run_dir, question.mark).exists(),
            port=port,
        )
        return msgspec.json.encode(found)

    def clock_s(self) -> float:
        """Return the time of the node's monotonic clock in seconds, with which the controller aligns the times of
        different machines."""
        return RealClock().now()

    async def start(self, order: bytes) -> int:
        """Start the process that the encoded :class:`StartOrder` ``order`` describes, and return its process id. Raises
        ``OSError`` if the system refuses."""
        start = msgspec.json.decode(order, type=StartOrder)
        self._log = Path(start.log) if start.log else self._directory.path / "log"
        home = ProcessResources(
            directory=self._directory.path, log=self._log, token=start.token, num_threads=start.num_threads
        )
        self._process = await start_process(start.name, start.briefing, home)
        return self._process.pid

    async def wait_until_ended(self) -> bytes:
        """Wait until the process has ended, end its child processes, and return the encoded :class:`FarExit`. The
        supervisor's directory is deleted."""
        process = self._running_process()
        await process.wait()
        await process.kill()
        code = process.returncode
        assert code is not None
        answer = FarExit(code=code, words=describe_exit(code), lines=read_lines(self._log)[-LOG_LINES:])
        process.close()
        self._directory.end()
        return msgspec.json.encode(answer)

    async def drop(self) -> None:
        """Kill the process immediately. Without a process, delete the directory of the supervisor, which
        :meth:`wait_until_ended` deletes otherwise."""
        if self._process is None:
            self._directory.end()
        else:
            await self._process.kill()

    async def computed_s(self) -> float:
        """Return the processor time that the process has used or waited for, in seconds; 0 if it is no longer known."""
        return await self._running_process().computed_s()

    async def halt_reason(self) -> bytes:
        """Return the reason why the process makes no progress, such as a signal that has stopped it, as UTF-8 text;
        empty if it is not halted."""
        return (await self._running_process().halt_reason()).encode()

    def _running_process(self) -> LocalProcess:
        """Return the process. Raises :class:`~headrace.base.errors.RunError` if no process was started."""
        if self._process is None:
            raise RunError("this supervisor has no process", remedy="start one first")
        return self._process


def get_socket_family(address: str) -> socket.AddressFamily:
    """Return the socket family of an IP ``address``: IPv6 if it contains a colon, otherwise IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _find_interface(address: str) -> str:
    """Return the name of this machine's network interface with the IP ``address``; empty if no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return ""


def list_required_paths(start: Start) -> dict[str, str]:
    """Return the paths that must exist on the machine of a process with the settings ``start``, by the setting that
    names the path. Empty paths are left out.

    >>> list_required_paths(ScorerStart(reward={"kind": "function", "ref": "/code/reward.py:reward"}))
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
            paths = {f"env ({path})": path for path in _paths_in_entry(start.entry)}
    return {setting: path for setting, path in paths.items() if path}


def _paths_in_entry(entry: str) -> Sequence[str]:
    """Return the absolute paths in an environment's ``entry``: the file of a ``file.py:name``, or the words of a
    command that are files on this machine."""
    found = []
    for word in shlex.split(entry):
        file = word.rpartition(":")[0] if ".py:" in word else word
        if file.startswith("/") and (file != word or Path(file).exists()):
            found.append(file)
    return found
