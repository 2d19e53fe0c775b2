"""The starter of processes on this machine, and the processes that it starts.

Each process leads its own session (process group), so that it can be killed together with all processes that it has
started. It also ends when the process that started it ends or closes its end of a pipe, the *lifeline*. On Linux, a
worker that runs user code is *kept*: its parent is a supervisor process, which limits its resources and kills all
processes that it has started.
"""

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
from headrace.base.environ import (
    PROCESS_GONE,
    child_environment,
    part_environment,
    shared_memory_root,
    thread_times_ns,
    write_token,
)
from headrace.base.errors import RunError
from headrace.base.types.messages import controller
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Process, ProcessSpec, Rendezvous
from headrace.launch.clients.peer import Peer
from headrace.launch.forking import EXIT_UNKNOWN, ForkServer, ForkServerLost
from headrace.launch.leases import Lease
from headrace.launch.starts import (
    Briefing,
    EngineStart,
    EnvironmentStart,
    LearnerStart,
    ResourceLimits,
    ScorerStart,
    Start,
    extra_environment,
    write_briefing,
)
from headrace.rollout.scoring.sandbox.run import LAUNCHER

SUPERVISOR_S = 2.0
"""Seconds that a supervisor process may take to end its worker, before both are killed."""


STOPPED = {
    psutil.STATUS_STOPPED: "stopped (SIGSTOP; kill -CONT {pid} lets it continue)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
}
"""The process states in which the operating system does not run a process, with descriptions for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResources:
    """The directory, the log file, the token and the cores that a process uses on its machine."""

    directory: Path
    """The directory with the process's briefing; only this user can enter it."""
    log: Path
    """The file that receives the standard output and error of the process."""
    token: str
    """The run's secret. A process proves with it that it belongs to the run."""
    num_threads: int
    """The number of cores on which the libraries of the process may compute."""


