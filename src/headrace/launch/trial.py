"""Environment workers for the check of an environment outside of a run. They are the same processes in the same pool as
in a run, without a learner and without an engine."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.types.sampling import Sampling
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients import EnvPeer, EnvPool, EnvPoolConfig
from headrace.launch.endpoints import EpisodeEndpoint, open_endpoint
from headrace.launch.local_process import LocalStarter
from headrace.launch.starts import EnvironmentStart


@asynccontextmanager
async def trial_pool(
    start: EnvironmentStart, config: EnvPoolConfig, warn: Callable[[str], None]
) -> AsyncIterator[EnvPool]:
    """Start a pool of environment workers as in a run, and yield it when they are ready. ``start`` contains the
    settings of each worker; ``warn`` receives warnings for the user. When the context ends, the workers and all
    processes that they have started are killed, and their logs are removed."""
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as directory:
        site = Rendezvous(
            directory=Path(directory), logs=Path(directory), token=secrets.token_hex(32), on_spans=lambda _: None
        )
        children: list[Child] = []
        numbers = itertools.count()

        async def start_worker() -> Child:
            """Start one worker process of the environment."""
            name = f"environment-{next(numbers)}"
            peer = partial(EnvPeer, name, token=site.token, on_spans=site.on_spans)
            spec = ProcessSpec(name=name, start=start, num_threads=1, make_peer=peer)
            children.append(await Child.start(site, spec, LocalStarter()))
            return children[-1]

        pool = EnvPool(start_worker, config, warn=warn, listening=_open_endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(pool.keep())
                await pool.wait_until_started()
                yield pool
                keeping.cancel()
        finally:
            await asyncio.gather(*(child.kill() for child in children))
            for child in children:
                child.close()


def _open_endpoint(warn: Callable[[str], None]) -> AbstractAsyncContextManager[EpisodeEndpoint]:
    """Open the endpoint through which programs of the environment reach the scripted policy over HTTP. ``warn``
    receives warnings about the sampling parameters of their requests."""
    return open_endpoint()(Sampling(max_new_tokens=1024), clock=RealClock(), warn=warn)
