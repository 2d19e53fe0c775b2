"""The environment of a run: a prompt and an answer, or user code in workers."""

from __future__ import annotations

import shlex
from functools import partial

from headrace.base.clock import RealClock
from headrace.base.types.observation import Event
from headrace.launch.clients import EnvPool, EnvTerms
from headrace.launch.clients.environment import Listening
from headrace.launch.order import LaunchOrder
from headrace.launch.processes import Processes
from headrace.launch.starts import EnvironmentStart, Keep
from headrace.rollout import EpisodeLimits
from headrace.rollout.environments import EnvConfig
from headrace.wings.cluster.joining.invitation import host_and_port
from headrace.wings.cluster.joining.relay import ENDPOINT, dialled_in


def environment_start(env: EnvConfig) -> EnvironmentStart:
    """What each worker of an environment is told."""
    return EnvironmentStart(
        kind=env.kind,
        entry=env.entry or shlex.join(env.argv),
        concurrency=env.episodes_at_once,
        block_s=env.block_s,
        options=env.options,
        keep=Keep(memory_bytes=(env.memory_mb or 0) << 20, processes=env.most_processes),
    )


def environment_pool(processes: Processes) -> EnvPool | None:
    """The workers of the run's environment, which are not started yet; ``None`` for one that needs none."""
    order, env = processes.order, processes.order.env
    if not env.remote:
        return None
    return EnvPool(
        partial(processes.start_environment, environment_start(env)),
        EnvTerms(
            num_workers=env.workers,
            concurrency=env.episodes_at_once,
            block_s=env.block_s,
            start_timeout_s=order.launch.start_timeout_s,
            scored=bool(env.components),
        ),
        warn=lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning")),
        listening=_listening(order, processes),
    )


def _listening(order: LaunchOrder, processes: Processes) -> Listening | None:
    """How programs reach their episodes; ``None`` for environments that have none. Where some may be on other machines,
    that is at the address by which those reach this one."""
    if order.env.kind not in ("rollout", "program", "bridge"):
        return None
    from headrace.wings.agents import At, Endpoint

    env, launch = order.env, order.launch
    joined = host_and_port(launch.join)[0] if launch.join and not launch.relayed else ""
    at = At(
        host=env.host or joined or processes.starter.home,
        path=dialled_in(processes.site.directory) / ENDPOINT if launch.relayed else None,
        tls_certificate=env.tls_certificate,
        tls_key=env.tls_key,
    )
    return lambda warn: Endpoint.listening(
        order.sampling, clock=RealClock(), warn=warn, agents=order.agent_names, at=at
    )


def episode_limits(order: LaunchOrder) -> EpisodeLimits:
    """What one episode may have."""
    env = order.env
    return EpisodeLimits(
        max_context=order.max_context,
        max_turns=env.max_turns,
        max_tokens=env.max_tokens,
        max_tool_calls=env.max_tool_calls,
    )
