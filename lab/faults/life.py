"""The program ``headrace train`` as a user has it, watched from outside, and killed part by part.

A life is one process of the program with its parts. What it leaves behind is looked for by its process id, which is in
the name of its directory, of its weight buffer, and so in the arguments of every part.
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
from headrace.wings.bench.program import training

Part = Literal["controller", "engine", "learner", "scorer", "environment"]
LIFE_MAY_TAKE_S = 300.0
"""Longest life of a run of a few steps, on the slowest machine."""
HUNG = 124
"""The exit code of a life that did not end by itself."""
MUST_BE_GONE_S = 30.0
"""How long to look for processes that outlived their controller before they count as left behind."""
_POLL_S = 0.002
_STEP = re.compile(r"step (\d+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a part is killed."""

    part: Part
    phase: Literal["start", "step", "snapshot"]
    """Counted from the start of the program; from the end of a step; from when the snapshot of a step is begun."""
    step: int = 0
    """How many steps the run has behind it, in the phases ``step`` and ``snapshot``."""
    delay_s: float
    """After that."""

    def __str__(self) -> str:
        since = "start" if self.phase == "start" else f"{self.phase} {self.step}"
        return f"{self.part} {self.delay_s:.3f} s after {since}"


@dataclass(slots=True, kw_only=True)
class Life:
    """One life of a run, and its end."""

    pid: int
    resumed: bool
    """Whether it was asked to ``--resume``."""
    killed: Moment | None = None
    """Which part was really killed, and when; ``None``: the run was over before."""
    exit_code: int = 0
    """Negative: the signal that ended it."""
    words: str = ""
    """On standard error."""
    lines: list[str] = field(default_factory=list)
    """On standard output."""
    started_s: float = 0.0
    """From the start of the program to the first step."""
    seconds: float = 0.0
    """From the start of the program to its end."""
    told_s: float | None = None
    """From the kill of a part to the end of the program, which says why; ``None`` where it goes on or was killed."""
    gone_s: float | None = None
    """From the kill of the controller to the end of its last part; ``None`` where another part was killed."""
    left: list[str] = field(default_factory=list)
    """Processes that were still there when they should have ended."""

    @property
    def num_steps(self) -> int:
        """Steps that the run has behind it, as this life told."""
        return max((int(match[1]) for line in self.lines if (match := _STEP.match(line))), default=0)


async def live(arguments: Sequence[str], run_dir: Path, moment: Moment | None, *, resume: bool) -> Life:
    """One life of the run in ``run_dir``, in which a part is killed at ``moment``."""
    clock = RealClock()
    began_s = clock.now()
    async with training(arguments, resume=resume) as program:
        life = Life(pid=program.pid, resumed=resume)
        watch = _Watch(program=program, run_dir=run_dir, life=life, began_s=began_s)
        try:
            async with asyncio.timeout(LIFE_MAY_TAKE_S), asyncio.TaskGroup() as group:
                group.create_task(watch.read())
                words = group.create_task(_all(program.stderr))
                killed_s = await watch.kill(moment) if moment is not None else None
                life.exit_code = await program.wait()
        except TimeoutError:
            life.exit_code, life.words = HUNG, f"not over after {LIFE_MAY_TAKE_S:g} s; its last line: {life.lines[-1:]}"
            return life
        life.words = words.result()
        now_s = clock.now()
        life.seconds = now_s - began_s
        if killed_s is not None and moment is not None:
            life.killed = moment
            if moment.part in ("engine", "learner") and life.exit_code:
                life.told_s = now_s - killed_s
            await _until_gone(life, now_s if killed_s is None else killed_s)
        return life


@dataclass(slots=True, kw_only=True)
class _Watch:
    """Follows a life, and strikes."""

    program: asyncio.subprocess.Process
    run_dir: Path
    life: Life
    began_s: float

    async def read(self) -> None:
        assert self.program.stdout is not None
        async for line in self.program.stdout:
            if not self.life.num_steps and _STEP.match(line.decode()):
                self.life.started_s = RealClock().now() - self.began_s
            self.life.lines.append(line.decode())

    async def kill(self, moment: Moment) -> float | None:
        """When it was done; ``None`` where the program, or the part for good, was gone first."""
        while self.program.returncode is None:
            if self._come(moment):
                await asyncio.sleep(moment.delay_s)
                return await self._strike(moment.part)
            await asyncio.sleep(_POLL_S)
        return None

    async def _strike(self, part: Part) -> float | None:
        """Kill it as soon as it is there."""
        while self.program.returncode is None:
            pid = self.program.pid if part == "controller" else _part(self.program.pid, part)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return RealClock().now()
            await asyncio.sleep(_POLL_S)
        return None

    def _come(self, moment: Moment) -> bool:
        if moment.phase == "start" or self.life.num_steps > moment.step:
            return True
        if moment.phase == "step":
            return self.life.num_steps == moment.step
        return any((self.run_dir / "checkpoints").glob(f"step-{moment.step:06d}*"))


def _part(controller: int, role: Part) -> int | None:
    """The process of a part, once it is one: a fork that is about to become it still looks like its parent."""
    with suppress(psutil.Error):
        for child in psutil.Process(controller).children(recursive=True):  # some are forks of a fork
            words = _words(child)
            if "headrace.launch.hosts.main" in words and words[-2].startswith(role):
                return child.pid
    return None


def _words(process: psutil.Process) -> list[str]:
    """What it was started with; nothing of one that has ended."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


async def _until_gone(life: Life, since_s: float) -> None:
    """Every process of the life must end with it."""
    clock = RealClock()
    while left := _processes(life.pid):
        if clock.now() - since_s > MUST_BE_GONE_S:
            life.left = left
            return
        await asyncio.sleep(0.02)
    if life.killed is not None and life.killed.part == "controller":
        life.gone_s = clock.now() - since_s


def _processes(controller: int) -> list[str]:
    """The parts of that controller that are running."""
    started = (" ".join(_words(process)) for process in psutil.process_iter())
    return [words for words in started if f"headrace-{controller}-" in words]


def leftovers(lives: Sequence[Life], run_dir: Path) -> list[str]:
    """What the lives of a run that is over have left behind: processes, buffers, directories, unfinished files. What is
    left of one that had told its end when it was killed goes with the beginning of any other run."""
    left = [words for life in lives for words in (*life.left, *_processes(life.pid))]
    roots = {shared_memory_root(), Path(tempfile.gettempdir())}
    if lives[-1].killed is not None:
        for root in roots:
            sweep(root)
    left += [str(path) for root in roots for life in lives for path in root.glob(f"headrace-{life.pid}-*")]
    left += [str(path) for path in run_dir.rglob("*.tmp*")]
    return left


async def _all(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    return (await stream.read()).decode()
