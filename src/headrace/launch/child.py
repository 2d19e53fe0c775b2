"""One process of a run on this machine: started, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import psutil

from headrace.environ import child_environment
from headrace.errors import RunError
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.peer import Peer
from headrace.launch.hosts import LOST, SPOKE
from headrace.launch.starts import EnvironmentStart, Keep, ScorerStart, Start, extra_environment, write_start
from headrace.scoring.sandbox.run import LAUNCHER
from headrace.types.messages import controller
from headrace.types.trace import Span

GRACE_S = 5.0
"""How long a process may take to end after it was told to."""
LAST_WORDS_S = 2.0
"""How long the last words of a process that had some may still be on the way."""
KEEPER_S = 2.0
"""How long whoever keeps a process may take to end it."""
LOG_LINES = 8
"""Last lines of a log that are quoted when its process dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the processes of one run meet."""

    directory: Path
    """Sockets and start files; only this user can enter it."""
    logs: Path
    token: str
    """The run's secret."""
    on_spans: Callable[[Sequence[Span]], None]
    """Told what the processes were busy with."""


class Child:
    """A process and the peer that speaks with it."""

    def __init__(self, role: str, peer: Peer, process: Process, log: Path, lifeline: int) -> None:
        self.role = role
        self.peer = peer
        self._process = process
        self._log = log
        self._lifeline = lifeline
        self._killed = False
        self._is_kept = False
        self._working_pid = 0
        self.closed = False

    @classmethod
    async def start(
        cls, site: Site, name: str, start: Start, num_threads: int, make_peer: Callable[[ControllerChannel], Peer]
    ) -> Child:
        """Start the process that ``start`` describes; it has not loaded anything yet when this returns.

        :class:`~headrace.errors.RunError` where the system refuses.
        """
        log = site.logs / f"{name}.log"
        peer = make_peer(ControllerChannel(site.directory, name, controller.Message))
        try:
            write_start(site.directory / f"{name}.json", start)
            environment = {**child_environment(site.token, num_threads), **extra_environment(start)}
            keep = start.keep if isinstance(start, ScorerStart | EnvironmentStart) else None
            program = partial(_program, site.directory, name, keep)
            process, lifeline = await cls._spawn(program, log, environment)
        except OSError as error:
            peer.close()
            raise RunError(
                f"the process {name} cannot be started: {error}",
                remedy=f"is there room in {site.directory} and {site.logs}, may more processes start (ulimit)?",
            ) from None
        except BaseException:
            peer.close()
            raise
        child = cls(name, peer, process, log, lifeline)
        child._is_kept = keep is not None and sys.platform == "linux"
        return child

    @staticmethod
    async def _spawn(
        program: Callable[[int], list[str]], log: Path, environment: dict[str, str]
    ) -> tuple[Process, int]:
        """The process, and our end of the pipe that keeps it alive."""
        with log.open("ab") as output:
            theirs, ours = os.pipe()
            try:
                process = await asyncio.create_subprocess_exec(
                    *program(theirs),
                    stdin=DEVNULL, stdout=output, stderr=output, pass_fds=(theirs,),
                    start_new_session=True, env=environment,
                )  # fmt: skip
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
        return process, ours

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def working_pid(self) -> int:
        """The process that does its work, below one that keeps it."""
        if not self._working_pid:
            self._working_pid = self.pid
            if self._is_kept and self.peer.ready.done():
                with contextlib.suppress(psutil.Error, IndexError):
                    self._working_pid = psutil.Process(self.pid).children()[0].children()[0].pid
        return self._working_pid

    @property
    def state(self) -> str:
        """``starting``, ``ready`` or ``ended``."""
        if self._process.returncode is not None:
            return "ended"
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
        code = await self._process.wait()
        return f"{self.role} (pid {self.pid}) {_exit_words(code)}{self._last_lines()}"

    async def end(self, farewell: object) -> None:
        """Tell it to end; make it end if it does not."""
        listens = self.peer.ready.done() and not self._is_kept  # not while it loads; one that is kept need not be asked
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
            self._killed = True  # once: later the number may be another's
            if self._is_kept and self._process.returncode is None:
                await self._ask_keeper()
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()

    async def _ask_keeper(self) -> None:
        """Who keeps it ends all of it, and then itself."""
        self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEPER_S):
                await self._process.wait()

    def close(self) -> None:
        """Let go of a process that has ended; whoever still waits for an answer of it is cancelled."""
        if not self.closed:
            self.closed = True
            os.close(self._lifeline)
            self.peer.close()

    def _last_lines(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        except OSError:
            return ""
        return "".join(f"\n    {line[:300]}" for line in lines)


def _program(directory: Path, name: str, keep: Keep | None, lifeline: int) -> list[str]:
    """What to start: the process itself, or what keeps it."""
    program = [sys.executable, "-m", "headrace.launch.hosts.main", str(directory), name, str(lifeline)]
    if keep is None or sys.platform != "linux":
        return program
    order = {"jailed": False, "argv": program, "line": lifeline, "limits": msgspec.structs.asdict(keep)}
    return [sys.executable, "-I", "-S", "-B", str(LAUNCHER), msgspec.json.encode(order).decode()]


def _exit_words(code: int) -> str:
    """An exit code in words.

    >>> _exit_words(-9)
    'was killed by SIGKILL (by hand, or because memory ran out)'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (by hand, or because memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
