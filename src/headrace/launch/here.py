"""Processes of this machine: each is a session of its own, and lives as long as a pipe that whoever started it
holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from headrace.base.clock import off_loop
from headrace.base.config.addresses import LOOPBACK
from headrace.base.environ import child_environment, part_environment, shared_memory_root, write_token
from headrace.base.errors import RunError
from headrace.base.types.messages import controller
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Process, ProcessSpec, Rendezvous
from headrace.launch.clients.peer import Peer
from headrace.launch.forking import UNTOLD, ForkServer, ForkServerLost
from headrace.launch.leases import Lease
from headrace.launch.starts import (
    Briefing,
    EngineStart,
    EnvironmentStart,
    Keep,
    LearnerStart,
    ScorerStart,
    Start,
    extra_environment,
    write_briefing,
)
from headrace.rollout.scoring.sandbox.run import LAUNCHER

KEEPER_S = 2.0
"""How long whoever keeps a process may take to end it."""


STOPPED = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP; kill -CONT {pid} lets it go on)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
}
"""States in which the system gives a process no time, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What a process finds on its machine."""

    directory: Path
    """Where its briefing is; only this user can enter it."""
    log: Path
    token: str
    """The run's secret."""
    num_threads: int
    """Cores that its libraries may compute with."""


class Running(Protocol):
    """A process of this machine, to whoever waits for its end."""

    @property
    def pid(self) -> int:
        """On this machine."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        ...

    async def wait(self) -> int:
        """Until it has ended; its exit code."""
        ...


class Here:
    """Starts processes of this machine, which speak over sockets of the run's directory: engines and learners as forks,
    where there is a process to fork them from."""

    home = LOOPBACK

    def __init__(self, forks: ForkServer | None = None) -> None:
        self._forks = forks

    async def start(self, site: Rendezvous, errand: ProcessSpec) -> tuple[Peer, Process]:
        """See :class:`~headrace.launch.child.Starter`."""
        channel = ControllerChannel(site.directory, errand.name, controller.Message)
        peer = errand.make_peer(channel)
        log = site.logs / f"{errand.name}.log"
        home = Home(directory=site.directory, log=log, token=site.token, num_threads=errand.num_threads)
        try:
            briefing = Briefing(start=errand.start, ends=channel.ends)
            return peer, await begun(errand.name, briefing, home, self._forks)
        except OSError as error:
            peer.close()
            raise RunError(
                f"the process {errand.name} cannot be started: {error}",
                remedy=f"is there room in {site.directory} and {site.logs}, may more processes start (ulimit)?",
            ) from None
        except BaseException:
            peer.close()
            raise


class LocalProcess:
    """See :class:`~headrace.launch.child.Process`."""

    node = ""

    def __init__(self, process: Running, lifeline: int, *, kept: bool = False, memory: Lease | None = None) -> None:
        self._process = process
        self._lifeline = lifeline
        self._kept = kept
        self._memory = memory
        self._working_pid = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def working_pid(self) -> int:
        if not self._kept:
            return self.pid
        if not self._working_pid:
            with contextlib.suppress(psutil.Error, IndexError):  # it is not there yet, or not any more
                self._working_pid = psutil.Process(self.pid).children()[0].children()[0].pid
        return self._working_pid or self.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def told_to_end(self) -> bool:
        return not self._kept

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        if self._kept and self.returncode is None:
            await self._ask_keeper()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()

    async def computed_s(self) -> float:
        return computed_s(self.working_pid)

    async def halted(self) -> str:
        found = await off_loop(lambda: halted_below([self.pid, self.working_pid]))
        return found.get(self.working_pid) or found.get(self.pid, "")

    def ending(self) -> str:
        assert self.returncode is not None
        return exit_words(self.returncode)

    def last_lines(self, log: Path) -> list[str]:
        return lines_of(log)

    def close(self) -> None:
        os.close(self._lifeline)
        if self._memory is not None:
            self._memory.end()

    async def _ask_keeper(self) -> None:
        """Who keeps it ends all of it, and then itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEPER_S):
                await self.wait()