class SpawnedProcess(Protocol):
    """A started or forked process of the operating system, with the methods that are needed to wait for its end."""

    @property
    def pid(self) -> int:
        """The process id on this machine."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        ...


class LocalStarter:
    """The :class:`~headrace.launch.child.Starter` of processes on this machine. They communicate through sockets in the
    run's directory. Engines and learners are forked from the fork server ``forks``; without a fork server, every
    process is a new interpreter."""

    host_address = LOOPBACK
    """The address at which processes on this machine reach it."""

    def __init__(self, forks: ForkServer | None = None) -> None:
        """Fork engines and learners from ``forks``; ``None`` means that every process is a new interpreter."""
        self._forks = forks

    async def start(self, site: Rendezvous, spec: ProcessSpec) -> tuple[Peer, Process]:
        """Open the sockets of the process ``spec``, and start it. Return the peer that communicates with the process,
        and the process itself. It has not loaded anything yet. Raises :class:`~headrace.base.errors.RunError` if the
        operating system refuses to start it."""
        channel = ControllerChannel(site.directory, spec.name, controller.Message)
        peer = spec.make_peer(channel)
        log = site.logs / f"{spec.name}.log"
        resources = ProcessResources(directory=site.directory, log=log, token=site.token, num_threads=spec.num_threads)
        try:
            briefing = Briefing(start=spec.start, addresses=channel.addresses)
            return peer, await start_process(spec.name, briefing, resources, self._forks)
        except OSError as error:
            peer.close()
            raise RunError(
                f"the process {spec.name} cannot be started: {error}",
                remedy=f"is there room in {site.directory} and {site.logs}, may more processes start (ulimit)?",
            ) from None
        except BaseException:
            peer.close()
            raise


class LocalProcess:
    """A process of the run on this machine (:class:`~headrace.launch.child.Process`).

    ``lifeline`` is the descriptor of this end of the process's lifeline. ``kept`` says whether its parent is a
    supervisor. ``memory`` is the shared-memory file that belongs to the process, or ``None``.
    """

    node = ""
    """The address of the process's machine: always empty, which means this machine."""

    def __init__(
        self, process: SpawnedProcess, lifeline: int, *, kept: bool = False, memory: Lease | None = None
    ) -> None:
        """Own ``process``, which was started before. The class describes the other arguments."""
        self._process = process
        self._lifeline = lifeline
        self._kept = kept
        self._memory = memory
        self._working_pid = 0
        """The id of the process that does the work; 0 while it is not known."""

    @property
    def pid(self) -> int:
        """The id of the started process. For a kept worker this is the supervisor."""
        return self._process.pid

    @property
    def working_pid(self) -> int:
        """The id of the process that does the work. For a kept worker this is a grandchild of the supervisor; until the
        grandchild exists, it is the id of the supervisor."""
        if not self._kept:
            return self.pid
        if not self._working_pid:
            with contextlib.suppress(*PROCESS_GONE, IndexError):  # ended, or not started yet
                self._working_pid = psutil.Process(self.pid).children()[0].children()[0].pid
        return self._working_pid or self.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        return self._process.returncode

    @property
    def accepts_shutdown(self) -> bool:
        """Whether the process ends by itself after an order to shut down. A kept worker does not: its supervisor ends
        it."""
        return not self._kept

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return await self._process.wait()

    async def kill(self) -> None:
        """Kill the process and its process group, and wait until it has ended."""
        if self._kept and self.returncode is None:
            await self._end_by_supervisor()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the process group has ended
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the working process has used or waited for."""
        return computed_s(self.working_pid)

    async def halt_reason(self) -> str:
        """Return why the operating system does not run the process, or a process that it has started, in words such as
        ``is stopped (SIGSTOP…)``; empty if none of them is stopped."""
        descriptions = await off_loop(lambda: describe_halted([self.pid, self.working_pid]))
        return descriptions.get(self.working_pid) or descriptions.get(self.pid, "")

    def describe_end(self) -> str:
        """Return how the process ended, in words that follow its name. Call this only after the process has ended."""
        assert self.returncode is not None
        return describe_exit(self.returncode)

    def last_lines(self, log: Path) -> list[str]:
        """Return the lines of the process's log file ``log``."""
        return read_lines(log)

    def close(self) -> None:
        """Close the lifeline of the process, which has ended, and remove its shared-memory file."""
        os.close(self._lifeline)
        if self._memory is not None:
            self._memory.end()

    async def _end_by_supervisor(self) -> None:
        """Make the supervisor kill the worker with all processes that it has started, and then end. Wait up to
        :data:`SUPERVISOR_S` for the supervisor to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SUPERVISOR_S):
                await self.wait()


async def start_process(
    name: str, briefing: Briefing, resources: ProcessResources, forks: ForkServer | None = None
) -> LocalProcess:
    """Start the process ``name`` on this machine with the settings in ``briefing`` and with ``resources``, and return
    it. An engine or a learner is forked from the fork server ``forks``, if there is one. Raises ``OSError`` if the
    operating system refuses to start it."""
    start, memory = briefing.start, None
    if isinstance(start, EngineStart) and start.own_weights:
        memory = Lease.create_file(shared_memory_root())
        start = msgspec.structs.replace(start, memory=str(memory.path))
    try:
        write_briefing(resources.directory / f"{name}.json", msgspec.structs.replace(briefing, start=start))
        process, lifeline = await _spawn(name, start, resources, forks)
    except BaseException:
        if memory is not None:
            memory.end()
        raise
    return LocalProcess(process, lifeline, kept=_is_kept(_resource_limits(start)), memory=memory)


async def _spawn(
    name: str, start: Start, resources: ProcessResources, forks: ForkServer | None
) -> tuple[SpawnedProcess, int]:
    """Start the process ``name`` with the settings ``start`` and with ``resources``, as a fork if ``forks`` is given
    and the role allows it, and otherwise as a new interpreter. Return the process, and the descriptor of this process's
    end of its lifeline."""
    with resources.log.open("ab") as output:

        async def start_interpreter(lifeline: int) -> SpawnedProcess:
            """Start the part as a new interpreter. The part ends when the other end of the pipe ``lifeline`` is
            closed."""
            environment = {**child_environment(resources.num_threads), **extra_environment(start)}
            return await asyncio.create_subprocess_exec(
                *_make_command_line(resources.directory, name, _resource_limits(start), lifeline),
                stdin=DEVNULL, stdout=output, stderr=output, pass_fds=(lifeline,),
                start_new_session=True, env=environment,
            )  # fmt: skip

        if forks is not None and not forks.lost and isinstance(start, EngineStart | LearnerStart):
            server, variables = forks, {**part_environment(resources.num_threads), **extra_environment(start)}

            async def fork(lifeline: int) -> SpawnedProcess:
                """Order the fork server to fork the part, with ``lifeline``, its end of the pipe, and its log."""
                return await server.fork(name, str(resources.directory), variables, (lifeline, output.fileno()))

            with contextlib.suppress(ForkServerLost):
                return await _spawn_with_lifeline(fork, resources.token)
        return await _spawn_with_lifeline(start_interpreter, resources.token)


async def _spawn_with_lifeline(
    spawn: Callable[[int], Awaitable[SpawnedProcess]], token: str
) -> tuple[SpawnedProcess, int]:
    """Create a pipe, the lifeline, and start a process by calling ``spawn`` with the descriptor of its read end. Return
    the process and the descriptor of the write end; the process ends when the write end is closed. The run's secret
    ``token`` is written to the pipe first, and the process reads it from there."""
    read_end, write_end = os.pipe()
    try:
        write_token(write_end, token)
        return await spawn(read_end), write_end
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)


def _resource_limits(start: Start) -> ResourceLimits | None:
    """Return the resource limits of a worker that runs user code, from its settings ``start``; ``None`` for other
    processes, and for workers without limits."""
    return start.keep if isinstance(start, ScorerStart | EnvironmentStart) else None


def _is_kept(limits: ResourceLimits | None) -> bool:
    """Return whether a process with the resource limits ``limits`` has a supervisor that enforces them. Only Linux
    supports this."""
    return limits is not None and sys.platform == "linux"


def _make_command_line(directory: Path, name: str, limits: ResourceLimits | None, lifeline: int) -> list[str]:
    """Return the command line that starts the process ``name`` or, if it has resource ``limits``, its supervisor, which
    starts the process. ``directory`` contains its briefing, and ``lifeline`` is the descriptor of its end of the
    lifeline."""
    program = [sys.executable, "-m", "headrace.launch.hosts.main", str(directory), name, str(lifeline)]
    if limits is None or not _is_kept(limits):
        return program
    memory_bytes = limits.memory_bytes or psutil.virtual_memory().total // 2
    limits_by_name = {**msgspec.structs.asdict(limits), "memory_bytes": memory_bytes}
    order = {"jailed": False, "argv": program, "line": lifeline, "limits": limits_by_name}
    return [sys.executable, "-I", "-S", "-B", str(LAUNCHER), msgspec.json.encode(order).decode()]


def read_lines(log: Path) -> list[str]:
    """Return the lines of a log file; empty if the file cannot be read."""
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def computed_s(pid: int) -> float:
    """Return the seconds of processor time that a process has used. On Linux the seconds that its threads have waited
    for a processor are added. 0 for a process that has ended."""
    threads = thread_times_ns(pid).values()
    if any(used + waited for used, waited in threads):
        return sum(used + waited for used, waited in threads) / 1e9
    try:
        times = psutil.Process(pid).cpu_times()
    except PROCESS_GONE:
        return 0.0
    return float(times.user + times.system)


def describe_halted(pids: Collection[int]) -> dict[int, str]:
    """Find the processes on this machine that a signal or a debugger has stopped. For each of ``pids`` that is stopped,
    or that has started a stopped process, return a description that follows its name."""
    parents: dict[int, int] = {}
    stopped: dict[int, str] = {}
    for pid in psutil.pids():
        with contextlib.suppress(*PROCESS_GONE):  # psutil.process_iter fails if a process ends meanwhile
            process = psutil.Process(pid)
            with process.oneshot():
                parents[pid], status = process.ppid(), process.status()
            if status in STOPPED:
                stopped[pid] = status
    texts: dict[int, str] = {}
    for pid in stopped:
        ancestor = pid
        while ancestor and ancestor not in pids:
            ancestor = parents.get(ancestor, 0)
        if ancestor and (ancestor == pid or ancestor not in texts):
            state = STOPPED[stopped[pid]].format(pid=pid)
            texts[ancestor] = f"is {state}" if ancestor == pid else f"has started process {pid}, which is {state}"
    return texts


def describe_exit(code: int) -> str:
    """Return a description of an exit code, in words that follow the name of the process.

    >>> describe_exit(-9)
    'was killed by SIGKILL (by hand, or because memory ran out)'
    """
    if code == EXIT_UNKNOWN:
        return "ended; how is not known, for the fork server that could have told was lost before"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (by hand, or because memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
