"""Settings of the critic."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError


class CriticConfig(Section):
    """The critic of ``algo.advantage = "gae"``: a second model, all of whose weights are trained. What is not said here
    (betas, decay, clipping of gradients, memory, micro-batches) is as for the policy."""

    path: str = ""
    """Directory of the causal language model whose weights it begins with, or of a snapshot of a run that had a critic
    of that shape; empty: the model that the run began with."""
    lr: float = Field(default=1e-5, ge=0)
    """Learning rate of its AdamW; constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run in which it alone is trained: the policy stays as it is, and its schedule begins after
    them."""
    updates: int = Field(default=1, ge=1)
    """How many times each batch is learned from; the advantages are those from before the first."""
    clip: float | None = Field(default=None, gt=0)
    """ε: how far the later ``updates`` may move a value away from that before the first."""

    @model_validator(mode="after")
    def _clip_has_something_to_bound(self) -> CriticConfig:
        if self.clip is not None and self.updates == 1:
            raise ConfigError(
                f"learner.critic.clip={self.clip} bounds how far several updates of one batch may go, and updates=1",
                remedy="set learner.critic.updates > 1, or leave clip out",
            )
        return self
