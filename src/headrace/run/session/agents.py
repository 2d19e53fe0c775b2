"""The agents of a run that have weights of their own: what they load, and what cannot be served."""

from __future__ import annotations

from headrace.base.errors import ConfigError
from headrace.models import ModelConfig, context_length
from headrace.models.load import called, refuse_other_vocabulary
from headrace.rollout.environments.agents import ModelAgent
from headrace.run.session.config import RunConfig


def frozen_agents(config: RunConfig) -> dict[str, ModelConfig]:
    """What the engine of each loads, by name. Raises :class:`~headrace.base.errors.ModelError` for what is no
    adapter."""
    models = {agent.name: agent.model_of(config.model) for agent in config.env.agents}
    return {name: model for name, model in models.items() if model is not None}


def refuse_misfits(config: RunConfig, max_context: int) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` or :class:`~headrace.base.errors.ModelError` for another model
    that does
    not read the tokens of this one, or not as many of them."""
    for agent in config.env.agents:
        if not isinstance(agent, ModelAgent):
            continue
        setting = f"env.agents {agent.name!r} path"
        with called(setting):
            refuse_other_vocabulary(agent.path, config.model.path, setting)
            most = context_length(agent.path)
        if most < max_context:
            raise ConfigError(
                f"{setting}={agent.path!r} was made for {most} tokens, and conversations may have {max_context}",
                remedy=f"choose a model for >= {max_context} tokens, or set engine.max_context <= {most}",
            )
