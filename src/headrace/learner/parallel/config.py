"""Settings of the learner's ranks (``[learner.parallel]``), of their memory, and of the optimizer.

rank = ((replicate · data + d) · context + c) · tensor + t

The experts of a mixture are distributed over the data × context × tensor ranks of one replica.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.models.config import ModelConfig
from headrace.models.settings import get_layer_values

Ways = Annotated[int, Field(ge=1)]


class ParallelConfig(Section):
    """The number of ranks of a learner in each dimension of parallelism. The result does not depend on them, up to
    rounding."""

    data: Ways = 1
    """Number of ranks with different micro-batches, over which each parameter is sharded (FSDP2)."""
    replicate: Ways = 1
    """Number of complete copies of those ``data`` ranks, each with its own micro-batches (HSDP), for example one per
    machine."""
    context: Ways = 1
    """Number of ranks that share the tokens of one micro-batch, for long sequences; parameters are sharded over them,
    too."""
    tensor: Ways = 1
    """Number of ranks of one machine that compute the same micro-batch, each with its part of every matrix and its own
    attention heads (tensor parallelism)."""
    expert: Ways = 1
    """Number of ranks over which the experts of a mixture are distributed. They are among the data, context and tensor
    ranks, not additional."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that one rank waits for the others before it gives up."""

    @model_validator(mode="after")
    def _refuse_expert_ranks(self) -> ParallelConfig:
        """Refuse a number of expert-parallel ranks that does not divide the data, context and tensor ranks, or is not a
        multiple of the tensor ranks."""
        if self.expert == 1:
            return self
        inside = self.data * self.context * self.tensor
        if self.expert % self.tensor:
            raise ConfigError(
                f"learner.parallel.expert={self.expert} is not a multiple of tensor={self.tensor}: the ranks "
                "that compute the same micro-batch must hold different experts",
                remedy=f"set learner.parallel.expert to a multiple of {self.tensor}, or tensor = 1",
            )
        if inside % self.expert:
            raise ConfigError(
                f"learner.parallel.expert={self.expert} does not divide data·context·tensor={inside}, the ranks over "
                "which experts are distributed",
                remedy=f"set learner.parallel.expert to a divisor of {inside}, or data to {self.expert}",
            )
        return self

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.replicate * self.data * self.context * self.tensor

    @property
    def num_shares(self) -> int:
        """The number of shares into which a batch's micro-batches are divided."""
        return self.replicate * self.data

    @property
    def num_averaged(self) -> int:
        """The number of ranks over which torch's sharding averages gradients instead of summing them."""
        return self.replicate * self.data * self.context

    def refuse_world(self, launched: int) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` unless these settings describe exactly ``launched`` ranks,
        the number of processes that were started."""
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
        """Raise :class:`~headrace.base.errors.ConfigError` for settings of ``model`` that several ranks do not
        support."""
        if model.deterministic and self.world > 1:
            raise ConfigError(
                f"learner.parallel asks for {self.world} ranks, and model.deterministic works in one process only",
                remedy="leave model.deterministic out, or learner.parallel",
            )
        lora = model.lora
        lora_settings = {} if lora is None else {"experts": lora.experts, "use_dora": lora.use_dora}
        for name, setting, ways, reason in (
            ("experts", "expert", self.expert, "each rank has some of the experts, and an adapter is of all"),
            ("experts", "tensor", self.tensor, "each rank has a part of every expert, and an adapter is of the whole"),
            ("use_dora", "tensor", self.tensor, "each rank has a part of a weight, and DoRA needs norms of the whole"),
        ):
            if lora_settings.get(name) and ways > 1:
                raise ConfigError(
                    f"learner.parallel.{setting}={ways} with model.lora.{name}=true: {reason}",
                    remedy=f"set learner.parallel.{setting} = 1 and data to {self.world}, or leave model.lora.{name} "
                    "out",
                )

    def refuse_model(self, path: str, model: Any) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for a model whose heads or experts cannot be divided evenly
        among these ranks. ``model`` is the configuration of transformers in the directory ``path``."""
        needs = (
            ("tensor", self.tensor, ("num_attention_heads",)),
            ("tensor", self.tensor, ("num_key_value_heads",)),
            ("expert", self.expert, ("num_experts", "num_local_experts", "n_routed_experts")),
        )
        for setting, ways, names in needs:
            counts = [count for name in names for count in get_layer_values(model, name) if count]
            count = next((count for count in counts if count % ways), counts[0] if counts else None)
            if ways > 1 and (count is None or count % ways):
                raise ConfigError(
                    f"learner.parallel.{setting}={ways} does not fit model.path={path!r}: "
                    f"a {model.model_type} with {names[0]}={count}",
                    remedy=f"set learner.parallel.{setting} to " + (f"a divisor of {count}" if count else "1"),
                )


class MemoryConfig(Section):
    """The settings of which tensors are kept, on which device, and in which dtype. Only ``masters`` changes results by
    more than rounding."""

    recompute: bool = False
    """Whether only each layer's input is kept from the forward pass, and the rest is computed again in the backward
    pass."""
    offload_activations: bool = False
    """Whether the activations for the backward pass are kept in host memory."""
    offload_optimizer: bool = False
    """Whether the optimizer's state, and float32 copies of the weights, are kept in host memory and updated there."""
    whole_gradients: bool = False
    """Whether each of several ranks keeps whole gradients from micro-batch to micro-batch, so that they are summed over
    the ranks once for all micro-batches of a batch, and not once for each. It costs the memory of all gradients."""
    masters: bool = True
    """Whether float32 copies of the weights are updated and then rounded, where model.dtype is bfloat16. Without it,
    updates below 1/256 of a weight are lost."""


class ParameterGroup(Section):
    """The settings of some of the trained weights, which override the learner's. A weight belongs to the first group
    that matches its name."""

    names: tuple[str, ...] = Field(min_length=1)
    """Names of weights, with ``*`` for any characters, or ``embeddings``, ``head`` and ``vectors``, which stands for
    the norms and biases. A name that no weight has is refused."""
    lr_scale: float = Field(default=1.0, gt=0)
    """Factor of the learning rate: the group follows the schedule at this multiple."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of all weights of the group, vectors too; unset: the learner's weight decay, for matrices only."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] | None = None
    """The decay rates β of AdamW; unset: the learner's. They have no effect on matrices that Muon updates."""

    @model_validator(mode="after")
    def _refuse_group_without_effect(self) -> ParameterGroup:
        """Refuse a group without any setting."""
        if self.lr_scale == 1.0 and self.weight_decay is None and self.betas is None:
            raise ConfigError(
                f"learner.optimizer.groups: the group {', '.join(self.names)} changes nothing",
                remedy="give it lr_scale, weight_decay or betas, or leave that table of learner.optimizer.groups out",
            )
        return self


class OptimizerConfig(Section):
    """The kind of optimizer and its parameter groups; rates, decay and clipping are settings of the learner."""

    kind: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """The optimizer. ``muon`` makes orthogonal updates for the matrices between embeddings and head, scaled to the size
    of AdamW's updates, so that the same ``lr`` can be used; the other parameters use AdamW. ``adamw8bit`` is AdamW with
    moments of 8 bits for weights of 4096 numbers or more, by torchao, on one rank."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """The momentum of Muon; AdamW has ``betas``."""
    groups: tuple[ParameterGroup, ...] = ()
    """Weights with settings of their own, one table ``[[learner.optimizer.groups]]`` each."""

    @model_validator(mode="after")
    def _refuse_momentum_without_muon(self) -> OptimizerConfig:
        """Refuse the momentum of Muon for another optimizer."""
        if self.kind != "muon" and self.momentum != type(self).model_fields["momentum"].default:
            raise ConfigError(
                f"learner.optimizer.momentum={self.momentum} has no effect with learner.optimizer.kind={self.kind!r}",
                remedy="set learner.optimizer.kind = 'muon', or learner.betas",
            )
        return self

    def refuse_missing(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the package that computes this optimizer is not
        installed."""
        if self.kind == "adamw8bit" and find_spec("torchao") is None:
            raise ConfigError(
                "learner.optimizer.kind='adamw8bit' needs the package torchao, which is not installed",
                remedy="pip install 'headrace[low-bit]', or set learner.optimizer.kind = 'adamw'",
            )
