"""Environment workers in real processes, and a model that says what it is told to."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.base.errors import EpisodeError
from headrace.base.types.task import Task
from headrace.launch.child import Child, ProcessSpec, Rendezvous, Starter
from headrace.launch.clients import EnvPeer, EnvPool, EnvPoolConfig
from headrace.launch.config import INVITATION_FILE, LaunchConfig
from headrace.launch.local_process import LocalStarter
from headrace.launch.starts import EnvironmentStart, ResourceLimits
from headrace.rollout import UNLIMITED, Conversations, EpisodeLimits
from headrace.wings.cluster.joining.listener import JoinListener, StartWorker, listen_for_machines
from tests.rollout.models import conversations


@dataclass(slots=True, kw_only=True)
class RunningPool:
    """A running pool, the processes it has started, its warnings and events."""

    pool: EnvPool
    keeping: asyncio.Task[None]
    """The task that keeps the workers running."""
    limits: EpisodeLimits = UNLIMITED
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an episode has made a request."""
    children: list[Child] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    talks: list[Conversations] = field(default_factory=list)
    """The conversations of the episodes, in the order of the calls."""
    events: list[str] = field(default_factory=list)
    """The events that the listener reported."""
    invitation: Path = Path()
    """The invitation with which a machine joins."""

    async def run(self, *deeds: str, timeout_s: float | None = None) -> list[Any]:
        """One episode of each row ``{"deed": ...}``, all at once: its reward, or the reason for which it failed."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(deed, timeout_s)) for deed in deeds]
        return [task.result() for task in tasks]

    async def _one(self, deed: str, timeout_s: float | None) -> Any:
        talk = conversations(self._says_ok, self.limits)
        self.talks.append(talk)
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await self.pool.run(task(deed), talk)
        except EpisodeError as error:
            return f"{error.reason}: {error.problem}"
        except TimeoutError:
            return "env_timeout"
        return outcome.reward

    def _says_ok(self, _: str) -> str:
        self.asked.set()
        return "ok"


def task(deed: str) -> Task:
    """A row without a prompt."""
    return Task(row_index=0, row={"deed": deed}, prompt="", prompt_ids_T=np.zeros(0, np.int32))


@asynccontextmanager
async def _at_work(
    pool: EnvPool, listener: JoinListener | None, start: EnvironmentStart, start_worker: StartWorker
) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pool.keep())]
        if listener is not None:
            tasks.append(group.create_task(listener.admit(pool, start, start_worker)))
        if pool.has_local_workers:
            await pool.wait_until_started()
        yield tasks[0]
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def running_pool(
    directory: Path, code: str, entry: str, *, keep: ResourceLimits | None = None, **terms: Any
) -> AsyncIterator[RunningPool]:
    """Workers of ``entry`` in a file with this ``code``; they do not outlive the body. ``join``: where others may bring
    more."""
    (directory / "my_env.py").write_text(textwrap.dedent(code))
    join = terms.pop("join", "")
    settled = EnvPoolConfig(
        **{"num_workers": 1, "concurrency": 64, "block_s": 30.0, "start_timeout_s": 60.0, "scored": False, **terms}
    )
    start = EnvironmentStart(
        kind="env" if entry[0].isupper() else "rollout",
        entry=f"{directory / 'my_env.py'}:{entry}",
        concurrency=settled.concurrency,
        block_s=settled.block_s,
        keep=keep,
    )
    with tempfile.TemporaryDirectory() as sockets:
        site = Rendezvous(directory=Path(sockets), logs=directory, token="t", on_spans=lambda _: None)
        children: list[Child] = []
        warnings: list[str] = []
        numbers = itertools.count()

        async def start_worker(start: EnvironmentStart, elsewhere: Starter | None = None) -> Child:
            name = f"environment-{next(numbers)}"
            peer = partial(EnvPeer, name, token=site.token, on_spans=site.on_spans)
            spec = ProcessSpec(name=name, start=start, num_threads=1, make_peer=peer)
            child = await Child.start(site, spec, elsewhere or LocalStarter())
            children.append(child)
            return child

        pool = EnvPool(partial(start_worker, start), settled, warn=warnings.append)
        events: list[str] = []
        order: Any = SimpleNamespace(
            launch=LaunchConfig(join=join, start_timeout_s=settled.start_timeout_s),
            run_dir=directory,
            on_event=lambda event: events.append(event.text),
        )
        try:
            async with (
                listen_for_machines(order, site) if join else nullcontext() as listener,
                _at_work(pool, listener, start, start_worker) as keeping,
            ):
                yield RunningPool(
                    pool=pool, keeping=keeping, children=children, warnings=warnings, events=events,
                    invitation=directory / INVITATION_FILE,
                )  # fmt: skip
        finally:
            await asyncio.gather(*(child.kill() for child in children))
            for child in children:
                child.close()
