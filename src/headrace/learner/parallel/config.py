"""Settings of the learner's ranks and of their memory.

rank = ((replicate · data + d) · context + c) · tensor + t          experts lie across data × context × tensor
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.models.config import ModelConfig

Ways = Annotated[int, Field(ge=1)]


class ParallelConfig(Section):
    """Over how many ranks a learner is spread, and how. The result does not depend on it."""

    data: Ways = 1
    """Ranks with different micro-batches, which hold each parameter in as many parts (FSDP2)."""
    replicate: Ways = 1
    """Whole copies of those ``data`` ranks, each with its own micro-batches (HSDP); one per machine, say."""
    context: Ways = 1
    """Ranks that share the tokens of one micro-batch, for long sequences; parameters are parted over them, too."""
    tensor: Ways = 1
    """Ranks that share the matrices and attention heads of one micro-batch; within one machine."""
    expert: Ways = 1
    """Ranks that hold different experts of a mixture of experts; they are among the other ranks, not beside them."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """How long one rank waits for the others before it gives up."""

    @model_validator(mode="after")
    def _experts_fit(self) -> ParallelConfig:
        if self.expert == 1:
            return self
        inside = self.data * self.context * self.tensor
        if self.expert % self.tensor:
            raise ConfigError(
                f"learner.parallel.expert={self.expert} is no multiple of tensor={self.tensor}: ranks with one batch "
                "share its experts",
                remedy=f"set learner.parallel.expert to a multiple of {self.tensor}, or tensor = 1",
            )
        if inside % self.expert:
            raise ConfigError(
                f"learner.parallel.expert={self.expert} does not divide data·context·tensor={inside}, the ranks that "
                "experts lie across",
                remedy=f"set learner.parallel.expert to a divisor of {inside}, or data to {self.expert}",
            )
        return self

    @property
    def world(self) -> int:
        """Ranks altogether."""
        return self.replicate * self.data * self.context * self.tensor

    @property
    def num_shares(self) -> int:
        """Parts that a batch's micro-batches are dealt to."""
        return self.replicate * self.data

    @property
    def averaged(self) -> int:
        """Ranks whose gradients torch's sharding averages."""
        return self.replicate * self.data * self.context

    def refuse_world(self, launched: int) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` unless exactly ``launched`` ranks are asked for."""
        if launched == self.world:
            return
        rest = self.replicate * self.context * self.tensor
        remedy = f"start {self.world} ranks"
        if launched % rest == 0:
            remedy += f", or set learner.parallel.data = {launched // rest}"
        raise ConfigError(
            f"learner.parallel asks for replicate={self.replicate} · data={self.data} · context={self.context} · "
            f"tensor={self.tensor} = {self.world} ranks, but {launched} were started",
            remedy=remedy,
        )

    def refuse_settings(self, model: ModelConfig) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for what only a learner in one process can do."""
        for setting, chosen in (("lora", model.lora is not None), ("deterministic", model.deterministic)):
            if chosen and self.world > 1:
                raise ConfigError(
                    f"learner.parallel asks for {self.world} ranks, and model.{setting} is for one process",
                    remedy=f"leave model.{setting} out, or learner.parallel",
                )

    def refuse_model(self, path: str, model: Any) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for a ``model`` configuration that cannot be cut like
        this."""
        needs = (
            ("tensor", self.tensor, ("num_attention_heads",)),
            ("tensor", self.tensor, ("num_key_value_heads",)),
            ("expert", self.expert, ("num_experts", "num_local_experts", "n_routed_experts")),
        )
        for setting, ways, names in needs:
            counts = [getattr(model, name, None) for name in names]  # gate: getattr - a foreign configuration
            count = next((count for count in counts if count), None)
            if ways > 1 and (count is None or count % ways):
                raise ConfigError(
                    f"learner.parallel.{setting}={ways} does not fit model.path={path!r}: "
                    f"a {model.model_type} with {names[0]}={count}",
                    remedy=f"set learner.parallel.{setting} to " + (f"a divisor of {count}" if count else "1"),
                )


class MemoryConfig(Section):
    """What is kept, where, and in which number format. None of it but ``masters`` changes a result."""

    recompute: bool = False
    """Keep only each layer's input of the forward pass and compute the rest again in the backward pass."""
    offload_activations: bool = False
    """Keep what the backward pass needs of the forward pass in the host's memory."""
    offload_optimizer: bool = False
    """Keep the optimizer's state, and float32 copies of the weights, in the host's memory and update them there."""
    masters: bool = True
    """Where model.dtype is bfloat16: update float32 copies of the weights, and round those. Without it, updates below
    1/256 of a weight are lost."""


class OptimizerConfig(Section):
    """Which optimizer; rates, decay and clipping are the learner's."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon``: orthogonal updates for the matrices between embeddings and head, scaled to the size of AdamW's (so that
    the same ``lr`` serves); AdamW for the rest."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's; AdamW has ``betas``."""

    @model_validator(mode="after")
    def _momentum_is_muons(self) -> OptimizerConfig:
        if self.kind != "muon" and self.momentum != type(self).model_fields["momentum"].default:
            raise ConfigError(
                f"learner.optimizer.momentum={self.momentum} has no effect with learner.optimizer.kind={self.kind!r}",
                remedy="set learner.optimizer.kind = 'muon', or learner.betas",
            )
        return self
