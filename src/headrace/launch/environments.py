"""The environment of a run: a prompt and an answer, or user code in workers."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable

import psutil

from headrace.clock import RealClock
from headrace.env import EnvConfig
from headrace.launch.child import Child
from headrace.launch.clients import EnvPool, EnvTerms
from headrace.launch.clients.environment import Listening
from headrace.launch.order import Order
from headrace.launch.starts import EnvironmentStart, Keep
from headrace.rollout import Limits
from headrace.types.observation import Event


def environment_pool(order: Order, start_worker: Callable[[EnvironmentStart], Awaitable[Child]]) -> EnvPool | None:
    """The workers of ``order.env``, which are not started yet; ``None`` for an environment that needs none."""
    env = order.env
    if not env.remote:
        return None
    start = EnvironmentStart(
        kind=env.kind,
        entry=env.entry or shlex.join(env.argv),
        concurrency=env.episodes_at_once,
        block_s=env.block_s,
        options=env.options,
        keep=_keep(env),
    )
    return EnvPool(
        lambda: start_worker(start),
        EnvTerms(
            num_workers=env.workers,
            concurrency=env.episodes_at_once,
            block_s=env.block_s,
            start_timeout_s=order.launch.start_timeout_s,
            scored=bool(env.components),
        ),
        warn=lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning")),
        listening=_listening(order),
    )


def _listening(order: Order) -> Listening | None:
    """How programs reach their episodes; ``None`` for environments that have none."""
    if order.env.kind not in ("rollout", "program", "bridge"):
        return None
    from headrace.rollout.endpoint import Endpoint

    return lambda warn: Endpoint.listening(order.sampling, clock=RealClock(), warn=warn, agents=order.agent_names)


def episode_limits(order: Order) -> Limits:
    """What one episode may have."""
    env = order.env
    return Limits(
        max_context=order.max_context,
        max_turns=env.max_turns,
        max_tokens=env.max_tokens,
        max_tool_calls=env.max_tool_calls,
    )


def _keep(env: EnvConfig) -> Keep:
    half_mb = psutil.virtual_memory().total >> 21
    return Keep(memory_bytes=(env.memory_mb or half_mb) << 20, processes=env.most_processes)