async def begun(name: str, briefing: Briefing, home: Home, forks: ForkServer | None = None) -> LocalProcess:
    """A process of this machine that is what its briefing says; ``OSError`` where the system refuses."""
    start, memory = briefing.start, None
    if isinstance(start, EngineStart) and start.own_weights:
        memory = Lease.file(shared_memory_root())
        start = msgspec.structs.replace(start, memory=str(memory.path))
    try:
        write_briefing(home.directory / f"{name}.json", msgspec.structs.replace(briefing, start=start))
        process, lifeline = await _running(name, start, home, forks)
    except BaseException:
        if memory is not None:
            memory.end()
        raise
    return LocalProcess(process, lifeline, kept=_is_kept(_keep(start)), memory=memory)


async def _running(name: str, start: Start, home: Home, forks: ForkServer | None) -> tuple[Running, int]:
    """The process, and our end of the pipe that keeps it alive."""
    with home.log.open("ab") as output:

        async def new(lifeline: int) -> Running:
            environment = {**child_environment(home.num_threads), **extra_environment(start)}
            return await asyncio.create_subprocess_exec(
                *_program(home.directory, name, _keep(start), lifeline),
                stdin=DEVNULL, stdout=output, stderr=output, pass_fds=(lifeline,),
                start_new_session=True, env=environment,
            )  # fmt: skip

        if forks is not None and not forks.lost and isinstance(start, EngineStart | LearnerStart):
            server, more = forks, {**part_environment(home.num_threads), **extra_environment(start)}

            async def fork(lifeline: int) -> Running:
                return await server.fork(name, str(home.directory), more, (lifeline, output.fileno()))

            with contextlib.suppress(ForkServerLost):
                return await _on_a_line(fork, home.token)
        return await _on_a_line(new, home.token)


async def _on_a_line(make: Callable[[int], Awaitable[Running]], token: str) -> tuple[Running, int]:
    """What ``make`` makes with one end of a pipe, and the other end: it lives while that is open. The run's token
    is the first that comes through it, and is gone once it has been read."""
    theirs, ours = os.pipe()
    try:
        write_token(ours, token)
        return await make(theirs), ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def _keep(start: Start) -> Keep | None:
    return start.keep if isinstance(start, ScorerStart | EnvironmentStart) else None


def _is_kept(keep: Keep | None) -> bool:
    return keep is not None and sys.platform == "linux"


def _program(directory: Path, name: str, keep: Keep | None, lifeline: int) -> list[str]:
    """What to start: the process itself, or what keeps it."""
    program = [sys.executable, "-m", "headrace.launch.hosts.main", str(directory), name, str(lifeline)]
    if keep is None or not _is_kept(keep):
        return program
    limits = {**msgspec.structs.asdict(keep), "memory_bytes": keep.memory_bytes or psutil.virtual_memory().total // 2}
    order = {"jailed": False, "argv": program, "line": lifeline, "limits": limits}
    return [sys.executable, "-I", "-S", "-B", str(LAUNCHER), msgspec.json.encode(order).decode()]


def lines_of(log: Path) -> list[str]:
    """A log, as far as it can be read."""
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def computed_s(pid: int) -> float:
    """Processor time that a process has used, and on Linux the time that its threads have waited for a processor; 0
    where nobody can tell any more."""
    told_ns = 0
    for told in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
            used, waited, _ = told.read_text().split()
            told_ns += int(used) + int(waited)
    if told_ns:
        return told_ns / 1e9
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(times.user + times.system)


def halted_below(pids: Collection[int]) -> dict[int, str]:
    """What keeps processes of this machine from going on: for each of ``pids`` that a signal or a debugger has stopped,
    or below which it has stopped one that it started, that in words which follow its name."""
    parents: dict[int, int] = {}
    stopped: dict[int, str] = {}
    for process in psutil.process_iter(["ppid", "status"]):
        parents[process.pid] = process.info["ppid"]
        if process.info["status"] in STOPPED:
            stopped[process.pid] = process.info["status"]
    found: dict[int, str] = {}
    for pid in stopped:
        above = pid
        while above and above not in pids:
            above = parents.get(above, 0)
        if above and (above == pid or above not in found):
            words = STOPPED[stopped[pid]].format(pid=pid)
            found[above] = f"is {words}" if above == pid else f"has started process {pid}, which is {words}"
    return found


def exit_words(code: int) -> str:
    """An exit code in words.

    >>> exit_words(-9)
    'was killed by SIGKILL (by hand, or because memory ran out)'
    """
    if code == UNTOLD:
        return "ended; how is not known, for the fork server that could have told was lost before"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (by hand, or because memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
