"""Runs ``headrace train`` as a subprocess, observes it from outside, and kills one of its processes.

A life is one process of the program with its child processes. What it leaves behind is found by its process id, which
is part of the names of its directory and weight buffer, and hence of its children's arguments.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from headrace.base.clock import RealClock
from headrace.base.environ import shared_memory_root
from headrace.launch.leases import sweep
from headrace.wings.bench.program import run_training

Part = Literal["controller", "engine", "learner", "scorer", "environment", "rollout"]
MAX_LIFE_S = 300.0
"""Longest duration of one life, on the slowest machine."""
HUNG = 124
"""Exit code recorded for a life that did not end by itself."""
MUST_BE_GONE_S = 30.0
"""Time after which processes that outlived their controller count as left behind."""
_POLL_S = 0.002
_STEP = re.compile(r"step (\d+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment at which a process is killed."""

    part: Part
    phase: Literal["start", "step", "snapshot"]
    """Start of the delay: the start of the program, the end of a step, or the beginning of a step's snapshot."""
    step: int = 0
    """Number of finished steps, in the phases ``step`` and ``snapshot``."""
    delay_s: float
    """Seconds from there to the kill."""

    def __str__(self) -> str:
        since = "start" if self.phase == "start" else f"{self.phase} {self.step}"
        return f"{self.part} {self.delay_s:.3f} s after {since}"


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of a run and its end."""

    pid: int
    is_resumed: bool
    """Whether the program was started with ``--resume``."""
    kill: Moment | None = None
    """The kill that happened; ``None``: the run ended before it."""
    exit_code: int = 0
    """Exit code; negative: the signal that ended the program."""
    stderr: str = ""
    """Standard error."""
    stdout_lines: list[str] = field(default_factory=list)
    """Lines of standard output."""
    started_s: float = 0.0
    """Seconds from the start of the program to the first step."""
    seconds: float = 0.0
    """Seconds from the start of the program to its end."""
    message_s: float | None = None
    """Seconds from the kill to the end of the program with an error message; ``None`` if it continued or was itself
    killed."""
    cleanup_s: float | None = None
    """Seconds from the kill of the controller to the end of its last child; ``None`` if another process was killed."""
    leftovers: list[str] = field(default_factory=list)
    """Processes that still ran when they should have ended."""

    @property
    def num_steps(self) -> int:
        """Return the number of finished steps that this life printed."""
        return max((int(match[1]) for line in self.stdout_lines if (match := _STEP.match(line))), default=0)


async def run_life(arguments: Sequence[str], run_dir: Path, moment: Moment | None, *, resume: bool) -> Life:
    """Run one life of the run in ``run_dir``: ``headrace train`` with ``arguments``, with ``resume`` as a continuation
    of an earlier life. A process is killed at ``moment`` (``None``: no process is killed)."""
    clock = RealClock()
    began_s = clock.now()
    async with run_training(arguments, resume=resume) as program:
        life = Life(pid=program.pid, is_resumed=resume)
        watch = _Watch(program=program, run_dir=run_dir, life=life, began_s=began_s)
        try:
            async with asyncio.timeout(MAX_LIFE_S), asyncio.TaskGroup() as group:
                group.create_task(watch.read())
                errors = group.create_task(_read_all(program.stderr))
                killed_s = await watch.kill(moment) if moment is not None else None
                life.exit_code = await program.wait()
        except TimeoutError:
            life.exit_code, life.stderr = (
                HUNG,
                f"not over after {MAX_LIFE_S:g} s; its last line: {life.stdout_lines[-1:]}",
            )
            return life
        life.stderr = errors.result()
        now_s = clock.now()
        life.seconds = now_s - began_s
        if killed_s is not None and moment is not None:
            life.kill = moment
            if moment.part in ("engine", "learner", "rollout") and life.exit_code:
                life.message_s = now_s - killed_s
            await _wait_until_gone(life, now_s if killed_s is None else killed_s)
        return life


@dataclass(slots=True, kw_only=True)
class _Watch:
    """An observer of a life that also performs the kill."""

    program: asyncio.subprocess.Process
    run_dir: Path
    life: Life
    began_s: float
    """Time at which the program was started."""

    async def read(self) -> None:
        assert self.program.stdout is not None
        async for line in self.program.stdout:
            if not self.life.num_steps and _STEP.match(line.decode()):
                self.life.started_s = RealClock().now() - self.began_s
            self.life.stdout_lines.append(line.decode())

    async def kill(self, moment: Moment) -> float | None:
        """Kill the process at ``moment`` and return the time of the kill; ``None`` if the program, or the process to
        kill, had ended before."""
        while self.program.returncode is None:
            if self._has_come(moment):
                await asyncio.sleep(moment.delay_s)
                return await self._kill_when_present(moment.part)
            await asyncio.sleep(_POLL_S)
        return None

    async def _kill_when_present(self, part: Part) -> float | None:
        """Kill the process of ``part`` as soon as it exists."""
        while self.program.returncode is None:
            pid = self.program.pid if part == "controller" else _find_pid(self.program.pid, part)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return RealClock().now()
            await asyncio.sleep(_POLL_S)
        return None

    def _has_come(self, moment: Moment) -> bool:
        if moment.phase == "start" or self.life.num_steps > moment.step:
            return True
        if moment.phase == "step":
            return self.life.num_steps == moment.step
        return any((self.run_dir / "checkpoints").glob(f"step-{moment.step:06d}*"))


def _find_pid(controller: int, role: Part) -> int | None:
    """Return the process id of a part once it runs its own program: a fork first looks like its parent."""
    with suppress(psutil.Error):
        for child in psutil.Process(controller).children(recursive=True):  # some are forks of a fork
            words = _command_line(child)
            if "headrace.launch.hosts.main" in words and words[-2].startswith(role):
                return child.pid
    return None


def _command_line(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


async def _wait_until_gone(life: Life, since_s: float) -> None:
    """Wait until every process of the life has ended, and record those that have not."""
    clock = RealClock()
    while left := _processes(life.pid):
        if clock.now() - since_s > MUST_BE_GONE_S:
            life.leftovers = left
            return
        await asyncio.sleep(0.02)
    if life.kill is not None and life.kill.part == "controller":
        life.cleanup_s = clock.now() - since_s


def _processes(controller: int) -> list[str]:
    """Return the command lines of the running children of a controller."""
    commands = (" ".join(_command_line(process)) for process in psutil.process_iter())
    return [command for command in commands if f"headrace-{controller}-" in command]


def leftovers(lives: Sequence[Life], run_dir: Path) -> list[str]:
    """Return what the lives of a finished run in ``run_dir`` left behind: processes, buffers, directories, unfinished
    files. If the last life was killed after it had reported its end, its leftovers are removed first, as the start of
    any other run would."""
    left = [command for life in lives for command in (*life.leftovers, *_processes(life.pid))]
    roots = {shared_memory_root(), Path(tempfile.gettempdir())}
    if lives[-1].kill is not None:
        for root in roots:
            sweep(root)
    left += [str(path) for root in roots for life in lives for path in root.glob(f"headrace-{life.pid}-*")]
    left += [str(path) for path in run_dir.rglob("*.tmp*")]
    return left


async def _read_all(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return (await stream.read()).decode()
