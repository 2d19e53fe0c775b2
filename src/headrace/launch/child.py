"""One process of a run, and who starts such processes.

Child        a process as the run sees it: its peer, its log, its end in words
  Process    the process itself, wherever it runs: a subprocess here (here.py), or kept on another machine
             (far/process.py)
Starter      starts processes: which machine, which sockets
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
from headrace.launch.forking import UNTOLD
from headrace.launch.hosts import LOST, SPOKE
from headrace.launch.starts import EnvironmentStart, ScorerStart, Start

GRACE_S = 5.0
"""How long a process may take to end after it was told to."""
LAST_WORDS_S = 2.0
"""How long the last words of a process that had some may still be on the way."""
LOG_LINES = 8
"""Last lines of a log that are quoted when its process dies."""
OLD_LOGS = 16
"""Workers that have died, of which the log stays: each has one of its own, and there is no end of them where user code
prints much and dies often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the processes of one run meet."""

    directory: Path
    """Sockets and start files; only this user can enter it."""
    logs: Path
    token: str
    """The run's secret."""
    on_spans: Callable[[Sequence[Span]], None]
    """Told what the processes were busy with."""
    old_logs: deque[Path] = field(default_factory=deque)
    """Of workers that have died, the oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process that is to be started."""

    name: str
    start: Start
    num_threads: int
    """Cores that its libraries may compute with."""
    make_peer: Callable[[ControllerChannel], Peer]


class Process(Protocol):
    """A process of the run, with all that it starts."""

    @property
    def pid(self) -> int:
        """On its machine."""
        ...

    @property
    def node(self) -> str:
        """The address of its machine; empty for this one."""
        ...

    @property
    def working_pid(self) -> int:
        """The process that does its work, below one that keeps it."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        ...

    @property
    def told_to_end(self) -> bool:
        """Whether it takes a farewell for what it is; one that cannot is just ended."""
        ...

    async def wait(self) -> int:
        """Until it has ended; its exit code."""
        ...

    async def kill(self) -> None:
        """End it now, and what it started, which may outlive it. Called once."""
        ...

    async def computed_s(self) -> float:
        """Processor time that it has used, or waited for; 0 where nobody can tell any more."""
        ...

    async def halted(self) -> str:
        """What keeps it, or a process that it has started, from going on, in words that follow its name, as in ``is
        stopped (SIGSTOP)``; empty where nothing does, or nobody can tell."""
        ...

    def ending(self) -> str:
        """How it ended, in words that follow its name."""
        ...

    def last_lines(self, log: Path) -> list[str]:
        """The end of its log."""
        ...

    def close(self) -> None:
        """Let go of it after its end."""
        ...


class Starter(Protocol):
    """Starts processes of a run."""

    @property
    def home(self) -> str:
        """The address of this machine, as its processes reach it."""
        ...

    async def start(self, site: Rendezvous, errand: ProcessSpec) -> tuple[Peer, Process]:
        """The process, which has not loaded anything yet, and the peer that speaks with it.

        :class:`~headrace.base.errors.HeadraceError` where that cannot be; nothing is left then.
        """
        ...


class Child:
    """A process and the peer that speaks with it."""

    def __init__(self, role: str, peer: Peer, process: Process, log: Path, old_logs: deque[Path] | None = None) -> None:
        """``old_logs``: where its log goes when it has died; ``None``: it stays, for whoever goes on in its name."""
        self.role = role
        self.peer = peer
        self._process = process
        self._log = log
        self._old_logs = old_logs
        self._killed = False
        self.closed = False

    @classmethod
    async def start(cls, site: Rendezvous, errand: ProcessSpec, starter: Starter) -> Child:
        """Start a process; it has not loaded anything yet when this returns."""
        peer, process = await starter.start(site, errand)
        old_logs = site.old_logs if isinstance(errand.start, ScorerStart | EnvironmentStart) else None
        return cls(errand.name, peer, process, site.logs / f"{errand.name}.log", old_logs)

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        return self._process.pid

    @property
    def node(self) -> str:
        """The address of its machine; empty for this one."""
        return self._process.node

    @property
    def working_pid(self) -> int:
        """The process that does its work, below one that keeps it."""
        return self._process.working_pid

    async def computed_s(self) -> float:
        """Processor time that it has used, or waited for; 0 where nobody can tell any more."""
        return await self._process.computed_s()

    async def halted(self) -> str:
        """See :meth:`Process.halted`."""
        return await self._process.halted()

    @property
    def killed(self) -> bool:
        """Whether a signal has ended it, or nobody can tell how it has ended: then it said nothing about itself."""
        code = self._process.returncode
        return code is not None and (code < 0 or code == UNTOLD)

    @property
    def state(self) -> str:
        """``starting``, ``ready``, ``ended``, or what keeps it from going on: ``stopped (SIGSTOP)``."""
        if self._process.returncode is not None:
            return "ended"
        if self.peer.halted:
            return self.peer.halted.removeprefix("is ")
        return "ready" if self.peer.ready.done() else "starting"

    @property
    def lost(self) -> bool:
        """Whether it has ended because another process did."""
        return self._process.returncode == LOST

    async def died(self) -> str:
        """Wait for its end, and end what it started; why, in words. One that has said why is not waited for long."""
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(self._process.wait())
            spoke = group.create_task(self.peer.spoke.wait())
            await asyncio.wait({ended, spoke}, return_when=asyncio.FIRST_COMPLETED)
            if spoke.done() or ended.result() == SPOKE:
                await asyncio.wait({ended, spoke}, timeout=LAST_WORDS_S)
            await self.kill()
            spoke.cancel()
        lines = self._process.last_lines(self._log)[-LOG_LINES:]
        self._retire_log()
        said = "".join(f"\n    {line[:300]}" for line in lines)
        where = f" on {self.node}" if self.node else ""
        return f"{self.role} (pid {self.pid}{where}) {self._process.ending()}{said}"

    def _retire_log(self) -> None:
        if self._old_logs is None:
            return
        self._old_logs.append(self._log)
        while len(self._old_logs) > OLD_LOGS:
            with contextlib.suppress(OSError):  # another machine's, or gone
                self._old_logs.popleft().unlink()

    async def end(self, farewell: object) -> None:
        """Tell it to end; make it end if it does not."""
        listens = self.peer.ready.done() and self._process.told_to_end  # not while it loads
        if self._process.returncode is None and listens:
            with contextlib.suppress(TimeoutError, RunError):
                self.peer.send(farewell)
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        await self.kill()
        self.close()

    async def kill(self) -> None:
        """End it now, and what it started, which may outlive it."""
        if not self._killed:
            self._killed = True  # once: later its number may be another's
            await self._process.kill()
        await self._process.wait()

    def close(self) -> None:
        """Let go of a process that has ended; whoever still waits for an answer of it is cancelled."""
        if not self.closed:
            self.closed = True
            self._process.close()
            self.peer.close()
