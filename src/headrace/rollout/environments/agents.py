"""Settings of agents: which weights answer under which name.

agent="solver"     any name                    the policy under training, or an adapter of the agent's own beside it
agent="solver/2"   another one of that role    the same policy, the same baseline, a reward of its own
agent="opponent"   [[env.agents]] kind = ...   frozen weights, in an engine of their own
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headrace.base.config import Section
from headrace.models.config import ModelConfig

POLICY = "policy"
"""Who answers where no agent is named: the policy under training."""
RESERVED = frozenset({POLICY, "task", "user", "tool"})
"""Authors of turns that are no agents of the user's."""


class AgentSection(Section):
    """An agent by name: what all kinds have in common."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=32)
    """As a rollout says it: ``policy.chat(..., agent=name)``, or ``name/0``, ``name/1`` for several of one role; in a
    program, as the name of the model."""

    def model_of(self, model: ModelConfig) -> ModelConfig | None:
        """Where its weights are, in a run that trains ``model``; ``None``: it is the policy under training."""
        raise NotImplementedError


class TrainedAgent(AgentSection):
    """The policy under training, under a name of its own; where ``model.lora.agents`` names it too, an adapter of its
    own, in training beside the policy's. It needs a table only where other agents have one: then no name is allowed
    that has none."""

    kind: Literal["trained"] = "trained"
    """Selects the policy under training."""

    def model_of(self, model: ModelConfig) -> ModelConfig | None:
        return None

    def __str__(self) -> str:
        return "the policy under training"


class FrozenAgent(AgentSection):
    """The weights that the run begins with, as they were: an earlier self to play against."""

    kind: Literal["frozen"] = "frozen"
    """Selects the weights that the run begins with."""

    def model_of(self, model: ModelConfig) -> ModelConfig | None:
        return model.of_policy()

    def __str__(self) -> str:
        return "the weights that the run begins with"


class AdapterAgent(AgentSection):
    """An adapter on the weights of ``model.path``, frozen."""

    kind: Literal["adapter"] = "adapter"
    """Selects an adapter."""
    path: str = Field(min_length=1)
    """Its directory, as peft or a run that trained ``model.lora`` has written it."""

    def model_of(self, model: ModelConfig) -> ModelConfig | None:
        from headrace.models.lora import config_of

        return model.model_copy(update={"lora": config_of(Path(self.path))})

    def __str__(self) -> str:
        return f"the adapter in {self.path}"


class ModelAgent(AgentSection):
    """Another model with the same vocabulary, frozen."""

    kind: Literal["model"] = "model"
    """Selects another model."""
    path: str = Field(min_length=1)
    """Its directory, such as a snapshot of another run."""

    def model_of(self, model: ModelConfig) -> ModelConfig | None:
        return model.model_copy(update={"path": self.path, "lora": None})

    def __str__(self) -> str:
        return f"another model, {self.path}"


AgentConfig = Annotated[TrainedAgent | FrozenAgent | AdapterAgent | ModelAgent, Field(discriminator="kind")]
