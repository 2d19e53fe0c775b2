"""Whether the agents that train adapters of their own are there to be asked."""

from __future__ import annotations

from headrace.base.errors import ConfigError, nearest
from headrace.models import ModelConfig
from headrace.rollout.environments import EnvConfig
from headrace.rollout.environments.agents import RESERVED, TrainedAgent


def refuse_strange_agents(model: ModelConfig, env: EnvConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for ``model.lora.agents`` that nobody asks, or that are not to
    be
    trained."""
    rows = {agent.name: agent for agent in env.agents}
    for name in model.adapter_agents:
        setting = f"model.lora.agents: {name!r}"
        if name in RESERVED:
            raise ConfigError(
                f"{setting} is taken: {', '.join(sorted(RESERVED))} are authors in every episode; the policy has an "
                "adapter without being named",
                remedy="choose another name",
            )
        if env.kind not in ("rollout", "program", "bridge"):
            raise ConfigError(
                f"{setting} is never asked: with env.kind={env.kind!r} the policy answers alone",
                remedy="set env.kind = 'rollout' or 'program', or leave model.lora.agents out",
            )
        if rows and name not in rows:
            raise ConfigError(f"{setting} is not among env.agents", remedy=f"{nearest(name, rows)}; or add a table")
        if rows and not isinstance(rows[name], TrainedAgent):
            raise ConfigError(
                f"{setting} is to train an adapter, and in env.agents it is {rows[name]}",
                remedy="set its kind to 'trained', or leave it out of model.lora.agents",
            )
