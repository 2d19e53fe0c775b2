"""One process of a run, and the contract of a starter, which starts processes.

Child        a process as the run sees it: its peer (the controller's end of the channel), its log, the cause of its end
  Process    the process itself, wherever it runs: on this machine (local_process.py), or on another machine
             (far/process.py)
Starter      starts processes: chooses the machine and the sockets
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.base.errors import RunError
from headrace.base.types.trace import Span
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.peer import Peer
from headrace.launch.forking import EXIT_UNKNOWN
from headrace.launch.hosts import EXIT_RANK_LOST, EXIT_REPORTED
from headrace.launch.starts import EnvironmentStart, ScorerStart, Start

GRACE_S = 5.0
"""Seconds that a process may take to end after the order to shut down."""
LAST_REPORT_S = 2.0
"""Seconds to wait for the end of a process that has reported an error. Also the seconds to wait for the report of a
process whose exit code says that it has sent one."""
LOG_LINES = 8
"""Number of log lines that are quoted when a process dies."""
OLD_LOGS = 16
"""Number of dead workers whose logs are kept. Every worker has its own log file, so user code that prints much and dies
often would otherwise fill the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The directories, the token and the span callback that all processes of one run share."""

    directory: Path
    """The directory of the sockets and the briefings. Only this user can enter it."""
    logs: Path
    """The directory of the log files."""
    token: str
    """The run's secret. A process proves with it that it belongs to the run."""
    on_spans: Callable[[Sequence[Span]], None]
    """A callback that receives the spans (times of activity) that the processes report."""
    old_logs: deque[Path] = field(default_factory=deque)
    """The log files of workers that have died, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """The description of a process to start: its name, its settings and its cores. A :class:`Starter` starts it."""

    name: str
    """The name of the process in messages, which is also the name of its log file, such as ``engine-0``."""
    start: Start
    """The settings that the process receives when it starts. Their class determines its role."""
    num_threads: int
    """The number of cores on which the libraries of the process may compute."""
    make_peer: Callable[[ControllerChannel], Peer]
    """Creates the peer, the controller's client of the process, for the process's channel."""


class Process(Protocol):
    """A process of the run, together with all processes that it starts."""

    @property
    def pid(self) -> int:
        """The process id on the machine where the process runs."""
        ...

    @property
    def node(self) -> str:
        """The address of the machine where the process runs; empty for this machine."""
        ...

    @property
    def working_pid(self) -> int:
        """The id of the process that does the work. It differs from ``pid`` if ``pid`` is a supervisor that has started
        the work in a child process."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        ...

    @property
    def accepts_shutdown(self) -> bool:
        """Whether the process ends by itself after an order to shut down. If not, it is killed at once."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        ...

    async def kill(self) -> None:
        """Kill the process now, together with all processes that it has started, which could outlive it. This is called
        once."""
        ...

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used or waited for; 0 if they cannot be
        determined."""
        ...

    async def halt_reason(self) -> str:
        """Return why the operating system does not run the process, in words that follow its name, such as ``is stopped
        (SIGSTOP)`` or ``is stopped by a debugger``. A stopped process that it has started counts, too. The text is
        empty if none of them is stopped, or if that cannot be determined."""
        ...

    def describe_end(self) -> str:
        """Return how the process ended, in words that follow its name in a message."""
        ...

    def last_lines(self, log: Path) -> list[str]:
        """Return the last lines of the process's log file ``log``."""
        ...

    def close(self) -> None:
        """Release the resources of the process after its end."""
        ...


class Starter(Protocol):
    """An object that starts processes of a run, on this machine or on the machines of a cluster. It chooses the machine
    of a process and opens its sockets."""

    @property
    def host_address(self) -> str:
        """The address at which the processes of the run reach this machine."""
        ...

    async def start(self, site: Rendezvous, spec: ProcessSpec) -> tuple[Peer, Process]:
        """Start the process ``spec``; ``site`` contains the directories and the token of the run. Return the peer that
        communicates with the process, and the process itself. It has not loaded anything yet.

        Raises :class:`~headrace.base.errors.HeadraceError` if the process cannot be started. In that case no resources
        of it remain.
        """
        ...


