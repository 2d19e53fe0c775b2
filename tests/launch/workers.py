"""Real scoring processes behind a real pool, without a run around them."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.task import Task
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients import ScorerPool, ScorerPoolConfig
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.launch.local_process import LocalStarter
from headrace.launch.starts import ResourceLimits, ScorerStart, Start
from headrace.rollout.scoring import FunctionReward, Scores

TOKEN = "the-token-of-this-run"
KEEP = ResourceLimits(memory_bytes=512 << 20, processes=40, log_bytes=1 << 20)


@asynccontextmanager
async def site(logs: Path, token: str = TOKEN) -> AsyncIterator[Rendezvous]:
    """Where processes of a test meet."""
    with tempfile.TemporaryDirectory(prefix="hr-test-") as directory:
        yield Rendezvous(directory=Path(directory), logs=logs, token=token, on_spans=lambda _: None)


async def start_child(place: Rendezvous, name: str, start: Start, token: str = TOKEN) -> Child:
    """One process; its peer expects ``token``."""

    def peer(channel: ControllerChannel) -> Peer:
        kind = ForeignPeer if isinstance(start, ScorerStart) else Peer
        return kind(name, channel, token=token, on_spans=place.on_spans)

    return await Child.start(place, ProcessSpec(name=name, start=start, num_threads=1, make_peer=peer), LocalStarter())


@dataclass(slots=True, kw_only=True)
class RunningPool:
    """A running pool, the processes it has started, and its warnings."""

    pool: ScorerPool
    children: list[Child] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    async def score(self, *completions: str) -> list[Scores]:
        """One call for each completion, all at once; each is a deed that the reward below knows."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self.pool.score(task(), (completion,))) for completion in completions]
        return [call.result() for call in calls]


@asynccontextmanager
async def running_pool(
    tmp_path: Path,
    code: str,
    *,
    num_workers: int = 1,
    timeout_s: float = 20.0,
    within_s: float = 60.0,
    start_within_s: float = 60.0,
) -> AsyncIterator[RunningPool]:
    """Workers that call the ``reward`` of ``code``; the body runs when all are there."""
    path = tmp_path / "reward.py"
    path.write_text(textwrap.dedent(code))
    section = FunctionReward(ref=f"{path}:reward", concurrency=32)
    numbers = itertools.count()
    async with site(tmp_path) as place:

        async def start_worker() -> Child:
            child = await start_child(
                place, f"scorer-{next(numbers)}", ScorerStart(reward=section.model_dump(mode="json"), keep=KEEP)
            )
            made.children.append(child)
            return child

        pool = ScorerPool(
            start_worker,
            ScorerPoolConfig(
                num_workers=num_workers, concurrency=32, timeout_s=timeout_s, start_timeout_s=start_within_s
            ),
            warn=lambda text: made.warnings.append(text),  # noqa: PLW0108 - made comes later
        )
        made = RunningPool(pool=pool)
        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                running = group.create_task(pool.keep())
                await pool.wait_until_started()
                yield made
                running.cancel()
        finally:
            for child in made.children:
                await child.end(Shutdown())


def task() -> Task:
    """A row to score against."""
    return Task(row_index=0, row={"prompt": "p"}, prompt="p", prompt_ids_T=np.zeros(1, np.int32))


def find_processes(mark: Path) -> list[int]:
    """The processes that have ``mark`` in their command line and run: their own numbers are those of a namespace."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        process.pid
        for process in found
        if str(mark) in (process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parts_here() -> set[psutil.Process]:
    """The parts that this process has started, and their parts, as far as they live."""

    def is_part(process: psutil.Process) -> bool:
        try:
            return "headrace.launch.hosts.main" in " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            return False

    return {process for process in psutil.Process().children(recursive=True) if is_part(process)}
