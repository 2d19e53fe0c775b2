"""LoRA adapters on a model whose parameters are sharded: every rank has the whole adapters, and the frozen base stays
sharded.

    data, replicate, context ranks         compute with the whole adapter; torch gathers the base for each layer
    tensor ranks, base divided by rows     whole A: A·x ──▶ the rank's rows of B ──▶ its part of the output
    tensor ranks, base divided by columns  the rank's columns of A: its part of A·x ──▶ sum over ranks ──▶ whole B

Adapters are small, so sharding them would save little. Every rank has the gradient of its own tokens only; the
optimizer sums the gradients over all ranks, once a step
(:meth:`~headrace.learner.parallel.optim.ShardOptimizer.clip_norms`).

Shape legend: I inputs and O outputs of a layer, R the rank of an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError
from headrace.learner.parallel.mesh import AnyRanks, Ranks
from headrace.learner.parallel.shards import gather_whole
from headrace.models import lora
from headrace.models.config import LoraConfig
from headrace.models.weights import belongs_to_adapter

BY_ROWS, BY_COLUMNS = "colwise", "rowwise"
"""The names, in transformers' plans for tensor parallelism, of the division of a weight by rows (each rank has a part
of the outputs) and by columns (each rank has a part of the inputs)."""
_WHOLE = frozenset({"replicate", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"})
"""The names, in these plans, of layers whose inputs and outputs are whole vectors on each rank."""


def adapt(model: PreTrainedModel, config: LoraConfig, base: str, ranks: Ranks) -> None:
    """Add the adapters of ``config`` to the sharded ``model``, with the same initial values as on one rank, and freeze
    all other parameters. ``base`` is the directory of the model. The ranks do not communicate.

    Raises :class:`~headrace.base.errors.ModelError` as :func:`headrace.models.lora.add_adapters` does, and
    :class:`~headrace.base.errors.ConfigError` for a layer that tensor-parallel ranks cannot compute with an adapter.
    """
    with adding(model, base, ranks):
        lora.add_adapters(model, config, base)


@contextmanager
def adding(model: PreTrainedModel, base: str, ranks: AnyRanks) -> Iterator[None]:
    """Return a context in which the caller adds adapters to a model that is sharded over ``ranks``. Afterwards, only
    adapters require gradients, and compute their parts on tensor-parallel ranks. On one rank, the context does nothing.
    See :func:`adapt`."""
    if not isinstance(ranks, Ranks):
        yield
        return
    with _unsharded_shapes(model):
        yield
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(belongs_to_adapter(name))  # peft has frozen only the temporary weights
    for name, (layer, *_) in lora.wrapped_layers(model) if ranks.config.tensor > 1 else ():
        _refuse_style(model, name, layer.base_layer.weight, base)
        style = _style(model, name)
        for adapter in layer.lora_A if style in (BY_ROWS, BY_COLUMNS) else ():
            part = layer.lora_B[adapter] if style == BY_ROWS else layer.lora_A[adapter]
            part.forward = partial(_rows_of_b if style == BY_ROWS else _columns_of_a, part, ranks.tensor_group)


@torch.no_grad()
def measure_norms(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Set the magnitudes of the new DoRA adapters ``names``, which :func:`adapt` cannot compute, to the norms of the
    rows of the weights (Liu et al. 2024, eq. 5, at B = 0). All ranks must call this together, since the weights are
    gathered one at a time."""
    for _, (layer, *_) in lora.wrapped_layers(model) if names else ():
        weight_OI = gather_whole(layer.base_layer.weight)
        for name in names:
            layer.lora_magnitude_vector[name].weight.copy_(torch.linalg.norm(weight_OI, dim=1).to(weight_OI.dtype))


def parted(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the adapter weights of which each tensor-parallel rank uses only a part, so that its gradient
    is 0 elsewhere. The gradients of all other adapter weights are equal on these ranks."""
    part_by_style = {BY_ROWS: "lora_B", BY_COLUMNS: "lora_A"}
    cuts = {name: _style(model, name) for name, _ in lora.wrapped_layers(model)}
    begins = tuple(f"{name}.{part_by_style[style]}." for name, style in cuts.items() if style in part_by_style)
    return frozenset(name for name, _ in model.named_parameters() if name.startswith(begins))


@contextmanager
def _unsharded_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which weights have the shapes of whole weights, and the model has no plan for tensor
    parallelism. Otherwise peft would create adapters with the shapes of this rank's shards, and with other initial
    values than in one process."""
    sharded = {module: module._parameters["weight"] for module in model.modules() if _is_sharded(module)}
    mesh: Any = model._device_mesh
    try:
        model._device_mesh = None
        for module, weight in sharded.items():
            assert weight is not None
            # without memory for all elements
            shaped = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
            module._parameters["weight"] = nn.Parameter(shaped, requires_grad=False)
        yield
    finally:
        model._device_mesh = mesh
        for module, weight in sharded.items():
            module._parameters["weight"] = weight


def _is_sharded(module: nn.Module) -> bool:
    """Return whether this rank has only a shard of the weight of ``module``."""
    return isinstance(module._parameters.get("weight"), DTensor)


def _style(model: PreTrainedModel, layer: str) -> str:
    """Return the name of the division of ``layer`` in transformers' plan for tensor parallelism; empty if it has
    none."""
    plan: dict[str, str] = model.tp_plan or {}
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", layer), "")


def _refuse_style(model: PreTrainedModel, layer: str, weight: Tensor, base: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a layer whose ``weight`` is divided among tensor-parallel
    ranks in another way than by rows or by columns."""
    style = _style(model, layer)
    if style in (BY_ROWS, BY_COLUMNS) or style in _WHOLE or (not style and not _cut_over_tensor(weight)):
        return
    raise ConfigError(
        f"model.lora adapts {layer} of model.path={base!r}, and learner.parallel.tensor cuts that layer as {style!r}: "
        "its adapter would not be computed exactly",
        remedy="leave it out of model.lora.target_modules, or set learner.parallel.tensor = 1",
    )


def _cut_over_tensor(weight: Tensor) -> bool:
    """Return whether a weight is divided among tensor-parallel ranks."""
    if not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    return any(name == "tp" and not each.is_replicate() for name, each in zip(names, weight.placements, strict=False))


def _rows_of_b(layer: nn.Linear, group: dist.ProcessGroup, inner: Tensor) -> Tensor:
    """Return this rank's shard of the output of B (``layer``) from A·x (``inner``), which every rank has. The backward
    pass sums the gradients of A·x over the ranks."""
    backward: Any = _SumBackward.apply
    rows = layer.weight.chunk(dist.get_world_size(group), dim=0)[dist.get_rank(group)]
    return F.linear(backward(inner, group), rows)


def _columns_of_a(layer: nn.Linear, group: dist.ProcessGroup, part: Tensor) -> Tensor:
    """Return A·x on every rank, from A (``layer``) and this rank's ``part`` of x."""
    forward: Any = _SumForward.apply
    columns = layer.weight.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
    summed: Tensor = forward(F.linear(part, columns), group)
    return summed


class _SumForward(torch.autograd.Function):
    """A sum over ranks, all of which continue with the sum. The gradient of each summand is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of the parts of all ranks of ``group``."""
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the sum as the gradient of this rank's summand."""
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    """The identity, for a tensor from which ranks compute different parts of a result. The backward pass sums the
    gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, same: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return ``same``, the tensor that is equal on all ranks."""
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients of all ranks."""
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
