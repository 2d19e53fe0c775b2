"""The environment of a rollout shard, if the environment runs in workers. The shard starts the workers in the same way
as the controller starts its own."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.base.environ import run_token
from headrace.base.errors import DeadlineError
from headrace.base.types.messages.controller import WorkerSeen, WorkersSeen
from headrace.base.types.sampling import Sampling
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients import EnvPeer, EnvPool
from headrace.launch.environments import make_pool, plan_endpoint
from headrace.launch.local_process import LocalStarter
from headrace.launch.starts import EnvironmentStart, ShardEnvironment
from headrace.models import load_tokenizer
from headrace.models.endings import stop_ids
from headrace.rollout import Chat
from headrace.rollout.environments import EnvConfig

LOOK_S = 1.0
"""Seconds between two checks of the states of the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWorkers:
    """The environment of a shard: the pool of its workers, and the converter of messages."""

    pool: EnvPool
    """The pool of the workers."""
    chat: Chat
    """The converter between messages and tokens of the model."""
    children: Sequence[Child]
    """The processes of the workers, ended ones included until another worker is started."""

    async def report(self, send: Callable[[WorkersSeen], None]) -> None:
        """Call ``send`` with all workers now, and again whenever the state of one has changed. This ends only by
        cancellation."""
        reported: tuple[WorkerSeen, ...] = ()
        while True:
            seen = tuple(WorkerSeen(name=each.role, pid=each.pid, state=each.state) for each in self.children)
            if seen != reported:
                send(WorkersSeen(workers=seen))
                reported = seen
            await asyncio.sleep(LOOK_S)


class _WorkerStarter:
    """The starter of a shard's environment workers. Their sockets are in the directory of the run's sockets."""

    def __init__(self, site: Rendezvous) -> None:
        """Create the starter of workers that use the directories and the token of ``site``."""
        self._site = site
        self._starter = LocalStarter()
        self._numbers = itertools.count()
        """The numbers of the workers that will be started."""
        self.children: list[Child] = []
        """The workers, ended ones included until another worker is started."""

    async def start(self, start: EnvironmentStart) -> Child:
        """Start a worker with the settings ``start``."""
        # with the process id, so that a restarted shard does not use the sockets of workers that are still ending
        name = f"environment-{os.getpid()}-{next(self._numbers)}"
        peer = partial(EnvPeer, name, token=self._site.token, on_spans=self._site.on_spans)
        spec = ProcessSpec(name=name, start=start, num_threads=1, make_peer=peer)
        child = await Child.start(self._site, spec, self._starter)
        self.children[:] = [*(each for each in self.children if not each.closed), child]
        return child


@asynccontextmanager
async def open_workers(
    start: ShardEnvironment, sampling: Sampling, directory: Path, warn: Callable[[str], None]
) -> AsyncIterator[ShardWorkers]:
    """Start the workers that ``start`` describes, with their sockets in ``directory``, and yield them when they are
    ready. The workers end with this process. ``sampling`` are the sampling parameters of training, and ``warn``
    receives warnings.

    Raises the error of a worker that cannot start, and :class:`~headrace.base.errors.DeadlineError` if the workers are
    not ready in time.
    """
    env = EnvConfig.model_validate(start.env)
    tokenizer = load_tokenizer(start.model)
    endings = stop_ids(start.model, tokenizer.eos_token_id)
    site = Rendezvous(directory=directory, logs=Path(start.logs), token=run_token(), on_spans=lambda _: None)
    starter = _WorkerStarter(site)
    pool = make_pool(
        env,
        starter.start,
        start_timeout_s=start.start_timeout_s,
        warn=warn,
        listening=plan_endpoint(env, sampling, frozenset(start.agents), LocalStarter.host_address),
    )
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(pool.keep())
        try:
            async with asyncio.timeout(start.start_timeout_s):
                await pool.wait_until_started()
        except TimeoutError:
            raise DeadlineError(
                f"the environment workers did not start within {start.start_timeout_s:g} s",
                remedy="look at their logs in the run directory; raise launch.start_timeout_s",
            ) from None
        yield ShardWorkers(pool=pool, chat=Chat.create(tokenizer, endings, env.tool_parser), children=starter.children)
        keeping.cancel()
