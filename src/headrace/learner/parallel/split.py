"""The computation of log π with a model whose parameters are sharded over ranks.

    model's forward pass, with the head for the last token only    ──▶ hidden states, from a hook on the trunk
    head's forward pass, replaced by a pass over tiles or chunks   ──▶ log π

Torch's sharding is implemented by hooks on the forward passes of the model and of its head: before a pass, parameters
are gathered; after its backward pass, gradients are reduced over the ranks. Therefore the trunk runs inside the model's
pass. All chunks run inside one pass of the head, whose ``forward`` is replaced for this pass, so its parameters are
gathered once. A head that is a single matrix is computed in tiles (head.py); with tensor parallelism, each rank
computes its part of the vocabulary.

Shape legend: M tokens of a micro-batch, P positions before a loss token, C positions of one chunk, V vocabulary,
D hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from headrace.learner.head import HeadMatrix
from headrace.learner.logits import GivenHidden, TrunkAndHead, acts_as_matrix
from headrace.learner.parallel.shards import local_shard
from headrace.learner.vocabulary import VocabularyPart
from headrace.models.text_part import trunk_name

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

MakeLogprobs = Callable[[TrunkAndHead], Callable[..., tuple[Tensor, ...]]]


class ShardedLogprobs:
    """The computation of :class:`~headrace.learner.logits.TokenLogprobs` (log π and entropies) for a model whose
    parameters are sharded over ranks. ``make`` returns this computation, or a similar one, for a given trunk and head.

    All ranks must make the same number of calls, in the same order, but with their own tokens and rows.
    """

    def __init__(self, model: PreTrainedModel, make: MakeLogprobs, probe: dict[str, Any]) -> None:
        """Prepare the computation for ``model`` by a forward pass over ``probe``, the keyword arguments of a short
        pass. All ranks must call this together."""
        self._model = model
        self._trunk: nn.Module = model.get_submodule(trunk_name(model))
        self._head: nn.Module = model.get_output_embeddings()
        alone = _HeadAlone(model, self._head)
        self._logprobs = make(alone)
        """The computation with the trunk and head that is used inside the head's forward pass."""
        with torch.no_grad():
            self._hidden(probe)  # afterwards, a weight that the head shares with the embedding is gathered
            self._inside_head(alone.detect_matrix, torch.zeros(1, device=model.device))
        reshard(model)

    def __call__(self, inputs: dict[str, Any], before_P: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Return the same tensors as :meth:`TokenLogprobs.__call__`, for the same arguments: the keyword arguments of a
        forward pass, the positions before the loss tokens, and ``arguments``, the further arguments of the
        computation."""
        hidden_PD = self._hidden(inputs)[before_P]
        rows_P = torch.arange(len(before_P), device=hidden_PD.device)
        found = self._inside_head(lambda given_PD: self._columns(given_PD, rows_P, *arguments), hidden_PD)
        if not torch.is_grad_enabled():
            reshard(self._model)
        return found

    def _columns(self, hidden_PD: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Compute the columns from the hidden states of the P positions; called inside the head's forward pass."""
        found = self._logprobs({"hidden": hidden_PD}, *arguments)
        # copies, since a view would lose torch's hooks if it were changed
        return tuple(column_P.clone() for column_P in found)

    def _hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Run the model over ``inputs``, the keyword arguments of its forward pass, and return the output of its trunk
        for every token, ``[M, D]``."""
        outputs: list[Tensor] = []
        handle = self._trunk.register_forward_hook(lambda _module, _args, out: outputs.append(out.last_hidden_state))
        try:
            self._model(**inputs, use_cache=False, logits_to_keep=1)
        finally:
            handle.remove()
        return outputs[0][0]

    def _inside_head(self, work: Callable[[Tensor], tuple[Tensor, ...]], hidden_PD: Tensor) -> tuple[Tensor, ...]:
        """Run ``work`` on the hidden states as the forward pass of the head, so that torch gathers the head's
        parameters, and return its result."""
        original_forward = self._head.__dict__.get("forward")
        self._head.forward = work
        try:
            found: tuple[Tensor, ...] = self._head(hidden_PD)
        finally:
            del self._head.__dict__["forward"]
            if original_forward is not None:
                self._head.forward = original_forward
        return found


class _HeadAlone:
    """The :class:`TrunkAndHead` that is used inside the head's forward pass: the hidden states are given, and only the
    head is computed."""

    def __init__(self, model: PreTrainedModel, head: nn.Module) -> None:
        """Create a shallow copy of ``model`` in which ``head`` has no sharding hooks and the trunk returns given hidden
        states."""
        trunk = model.get_submodule(trunk_name(model))
        self._given_hidden = GivenHidden(trunk)
        """The module that replaces the trunk and returns given hidden states."""
        self._head = head
        self._is_matrix = False
        """Whether the head is a single matrix product, as :meth:`detect_matrix` has found."""
        replaced = {id(head): _HeadWithoutSharding(head), id(trunk): self._given_hidden}
        children = {name: replaced.get(id(child), child) for name, child in model._modules.items()}
        self._model = _copy_without_hooks(model, children)
        """A shallow copy of the model without sharding hooks."""

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Return the hidden states in ``inputs``, since the trunk has run already."""
        hidden_PD: Tensor = inputs["hidden"]
        return hidden_PD

    def detect_matrix(self, unused: Tensor) -> tuple[Tensor, ...]:
        """Determine whether the head is a single matrix. It is called as the forward pass of the head, so it returns
        its argument, which is not used."""
        found = _matrix(self._head) if plain_class(self._head) is nn.Linear else None
        self._is_matrix = found is not None and acts_as_matrix(found, self.logits)
        return (unused,)

    def matrix(self) -> HeadMatrix | None:
        """Return the head, or this rank's shard of it inside the head's forward pass, if it is a single matrix;
        otherwise ``None``."""
        return _matrix(self._head) if self._is_matrix else None

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the logits ``[C, V]`` that the model's own head computes from hidden states."""
        return self._given_hidden.compute_logits(self._model, hidden_CD)


def _matrix(linear: Any) -> HeadMatrix | None:
    """Return the matrix of a linear layer on this rank inside the layer's forward pass: the whole matrix, or some rows
    of it; ``None`` if it is distributed in another way."""
    weight, bias = linear.weight, linear.bias
    if type(weight) is nn.Parameter:
        return HeadMatrix(weight, bias)
    if not isinstance(weight, DTensor) or weight.placements != (Shard(0),):
        return None
    group, rows = weight.device_mesh.get_group(), local_shard(weight)
    # torch divides rows into parts of equal size, except the last
    first = min(len(weight), group.rank() * -(-len(weight) // group.size()))
    return HeadMatrix(rows, None if bias is None else local_shard(bias), VocabularyPart(first, group))


class _HeadWithoutSharding(nn.Module):
    """The head's computation without the hooks of its sharding."""

    def __init__(self, head: nn.Module) -> None:
        """Wrap ``head``; its parameters remain parameters of the sharded model."""
        super().__init__()
        self._forward = head.forward
        """The head's own forward method."""
        self.__dict__["head"] = head  # not as a submodule, since its parameters belong to the sharded model

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of the head, such as its weight, whose dtype the model's forward pass reads."""
        return getattr(self.__dict__["head"], name)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, computed by the head's original forward method."""
        logits: Tensor = self._forward(hidden)
        return logits


def own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class that ``model`` had before it was sharded; see :func:`plain_class`."""
    kind: type[PreTrainedModel] = plain_class(model)
    return kind


def plain_class(module: nn.Module) -> Any:
    """Return the class that ``module`` had before it was sharded. Torch replaces the class by a subclass of FSDPModule
    and the original class, which cannot be copied."""
    kind = type(module)
    return kind.__mro__[2] if issubclass(kind, FSDPModule) else kind


def _copy_without_hooks(model: PreTrainedModel, children: dict[str, Any]) -> nn.Module:
    """Return a shallow copy of ``model`` with the modules ``children`` in place of its own, and without the hooks of
    its sharding."""
    bare: nn.Module = object.__new__(own_class(model))
    bare.__dict__.update(model.__dict__)
    bare.__dict__.update({name: OrderedDict() for name in _HOOKS}, _modules=children)
    return bare


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of ``model``. After a forward pass without a backward pass, some would be kept, and
    would be outdated after an update."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
