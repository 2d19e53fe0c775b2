"""LoRA adapters that are created and removed at run time, so that one pass can compute tokens of several adapters.

    linear layer:  x ──▶ base product, once for all tokens ───────────────▶ + ──▶ y
                   └──▶ tokens of adapter a ──▶ A_a ──▶ B_a ──▶ · scale ──▶ ┘
                   └──▶ tokens of adapter b ──▶ A_b ──▶ B_b ──▶ · scale ──▶ ┘

With :class:`Segment`, the products of each adapter are computed separately, in their own sizes, as training needs. With
:class:`LoraStack`, for passes without gradients, compiled kernels compute each token's adapter product together with
the base product (:mod:`headrace.models.kernels`). Without kernels, one batched product serves all adapters of a pass.
The cost then hardly depends on the number of adapters.

In contrast, :mod:`.lora` wraps layers by peft, with the same shape for all adapters, fixed when the model is loaded.
Here every adapter is a record of tensors with its own rank and layers, and the model only has a hook on each layer.

Shape legend: N tokens of a pass, K tokens whose logits are computed, I inputs and O outputs of a layer, R the rank, G
adapters of a pass, M slots for tokens of each adapter.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.base.errors import ModelError
from headrace.models.indexed import is_indexer
from headrace.models.kernels.fused import Fused
from headrace.models.kernels.panels import RANK_STEP, LowRank, Product
from headrace.models.lora import peft_adapts
from headrace.models.text_part import replace_prefix

ATTENTION, MLP, HEAD = "attention", "mlp", "head"
"""The parts of a model; an adapter adapts the layers of some of these parts."""

MOST_PADDING = 3
"""The largest ratio of slots to tokens in a batched product; above it, each adapter's product is computed
separately."""
KEPT_STACKS = 2
"""The number of stacks of adapters that are kept for the next passes."""

_ATTENTION = re.compile(r"attn|attention|mixer|mamba|ssm", re.IGNORECASE)
"""The pattern of the names of layers that belong to :data:`ATTENTION`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptableLayer:
    """A linear layer of a model that can have an adapter."""

    part: str
    """The part of the model that contains the layer: :data:`ATTENTION`, :data:`MLP` or :data:`HEAD`."""
    num_inputs: int
    """I, the size of the layer's input."""
    num_outputs: int
    """O, the size of the layer's output."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraTensors:
    """The tensors of one adapter (LoRA, Hu et al. 2022). A layer with the weight W computes W x + scale · B A x."""

    rank: int
    """R, the inner size of the product B A."""
    scale: float
    """The factor of the product B A x, α / rank."""
    tensors: dict[str, Tensor]
    """A ``[R, I]`` as ``NAME.lora_A`` and B ``[O, R]`` as ``NAME.lora_B``, for each adapted layer."""
    _pairs: dict[str, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)
    """A and B of each adapted layer, by the layer's name."""

    def __post_init__(self) -> None:
        """Collect A and B of each adapted layer."""
        for name in sorted({key.rpartition(".")[0] for key in self.tensors}):
            self._pairs[name] = self.tensors[f"{name}.lora_A"], self.tensors[f"{name}.lora_B"]

    def pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return A and B of the layer ``name``; ``None`` for a layer that the adapter does not adapt."""
        return self._pairs.get(name)

    def copy(self) -> LoraTensors:
        """Return a copy without gradients, which does not change when this adapter is trained further."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        return LoraTensors(rank=self.rank, scale=self.scale, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tokens of one pass that use the same adapter."""

    lora: LoraTensors | None
    """The adapter; ``None`` for tokens without an adapter."""
    rows_N: Tensor | None = None
    """The indices of the tokens in the pass; ``None`` for all tokens of the pass."""
    rows_K: Tensor | None = None
    """The indices of the tokens among those whose logits are computed; ``None`` for all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraStack:
    """The tensors of several adapters, stacked. Smaller ranks are padded with zeros, to a multiple of
    :data:`~headrace.models.kernels.panels.RANK_STEP`. The stack is a copy, which training an adapter does not
    change."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A ``[G, I, R]`` and scaled B ``[G, R, O]`` of each layer that any of the adapters adapts."""

    @classmethod
    @torch.no_grad()
    def from_adapters(cls, loras: Sequence[LoraTensors]) -> LoraStack:
        """Return the stack of ``loras``. The number of an adapter in the stack is its index in ``loras``."""
        rank = -(-max(each.rank for each in loras) // RANK_STEP) * RANK_STEP
        pairs = dict[str, tuple[Tensor, Tensor]]()
        for name in sorted({key for each in loras for key in each._pairs}):
            known = next(pair for each in loras if (pair := each.pair(name)) is not None)
            a_GIR = known[0].new_zeros(len(loras), known[0].shape[1], rank)
            b_GRO = known[1].new_zeros(len(loras), rank, known[1].shape[0])
            for place, each in enumerate(loras):
                if (pair := each.pair(name)) is not None:
                    a_GIR[place, :, : each.rank] = pair[0].T
                    b_GRO[place, : each.rank] = pair[1].T * each.scale
            pairs[name] = a_GIR, b_GRO
        return cls(pairs)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRows:
    """The adapter of each token of a pass, and of each token whose logits are computed."""

    adapter_N: npt.NDArray[np.int32]
    """The adapter of each token, from 0 to G - 1; -1 for no adapter."""
    adapter_K: npt.NDArray[np.int32]
    """The adapter of each token whose logits are computed, with the same numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class _GroupedRows:
    """The tokens of a pass arranged by adapter, in G x M slots."""

    gather_GM: Tensor
    """The index of the token in each slot; any index for an unused slot."""
    rows: Tensor
    """The indices of the tokens of all adapters, ordered by adapter."""
    places: Tensor | None
    """The slot of each of ``rows``; ``None`` if every slot is used."""

    @classmethod
    def create(cls, adapter_N: npt.NDArray[np.int32], num_adapters: int, device: torch.device) -> _GroupedRows:
        """Return the arrangement, as tensors on ``device``, for a pass in which token n uses the adapter with number
        ``adapter_N[n]`` of a stack of ``num_adapters`` adapters; −1 for no adapter."""
        tokens_by_adapter = [np.flatnonzero(adapter_N == adapter) for adapter in range(num_adapters)]
        width = max(map(len, tokens_by_adapter))
        gather_GM, used_GM = np.zeros((num_adapters, width), np.int64), np.zeros((num_adapters, width), bool)
        for adapter, tokens in enumerate(tokens_by_adapter):
            gather_GM[adapter, : len(tokens)], used_GM[adapter, : len(tokens)] = tokens, True
        places = None if used_GM.all() else torch.from_numpy(np.flatnonzero(used_GM)).to(device)
        rows = torch.from_numpy(np.concatenate(tokens_by_adapter)).to(device)
        return cls(torch.from_numpy(gather_GM).to(device), rows, places)


class MultiLora:
    """Forward hooks on the linear layers of one model, which add the products of adapters. :meth:`on` and
    :meth:`on_rows` choose the adapters of a pass. The weights of the model are frozen. This class is not thread-safe: a
    model is used by one thread at a time.

    >>> import tempfile; from pathlib import Path
    >>> from headrace.models import ModelConfig, load_model
    >>> from headrace.models.tiny import TinySpec, make_tiny
    >>> path = make_tiny(Path(tempfile.mkdtemp()) / "model", TinySpec(vocab="ab", hidden_size=16, num_layers=1))
    >>> multi = MultiLora(load_model(ModelConfig(path=str(path))))
    >>> lora = multi.create(rank=2, parts=("attention",), seed=1)
    >>> sorted(lora.tensors)[0], tuple(lora.tensors["model.layers.0.self_attn.q_proj.lora_A"].shape)
    ('model.layers.0.self_attn.k_proj.lora_A', (2, 16))
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Freeze ``model`` and register the hooks. Raises :class:`~headrace.base.errors.ModelError` for a model without
        linear layers."""
        model.requires_grad_(requires_grad=False)
        self.device, self._segments = model.device, list[Segment]()
        self._stack: _StackPass | None = None
        """The pass with a stack of adapters that is being computed; ``None`` outside such a pass."""
        self._stacks: deque[tuple[list[LoraTensors], LoraStack]] = deque(maxlen=KEPT_STACKS)
        """The stacks used last, each with its adapters."""
        self._modules: dict[str, nn.Module] = {}
        """The module of each layer in ``layers``, by name."""
        head: Any = model.get_output_embeddings()
        self.layers: dict[str, AdaptableLayer] = {}
        """Every layer that can be adapted, by name."""
        choosing = {part for module in model.modules() if is_indexer(module) for part in module.modules()}
        for name, module in model.named_modules():
            # the choice of an indexer has no gradient; an adapter that peft refuses could not be used elsewhere
            if isinstance(module, nn.Linear) and module not in choosing and peft_adapts(model, name):
                part = HEAD if module is head else ATTENTION if _ATTENTION.search(name) else MLP
                outputs, inputs = module.weight.shape
                self.layers[name] = AdaptableLayer(part=part, num_inputs=inputs, num_outputs=outputs)
                self._modules[name] = module
                module.register_forward_hook(self._hook(name, part == HEAD))
        self.heads = [name for name, layer in self.layers.items() if layer.part == HEAD]
        """The names of the layers that compute the logits."""
        if not self.layers:
            raise ModelError(
                f"a {type(model).__name__} has no linear layers to adapt",
                remedy="take an architecture whose projections are linear layers, such as qwen3 or llama",
            )
        self.has_experts = any(
            parameter.ndim == 3
            for module in model.modules()
            for parameter in module.parameters(recurse=False)
            if not isinstance(module, nn.Conv1d)
        )
        """Whether the model has weights of experts, which cannot be adapted here."""

    def create(self, *, rank: int, parts: Sequence[str], seed: int, alpha: float = 32.0) -> LoraTensors:
        """Return a new adapter for the layers of ``parts`` (attention, MLP, head) with the rank ``rank`` and the scale
        ``alpha / rank``. A is drawn from ``seed``, uniform in ±1/√inputs, layer by layer in the order of names. B is 0,
        so that training begins at the base. torch's random generators are not changed."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for name, shape in self.get_shapes(rank=rank, parts=parts).items():
            if name.endswith(".lora_A"):
                bound = 1.0 / math.sqrt(shape[1])
                values = torch.empty(shape).uniform_(-bound, bound, generator=generator)
                tensors[name] = values.to(self.device).requires_grad_()
            else:
                tensors[name] = torch.zeros(shape, device=self.device).requires_grad_()
        return LoraTensors(rank=rank, scale=alpha / rank, tensors=tensors)

    def get_shapes(self, *, rank: int, parts: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the names and shapes of the tensors of an adapter with the rank ``rank`` for the layers of ``parts``,
        in the order of names."""
        shapes: dict[str, tuple[int, int]] = {}
        for name, layer in sorted(self.layers.items()):
            if layer.part in parts:
                shapes[f"{name}.lora_A"] = rank, layer.num_inputs
                shapes[f"{name}.lora_B"] = layer.num_outputs, rank
        return shapes

    @contextmanager
    def on(self, segments: Sequence[Segment]) -> Iterator[None]:
        """A context in which each segment's tokens use the segment's adapter, in forward passes with or without
        gradients."""
        before, self._segments = self._segments, [one for one in segments if one.lora is not None]
        try:
            yield
        finally:
            self._segments = before

    def on_rows(self, loras: Sequence[LoraTensors], rows: AdapterRows) -> AbstractContextManager[None]:
        """Return a context in which each token uses its adapter among ``loras``, as ``rows`` says, in forward passes
        without gradients. The context uses the cheapest way: kernels, one batched product for all adapters, or one
        product per adapter."""
        if not loras:
            return self.on([])
        products = self._products()
        counts = np.bincount(rows.adapter_N + 1, minlength=len(loras) + 1)
        if not products and counts[0] == 0 and len(loras) == 1:
            return self.on([Segment(lora=loras[0])])
        most, total = len(loras) * counts[1:].max(initial=0), counts[1:].sum()
        if not products and (len(loras) < 2 or most > MOST_PADDING * total):
            return self.on([self._segment(lora, place, rows) for place, lora in enumerate(loras)])
        used = _StackPass(self._get_stack(loras), rows, len(loras), self.device)
        return self._on_stack(used, products)

    @contextmanager
    def _on_stack(self, used: _StackPass, products: Mapping[str, Product]) -> Iterator[None]:
        """A context for one pass with a stack. The kernels of ``products`` compute their layers' adapters, and the
        hooks those of all other layers."""
        adapter_N, adapter_K = torch.from_numpy(used.rows.adapter_N), torch.from_numpy(used.rows.adapter_K)
        before, self._stack = self._stack, used
        try:
            for name, pair in used.stack.pairs.items():
                if name in products:
                    products[name].lora = LowRank(*pair, adapter_K if name in self.heads else adapter_N)
            yield
        finally:
            self._stack = before
            for product in products.values():
                product.lora = None

    def _products(self) -> dict[str, Product]:
        """Return the products of the layers that are computed by kernels at present, by the name of the layer. Modules
        may have been fused after this object was created."""
        return {name: module.__dict__["product"] for name, module in self._modules.items() if _on_kernels(module)}

    def _segment(self, lora: LoraTensors, place: int, rows: AdapterRows) -> Segment:
        """Return the segment of the tokens that use ``lora``, whose number in ``rows`` is ``place``."""
        tokens, logits = (torch.from_numpy(np.flatnonzero(each == place)) for each in (rows.adapter_N, rows.adapter_K))
        return Segment(lora=lora, rows_N=tokens.to(self.device), rows_K=logits.to(self.device))

    def _get_stack(self, loras: Sequence[LoraTensors]) -> LoraStack:
        """Return the stack of ``loras``. The latest stacks are cached, since consecutive passes often use the same."""
        for known, stack in self._stacks:
            if len(known) == len(loras) and all(map(is_, known, loras)):
                return stack
        stack = LoraStack.from_adapters(loras)
        self._stacks.append((list(loras), stack))
        return stack

    def _hook(self, name: str, is_head: bool) -> Any:
        """Return the forward hook of the layer ``name``, which adds the products of the present pass's adapters to the
        layer's output. The head (``is_head``) computes only the tokens whose logits are needed."""

        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            """Return the output of the layer plus the products of the adapters, each for the rows that use it."""
            if self._stack is not None:
                products = self._stack.stack.pairs.get(name)
                if products is None or _on_kernels(module):  # the kernels have added them already
                    return output
                return _add_stack_products(output, inputs[0], products, self._stack.grouped(is_head=is_head))
            for segment in self._segments:
                assert segment.lora is not None
                pair = segment.lora.pair(name)
                if pair is not None:
                    rows = segment.rows_K if is_head else segment.rows_N
                    output = _add_product(output, inputs[0], pair, segment.lora.scale, rows)
            return output

        return add


class _StackPass:
    """One pass with a stack of adapters. The rows of batched products are arranged when a hook first needs them."""

    def __init__(self, stack: LoraStack, rows: AdapterRows, num_adapters: int, device: torch.device) -> None:
        """Prepare a pass with ``stack``, which consists of ``num_adapters`` adapters on ``device``; ``rows`` contains
        the adapter of each token."""
        self.stack, self.rows = stack, rows
        self._num_adapters, self._device = num_adapters, device
        self._grouped: dict[bool, _GroupedRows] = {}
        """The arrangements that were needed so far, by ``is_head``."""

    def grouped(self, *, is_head: bool) -> _GroupedRows:
        """Return the arrangement of all tokens or, if ``is_head``, of the tokens whose logits are computed, for the
        output layer."""
        if is_head not in self._grouped:
            adapters = self.rows.adapter_K if is_head else self.rows.adapter_N
            self._grouped[is_head] = _GroupedRows.create(adapters, self._num_adapters, self._device)
        return self._grouped[is_head]


def _on_kernels(module: nn.Module) -> bool:
    """Return whether kernels compute a linear module, separately or as a part of a fused module."""
    return isinstance(module.__dict__.get("forward"), Fused) and not torch.is_grad_enabled()


def _add_product(
    output: Tensor, inputs: Tensor, pair: tuple[Tensor, Tensor], scale: float, rows: Tensor | None
) -> Tensor:
    """Return ``output`` plus the adapter's product at the rows ``rows`` (``None`` for all rows). ``output`` is the
    output of a linear layer for the inputs ``inputs``, ``pair`` is A and B, and ``scale`` is the factor of their
    product."""
    a_RI, b_OR = pair
    flat_NO = output.view(-1, output.shape[-1])
    given_NI = inputs.reshape(-1, inputs.shape[-1])
    if rows is None and output.dtype == a_RI.dtype:
        return torch.addmm(flat_NO, given_NI @ a_RI.T, b_OR.T, alpha=scale).view(output.shape)
    if rows is None:
        return output + ((inputs.to(a_RI.dtype) @ a_RI.T) @ b_OR.T * scale).to(output.dtype)
    added = (given_NI.index_select(0, rows).to(a_RI.dtype) @ a_RI.T) @ b_OR.T * scale
    return flat_NO.index_add(0, rows, added.to(output.dtype)).view(output.shape)


def _add_stack_products(output: Tensor, inputs: Tensor, pair: tuple[Tensor, Tensor], rows: _GroupedRows) -> Tensor:
    """Return ``output`` plus the products of all adapters of a stack at their ``rows``. ``output`` is the output of a
    linear layer for the inputs ``inputs``, and ``pair`` is A and B of the stack for this layer."""
    a_GIR, b_GRO = pair
    picked = inputs.reshape(-1, inputs.shape[-1]).index_select(0, rows.gather_GM.view(-1)).to(a_GIR.dtype)
    added = torch.bmm(torch.bmm(picked.view(*rows.gather_GM.shape, -1), a_GIR), b_GRO).flatten(0, 1)
    if rows.places is not None:
        added = added.index_select(0, rows.places)
    # in place: the output of a linear layer is a tensor of its own, and there are no gradients
    return output.view(-1, output.shape[-1]).index_add_(0, rows.rows, added.to(output.dtype)).view(output.shape)


def to_peft(
    lora: LoraTensors, base: str, prefixes: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors of ``lora`` in the format of peft's files. A model that
    ``PeftModel.from_pretrained`` loads from them computes the same. ``base`` is the name of the base model, and
    ``prefixes`` are those of :func:`~headrace.models.text_part.prefixes_in_base`."""
    named = {replace_prefix(key, prefixes): value for key, value in lora.tensors.items()}
    names = sorted({key.rpartition(".")[0] for key in named})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": names,
        "bias": "none",
        "lora_dropout": 0.0,
        "use_dora": False,
        "inference_mode": True,
    }
    tensors = {f"base_model.model.{key}.weight": value.detach().contiguous() for key, value in named.items()}
    return settings, tensors


def from_tensors(tensors: Mapping[str, Tensor], *, rank: int, scale: float, trained: bool) -> LoraTensors:
    """Return an adapter with the rank ``rank``, the scale ``scale`` and copies of ``tensors``, which have the names of
    :attr:`LoraTensors.tensors`. ``trained`` says whether the copies require gradients."""
    own = {name: tensor.detach().clone().requires_grad_(trained) for name, tensor in tensors.items()}
    return LoraTensors(rank=rank, scale=scale, tensors=own)
