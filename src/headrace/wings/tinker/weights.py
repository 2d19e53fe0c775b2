"""The two kinds of weights that clients train: an adapter on the frozen base model, or all weights of a model.

Both kinds are records of tensors, so that the optimizer and the files treat them alike. This module defines how a pass
computes with them: hooks add an adapter, while whole weights replace the base's weights during the pass. A
specification (``spec``) contains the settings of a model: ``base``, ``rank``, ``seed`` and ``parts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError
from headrace.models.multilora import ATTENTION, HEAD, MLP, LoraTensors, MultiLora, Segment
from headrace.models.weights import weight_tensors
from headrace.wings.tinker.schema import CreateModelBody, LoraBody

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeTensors:
    """All weights of a model, as one client trains them."""

    tensors: dict[str, Tensor]
    """The tensors by the names of the model's parameters; a parameter that two modules share has one entry."""


Weights = LoraTensors | WholeTensors


class WeightKind(Protocol):
    """The contract of a kind of weights that clients train on a base: how to create them, and how the base computes
    with them. It is not thread-safe."""

    alone: bool
    """Whether only one model at a time can be trained on the base."""

    def make_spec(self, body: CreateModelBody, max_rank: int) -> Spec:
        """Return the specification of the model that the request ``body`` describes. Raises
        :class:`~headrace.base.errors.ConfigError` if this server cannot train it, for example because its rank is above
        ``max_rank``."""
        ...

    def create(self, spec: Mapping[str, Any]) -> Weights:
        """Create and return trainable weights with the specification ``spec``, with which the model computes the same
        as the base."""
        ...

    def list_shapes(self, spec: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors of weights with this specification."""
        ...

    def on(self, weights: Any) -> AbstractContextManager[None]:
        """Return a context in which forward and backward passes compute with ``weights``; ``None`` stands for the
        base's own weights."""
        ...

    def runs_head(self, weights: Any) -> bool:
        """Return whether the head must be called as a module, because with ``weights`` the head is not a single
        matrix."""
        ...


class AdapterKind:
    """Adapters of low rank (LoRA), one for each model in training. All adapters share the frozen base."""

    alone = False

    def __init__(self, model: PreTrainedModel) -> None:
        """Add hooks to ``model`` by which passes compute with adapters."""
        self._multi = MultiLora(model)
        """The hooks that add the adapter of each token."""

    def make_spec(self, body: CreateModelBody, max_rank: int) -> Spec:
        """Return the specification of the adapter that the request ``body`` describes. Raises
        :class:`~headrace.base.errors.ConfigError` for a rank above ``max_rank``, and for an invalid seed or choice of
        parts."""
        lora = body.lora_config
        if lora is None:
            raise ConfigError(
                f"create_model without lora_config: {body.base_model} trains adapters",
                remedy="give one, or ask for a name that the server has from --whole",
            )
        if not 1 <= lora.rank <= max_rank:
            raise ConfigError(f"lora_config.rank={lora.rank}", remedy=f"set 1 to {max_rank} (--max-rank)")
        if lora.seed is not None and not -(2**63) <= lora.seed < 2**63:
            raise ConfigError(f"lora_config.seed={lora.seed}", remedy="set a number of 64 bits, or leave it out")
        flags = {ATTENTION: lora.train_attn, MLP: lora.train_mlp, HEAD: lora.train_unembed}
        parts = [part for part, wanted in flags.items() if wanted]
        if not parts:
            raise ConfigError("lora_config trains nothing", remedy="set train_attn, train_mlp or train_unembed")
        return {"base": body.base_model, "rank": lora.rank, "seed": lora.seed, "parts": parts}

    def create(self, spec: Mapping[str, Any]) -> LoraTensors:
        """Create and return an adapter with the specification ``spec``. Raises
        :class:`~headrace.base.errors.ConfigError` if the base has no layers of one of its parts."""
        if self._multi.has_experts and MLP in spec["parts"]:
            raise ConfigError("train_mlp=True: the experts of this model get no adapter", remedy="set train_mlp=False")
        missing = {*spec["parts"]} - {layer.part for layer in self._multi.layers.values()}
        if missing:
            raise ConfigError(f"this model has no layer of {', '.join(sorted(missing))}", remedy="leave that part out")
        return self._multi.create(rank=spec["rank"], parts=spec["parts"], seed=spec["seed"])

    def list_shapes(self, spec: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors of an adapter with this specification."""
        return {**self._multi.get_shapes(rank=spec["rank"], parts=spec["parts"])}

    def on(self, weights: LoraTensors | None) -> AbstractContextManager[None]:
        """Return a context in which all tokens are computed with the adapter ``weights``, or by the base alone for
        ``None``."""
        return self._multi.on([Segment(lora=weights)])

    def runs_head(self, weights: LoraTensors | None) -> bool:
        """Return whether the adapter ``weights`` changes the head, whose hooks run only if it is called as a module."""
        return weights is not None and any(weights.pair(name) is not None for name in self._multi.heads)


class WholeKind:
    """Whole weights, which one model at a time trains. They replace the base's weights during a pass; the base's own
    weights stay unchanged in memory."""

    alone = True

    def __init__(self, model: PreTrainedModel) -> None:
        """Freeze ``model``, and record its own weights and every attribute of its modules that refers to one of
        them."""
        model.requires_grad_(requires_grad=False)
        self._base = self._current = weight_tensors(model)
        """The base's own weights by name. ``_current`` are the weights that the module computes with now."""
        names = {id(tensor): name for name, tensor in self._base.items()}
        self._parameter_slots: list[tuple[dict[str, Any], str, str]] = [
            (module._parameters, key, names[id(tensor)])  # all references to a tied parameter
            for module in model.modules()
            for key, tensor in module._parameters.items()
            if tensor is not None
        ]
        """All places of the module's parameters: the dictionary, the key in it, and the name of the weight."""

    def make_spec(self, body: CreateModelBody, max_rank: int) -> Spec:
        """Return the specification of a model that trains all weights; ``max_rank`` is not used. Raises
        :class:`~headrace.base.errors.ConfigError` if the request ``body`` excludes a part."""
        lora = body.lora_config or LoraBody(rank=1)
        flags = {"train_attn": lora.train_attn, "train_mlp": lora.train_mlp, "train_unembed": lora.train_unembed}
        left_out = next((name for name, wanted in flags.items() if not wanted), None)
        if left_out is not None:
            raise ConfigError(f"{left_out}=False: {body.base_model} trains all weights", remedy=f"set {left_out}=True")
        return {"base": body.base_model, "rank": None, "seed": 0, "parts": []}

    def create(self, spec: Mapping[str, Any]) -> WholeTensors:
        """Create and return trainable copies of the base's weights; ``spec`` is not used."""
        return WholeTensors(tensors={name: trainable(tensor.clone()) for name, tensor in self._base.items()})

    def list_shapes(self, spec: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of all weights of the base, which do not depend on ``spec``."""
        return {name: tuple(tensor.shape) for name, tensor in self._base.items()}

    @contextmanager
    def on(self, weights: WholeTensors | None) -> Iterator[None]:
        """Return a context in which the module computes with ``weights``, or with the base's own weights for ``None``.
        Contexts may nest."""
        before = self._current
        self._set_parameters(self._base if weights is None else weights.tensors)
        try:
            yield
        finally:
            self._set_parameters(before)  # the weights of the outer context

    def runs_head(self, weights: WholeTensors | None) -> bool:
        """Return ``False``: with whole weights the head is a single matrix."""
        return False

    def _set_parameters(self, tensors: dict[str, Tensor]) -> None:
        """Replace the module's parameters by ``tensors``, a mapping by parameter name."""
        self._current = tensors
        for parameters, key, name in self._parameter_slots:
            parameters[key] = tensors[name]


def trainable(tensor: Tensor) -> nn.Parameter:
    """Return ``tensor`` as a parameter that requires gradients and shares its memory."""
    return nn.Parameter(tensor.detach(), requires_grad=True)