class Child:
    """A process of the run, together with the peer that communicates with it. The launcher has one for each process,
    waits for its end (:meth:`wait_for_death`) and ends it (:meth:`end`)."""

    def __init__(self, role: str, peer: Peer, process: Process, log: Path, old_logs: deque[Path] | None = None) -> None:
        """Combine ``process`` with its ``peer``. ``role`` is the name of the process in messages, and ``log`` is its
        log file. When the process has died, its log file is appended to ``old_logs``. If ``old_logs`` is ``None``, the
        file stays for the next process with the same name."""
        self.role = role
        self.peer = peer
        self._process = process
        self._log = log
        self._old_logs = old_logs
        self._kill_requested = False
        """Whether :meth:`kill` was called."""
        self.closed = False
        """Whether the resources of the ended process were released."""

    @classmethod
    async def start(cls, site: Rendezvous, spec: ProcessSpec, starter: Starter) -> Child:
        """Start the process ``spec`` with ``starter`` and return it. It has not loaded anything yet. ``site`` contains
        the directories and the token of the run. The log files of workers, which run user code, are kept only for the
        workers that died last."""
        peer, process = await starter.start(site, spec)
        old_logs = site.old_logs if isinstance(spec.start, ScorerStart | EnvironmentStart) else None
        return cls(spec.name, peer, process, site.logs / f"{spec.name}.log", old_logs)

    @property
    def pid(self) -> int:
        """The process id on the machine where the process runs."""
        return self._process.pid

    @property
    def node(self) -> str:
        """The address of the machine where the process runs; empty for this machine."""
        return self._process.node

    @property
    def working_pid(self) -> int:
        """The id of the process that does the work. It differs from ``pid`` if ``pid`` is a supervisor that has started
        the work in a child process."""
        return self._process.working_pid

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used or waited for; 0 if they cannot be
        determined."""
        return await self._process.computed_s()

    async def halt_reason(self) -> str:
        """Return why the operating system does not run the process; see :meth:`Process.halt_reason`."""
        return await self._process.halt_reason()

    @property
    def killed(self) -> bool:
        """Whether a signal has killed the process, or it has ended in an unknown way. In both cases it could not report
        an error."""
        code = self._process.returncode
        return code is not None and (code < 0 or code == EXIT_UNKNOWN)

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``ended``, or the reason why the process does not run, such as ``stopped
        (SIGSTOP)``."""
        if self._process.returncode is not None:
            return "ended"
        if self.peer.halted:
            return self.peer.halted.removeprefix("is ")
        return "ready" if self.peer.ready.done() else "starting"

    @property
    def ended_with_another_rank(self) -> bool:
        """Whether the process is a rank of the learner that has ended only because another rank had ended."""
        return self._process.returncode == EXIT_RANK_LOST

    async def wait_for_death(self) -> str:
        """Wait for the end of the process, kill all processes that it has started, and return the cause in words, with
        its machine and its GPUs, followed by the last lines of its log. A process that has reported an error and does
        not end within :data:`LAST_REPORT_S` is killed."""
        async with asyncio.TaskGroup() as group:
            end_task = group.create_task(self._process.wait())
            report_task = group.create_task(self.peer.reported.wait())
            await asyncio.wait({end_task, report_task}, return_when=asyncio.FIRST_COMPLETED)
            if report_task.done() or end_task.result() == EXIT_REPORTED:
                await asyncio.wait({end_task, report_task}, timeout=LAST_REPORT_S)
            await self.kill()
            report_task.cancel()
        lines = self._process.last_lines(self._log)[-LOG_LINES:]
        self._retire_log()
        quotation = "".join(f"\n    {line[:300]}" for line in lines)
        gpus = self.peer.get_fact("place")
        location = (f" on {self.node}" if self.node else "") + (f", {gpus}" if gpus else "")
        return f"{self.role} (pid {self.pid}{location}) {self._process.describe_end()}{quotation}"

    def _retire_log(self) -> None:
        """Append the log file of the ended process to the old logs, and delete the oldest file if there are more than
        :data:`OLD_LOGS`."""
        if self._old_logs is None:
            return
        self._old_logs.append(self._log)
        while len(self._old_logs) > OLD_LOGS:
            with contextlib.suppress(OSError):  # the file is on another machine, or gone
                self._old_logs.popleft().unlink()

    async def end(self, farewell: object) -> None:
        """Order the process to shut down with the message ``farewell`` (:meth:`shut_down`), and release it."""
        await self.shut_down(farewell)
        self.close()

    async def shut_down(self, farewell: object) -> None:
        """Order the process to shut down with the message ``farewell``, and kill it if it does not end within
        :data:`GRACE_S`. A process that is still starting is killed at once."""
        can_shut_down = self.peer.ready.done() and self._process.accepts_shutdown  # a loading process reads no orders
        if self._process.returncode is None and can_shut_down:
            with contextlib.suppress(TimeoutError, RunError):
                self.peer.send(farewell)
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the process now, together with all processes that it has started, which could outlive it."""
        if not self._kill_requested:
            self._kill_requested = True  # only once, because later another process may have the same id
            await self._process.kill()
        await self._process.wait()

    def close(self) -> None:
        """Release the resources of a process that has ended, and cancel the tasks that still wait for its answers."""
        if not self.closed:
            self.closed = True
            self._process.close()
            self.peer.close()
