"""Settings of the agents of an episode (``[[env.agents]]``): which weights answer under which agent name.

agent="solver"     any name                        the policy under training, or an adapter that the agent trains
agent="solver/2"   another agent of the same role  the same policy, the same baseline, a separate reward
agent="opponent"   [[env.agents]] kind = ...       frozen weights, in a separate engine
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headrace.base.config import Section
from headrace.models.config import ModelConfig

POLICY = "policy"
"""The name of the policy under training, which answers if no agent is named."""
RESERVED = frozenset({POLICY, "task", "user", "tool"})
"""Names of authors of turns. No agent may have one of these names."""


class AgentSection(Section):
    """The settings that all kinds of agents share."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=32)
    """The name of the agent in a rollout, ``policy.chat(..., agent=name)``. Several agents of one role are named
    ``name/0``, ``name/1``. A program uses the name as the name of the model."""

    def resolve_model(self, model: ModelConfig) -> ModelConfig | None:
        """Return the model settings of the agent's frozen weights, for a run that trains ``model``; ``None`` if the
        policy under training answers for the agent."""
        raise NotImplementedError


class TrainedAgent(AgentSection):
    """The policy under training, under another name.

    If ``model.lora.agents`` contains the name, the agent trains an adapter of its own, in addition to the adapter of
    the policy. A table for such an agent is needed only if other agents have a table, because then every name must have
    one.
    """

    kind: Literal["trained"] = "trained"
    """Selects the policy under training."""

    def resolve_model(self, model: ModelConfig) -> ModelConfig | None:
        """Return ``None``, because the policy under training answers."""
        return None

    def __str__(self) -> str:
        return "the policy under training"


class FrozenAgent(AgentSection):
    """An agent with the weights with which the run begins, such as an earlier version of the policy as an opponent."""

    kind: Literal["frozen"] = "frozen"
    """Selects the weights with which the run begins."""

    def resolve_model(self, model: ModelConfig) -> ModelConfig | None:
        """Return the settings of the policy's model with the weights with which the run begins."""
        return model.keep_policy_adapter()

    def __str__(self) -> str:
        return "the weights that the run begins with"


class AdapterAgent(AgentSection):
    """An agent with a frozen adapter on the weights of ``model.path``."""

    kind: Literal["adapter"] = "adapter"
    """Selects an adapter."""
    path: str = Field(min_length=1)
    """The directory of the adapter, as peft or a run with ``model.lora`` writes it."""

    def resolve_model(self, model: ModelConfig) -> ModelConfig | None:
        """Return the settings of the trained model with this agent's adapter in place of the run's adapter."""
        from headrace.models.lora import read_lora_config

        return model.model_copy(update={"lora": read_lora_config(Path(self.path))})

    def __str__(self) -> str:
        return f"the adapter in {self.path}"


class ModelAgent(AgentSection):
    """An agent with a different, frozen model that has the same vocabulary."""

    kind: Literal["model"] = "model"
    """Selects another model."""
    path: str = Field(min_length=1)
    """The directory of the model, such as a snapshot of another run."""

    def resolve_model(self, model: ModelConfig) -> ModelConfig | None:
        """Return the settings of the trained model with this agent's directory and without an adapter."""
        return model.model_copy(update={"path": self.path, "lora": None})

    def __str__(self) -> str:
        return f"another model, {self.path}"


AgentConfig = Annotated[TrainedAgent | FrozenAgent | AdapterAgent | ModelAgent, Field(discriminator="kind")]
