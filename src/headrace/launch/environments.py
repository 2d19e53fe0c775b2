"""The environment of a run as the launcher prepares it: the single turn, which needs no process, or user code in worker
processes. The *order* is the record of settings that a session passes to the launcher for a run."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from headrace.base.clock import RealClock
from headrace.base.config.addresses import host_and_port
from headrace.base.plugins import Registry
from headrace.base.types.observation import Event
from headrace.base.types.sampling import Sampling
from headrace.launch.child import Child, Rendezvous, Starter
from headrace.launch.clients import EnvPool, EnvPoolConfig
from headrace.launch.clients.environment import Listening
from headrace.launch.endpoints import ListenAddress, open_endpoint
from headrace.launch.order import LaunchOrder
from headrace.launch.processes import Processes
from headrace.launch.starts import EnvironmentStart, ResourceLimits
from headrace.rollout.environments import EnvConfig


def make_environment_start(env: EnvConfig) -> EnvironmentStart:
    """Return the settings that each worker process of the environment ``env`` starts with."""
    return EnvironmentStart(
        kind=env.kind,
        entry=env.entry or shlex.join(env.argv),
        concurrency=env.episodes_at_once,
        block_s=env.block_s,
        options=env.options,
        own_namespace=env.own_namespace,
        keep=ResourceLimits(memory_bytes=(env.memory_mb or 0) << 20, processes=env.max_processes),
    )


def make_environment_pool(processes: Processes) -> EnvPool | None:
    """Return the controller's pool of environment workers; ``None`` if the environment needs no workers. The workers
    are not started yet."""
    order, env = processes.order, processes.order.env
    if not env.remote:
        return None
    join_host = host_and_port(order.launch.join)[0] if order.launch.join else ""
    return make_pool(
        env,
        processes.start_environment,
        start_timeout_s=order.launch.start_timeout_s,
        warn=lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning")),
        listening=plan_endpoint(env, order.sampling, order.agent_names, join_host or processes.starter.host_address),
    )


def make_pool(
    env: EnvConfig,
    start_worker: Callable[[EnvironmentStart], Awaitable[Child]],
    *,
    start_timeout_s: float,
    warn: Callable[[str], None],
    listening: Listening | None,
) -> EnvPool:
    """Return a pool of workers for the environment ``env``. The workers are not started yet. ``start_worker`` starts
    one worker, which may take ``start_timeout_s`` seconds. ``warn`` receives warnings for users. ``listening`` opens
    the endpoint for programs, or is ``None`` if programs need none."""
    config = EnvPoolConfig(
        num_workers=env.workers,
        concurrency=env.episodes_at_once,
        block_s=env.block_s,
        start_timeout_s=start_timeout_s,
        scored=bool(env.components),
    )
    return EnvPool(partial(start_worker, make_environment_start(env)), config, warn=warn, listening=listening)


def plan_endpoint(env: EnvConfig, sampling: Sampling, agents: frozenset[str], host: str) -> Listening | None:
    """Return the function that opens the endpoint at which programs reach their episodes; ``None`` if the environment
    has no endpoint. The endpoint listens at ``env.host``, or at ``host`` if that is unset; ``host`` is the address at
    which the programs reach this machine. ``sampling`` are the sampling parameters of the policy, and ``agents`` are
    the agent names that programs may use as model names."""
    if not env.has_endpoint:
        return None
    address = ListenAddress(host=env.host or host, tls_certificate=env.tls_certificate, tls_key=env.tls_key)
    listening = open_endpoint()
    return lambda warn: listening(sampling, clock=RealClock(), warn=warn, agents=agents, at=address)


class JoinServer(Protocol):
    """The server through which other machines join a run with workers for its environment."""

    async def admit(
        self,
        pool: EnvPool,
        start: EnvironmentStart,
        start_worker: Callable[[EnvironmentStart, Starter], Awaitable[Child]],
    ) -> None:
        """Accept machines, and add their workers to ``pool``. This ends only by cancellation. ``start`` contains the
        settings of a worker. ``start_worker`` starts one worker on the machine that the given starter represents."""
        ...


JOINING = Registry[Callable[[LaunchOrder, Rendezvous], AbstractAsyncContextManager[JoinServer | None]]](
    group="headrace.joining", setting="launch.join"
)
"""The functions that open the :class:`JoinServer` of a run with ``launch.join``. The wing that implements the server
registers its only row, ``machines``."""
