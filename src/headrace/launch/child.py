"""One process of a run, and the contract of what starts processes.

Child        a process as the run sees it: its peer (the controller's end of the channel), its log, the cause of its end
  Process    the process itself, wherever it runs: a process of this machine (local_process.py), or one that is kept on
             another machine (far/process.py)
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
"""Seconds that a process may take to end after it was ordered to shut down."""
LAST_WORDS_S = 2.0
"""Seconds to wait for the end of a process that has reported an error, or for the report of one that has ended with the
exit code that announces it."""
LOG_LINES = 8
"""Number of log lines that are quoted when a process dies."""
OLD_LOGS = 16
"""Number of dead workers whose logs are kept. Every worker has a log file of its own, and user code that prints much
and dies often would otherwise fill the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The directories, the token and the span receiver that all processes of one run share."""

    directory: Path
    """The directory of sockets and briefings; only this user can enter it."""
    logs: Path
    """The directory of the log files."""
    token: str
    """The run's secret, by which the parts of a run recognise each other."""
    on_spans: Callable[[Sequence[Span]], None]
    """Called with the spans (times of activity) that the processes report."""
    old_logs: deque[Path] = field(default_factory=deque)
    """The logs of workers that have died, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process that is to be started: its name, its settings and its cores. A :class:`Starter` starts it."""

    name: str
    """Its name in messages, and the name of its log file, such as ``engine-0``."""
    start: Start
    """The settings that it receives when it starts; their class says which role it has."""
    num_threads: int
    """The number of cores that the libraries of the process may compute with."""
    make_peer: Callable[[ControllerChannel], Peer]
    """Makes the controller's end of the conversation with the process, from its channel."""


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
        """The id of the process that does the work; it differs from ``pid`` where a supervisor is the parent."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        ...

    @property
    def accepts_shutdown(self) -> bool:
        """Whether the process ends by itself when it is ordered to shut down; otherwise it is killed at once."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        ...

    async def kill(self) -> None:
        """Kill the process now, and all that it started, which may live longer than itself. This is called once."""
        ...

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used or waited for; 0 if that cannot be found
        out."""
        ...

    async def halted(self) -> str:
        """Describe what has halted the process, or one that it has started, such as ``is stopped (SIGSTOP)``.
        Return an empty text if it is not halted, or if that cannot be found out."""
        ...

    def ending(self) -> str:
        """Describe how the process ended, in words that follow its name."""
        ...

    def last_lines(self, log: Path) -> list[str]:
        """Return the last lines of ``log``, the file to which the process wrote."""
        ...

    def close(self) -> None:
        """Release the resources that belong to the process, after its end."""
        ...


class Starter(Protocol):
    """A launcher's way to start processes of a run: on this machine, or on the machines of a cluster. It chooses the
    machine of a process and opens its sockets."""

    @property
    def host_address(self) -> str:
        """The address of this machine, as the processes of the run reach it."""
        ...

    async def start(self, site: Rendezvous, spec: ProcessSpec) -> tuple[Peer, Process]:
        """Start the process ``spec`` with the directories and the token ``site`` of the run. Return the peer that
        communicates with it, and the process, which has not loaded anything yet.

        Raises :class:`~headrace.base.errors.HeadraceError` if the process cannot be started; then nothing of it is
        left.
        """
        ...


class Child:
    """A process of the run, with the peer that communicates with it. The launcher owns one for each process, waits for
    its end (:meth:`died`) and ends it (:meth:`end`)."""

    def __init__(self, role: str, peer: Peer, process: Process, log: Path, old_logs: deque[Path] | None = None) -> None:
        """``role`` is the name of the process in messages, and ``log`` its log file. ``old_logs`` is the list that
        receives the log when the process has died; ``None`` keeps the file for the process that is started next under
        the same name."""
        self.role = role
        self.peer = peer
        self._process = process
        self._log = log
        self._old_logs = old_logs
        self._killed = False
        self.closed = False

    @classmethod
    async def start(cls, site: Rendezvous, spec: ProcessSpec, starter: Starter) -> Child:
        """Start the process ``spec`` with ``starter``, and return it; it has not loaded anything yet then. The logs of
        workers, which run user code, are kept only for the last that died."""
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
        """The id of the process that does the work; it differs from ``pid`` where a supervisor is the parent."""
        return self._process.working_pid

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used or waited for; 0 if that cannot be found
        out."""
        return await self._process.computed_s()

    async def halted(self) -> str:
        """Describe what has halted the process, or one that it has started, such as ``is stopped (SIGSTOP)``; an empty
        text if it is not halted, or if that cannot be found out."""
        return await self._process.halted()

    @property
    def killed(self) -> bool:
        """Whether the process has ended by a signal or in an unknown manner: in both cases it could not report an error
        of its own."""
        code = self._process.returncode
        return code is not None and (code < 0 or code == EXIT_UNKNOWN)

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``ended``, or the reason why the process is halted, as in ``stopped (SIGSTOP)``."""
        if self._process.returncode is not None:
            return "ended"
        if self.peer.halted:
            return self.peer.halted.removeprefix("is ")
        return "ready" if self.peer.ready.done() else "starting"

    @property
    def ended_with_another_rank(self) -> bool:
        """Whether the process, a rank of the learner, has ended only because another rank had ended."""
        return self._process.returncode == EXIT_RANK_LOST

    async def died(self) -> str:
        """Wait for the end of the process, kill what it started, and return the cause in words, followed by the last
        lines of its log. A process that has reported an error and does not end within :data:`LAST_WORDS_S` is
        killed."""
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(self._process.wait())
            reported = group.create_task(self.peer.reported.wait())
            await asyncio.wait({ended, reported}, return_when=asyncio.FIRST_COMPLETED)
            if reported.done() or ended.result() == EXIT_REPORTED:
                await asyncio.wait({ended, reported}, timeout=LAST_WORDS_S)
            await self.kill()
            reported.cancel()
        lines = self._process.last_lines(self._log)[-LOG_LINES:]
        self._retire_log()
        quoted = "".join(f"\n    {line[:300]}" for line in lines)
        where = f" on {self.node}" if self.node else ""
        return f"{self.role} (pid {self.pid}{where}) {self._process.ending()}{quoted}"

    def _retire_log(self) -> None:
        """Keep the log of the process that has ended, and delete the oldest if there are more than :data:`OLD_LOGS`."""
        if self._old_logs is None:
            return
        self._old_logs.append(self._log)
        while len(self._old_logs) > OLD_LOGS:
            with contextlib.suppress(OSError):  # the file is on another machine, or gone
                self._old_logs.popleft().unlink()

    async def end(self, farewell: object) -> None:
        """Let the process shut down (:meth:`shut_down`), and release it."""
        await self.shut_down(farewell)
        self.close()

    async def shut_down(self, farewell: object) -> None:
        """Order the process to shut down with the message ``farewell``, and kill it if it does not end within
        :data:`GRACE_S`. A process that is still starting is killed at once."""
        listens = self.peer.ready.done() and self._process.accepts_shutdown  # a process that loads does not read orders
        if self._process.returncode is None and listens:
            with contextlib.suppress(TimeoutError, RunError):
                self.peer.send(farewell)
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the process now, and all that it started, which may live longer than itself."""
        if not self._killed:
            self._killed = True  # once: later, another process may have the same id
            await self._process.kill()
        await self._process.wait()

    def close(self) -> None:
        """Release a process that has ended, and cancel the tasks that still wait for its answers."""
        if not self.closed:
            self.closed = True
            self._process.close()
            self.peer.close()
