"""Execution of a whole decoder layer in one kernel call, for layers that consist of two norms, a mixer (attention or
the gated delta rule) and a gated MLP with two residual connections.

The call computes the same operations as the layer's fused modules, with the same bits. It saves the time of Python
calls and of threads that wait for each other. It is used for passes over a paged cache; in a layer with a recurrent
state, only if all sequences of the pass decode. Other passes, and passes with gradients, call the modules.

Shape legend: N tokens, D hidden size, K key-value heads, S tokens of a block, E head size, R rows, B blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.models.attention import PLAN, forward
from headrace.models.kernels.fused import Fused, FusedAttention, FusedGated, FusedNorm, close, restore
from headrace.models.kernels.mixers import FusedDeltaNet, decoding_states, fits_delta_net
from headrace.models.kernels.ops import (
    Block,
    Decoder,
    DecoderTokens,
    DeltaDecoder,
    Kernels,
    ProductPart,
    RotaryArgs,
    norm_args,
    point,
    rotary_args,
)
from headrace.models.kernels.panels import Product
from headrace.models.paged.base import Geometry, PagedCache
from headrace.models.paged.compiled import CompiledAttention
from headrace.models.paged.plan import PagedPlan, cache_shapes
from headrace.models.recurrent import StatePass, StatePool, state_shapes

_NORMS, _MLP = ("input_layernorm", "post_attention_layernorm"), "mlp"
_ATTENTION, _DELTA = "self_attn", "linear_attn"
_PARTS = {**dict.fromkeys(_NORMS, FusedNorm), _MLP: FusedGated}
"""The submodules of a decoder layer besides its mixer, by name, and the class that computes each."""
_GAP_BYTES = 64
"""The padding, in bytes, between the rows of the MLP's inner activations: a line of the processor's cache, as in
kernels.cpp."""
_PROBE = (2, 15)
"""The numbers of new tokens in the two rows of the probe. The second row enters its second block when it continues."""


MakeForward = Callable[[nn.Module], Fused]
"""A function that makes the replacement of the forward method of a module."""


class ScratchBuffers:
    """Scratch memory that all layers of a model use in turn. The system would have to clear newly allocated memory at
    each allocation."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Start without any memory. ``dtype`` is the number format of the kernels."""
        self._numbers = torch.empty(0, dtype=dtype)
        """The memory, which grows when more is needed."""

    def get(self, count: int) -> Tensor:
        """Return a tensor of at least ``count`` numbers with arbitrary values. The next call may return the
        same memory."""
        if len(self._numbers) < count:
            self._numbers = self._numbers.new_empty(count)
        return self._numbers


class FusedBlock(Fused):
    """The base class of the fused decoder layers: the parts of a layer around its mixer (attention or the gated delta
    rule)."""

    def __init__(
        self, module: nn.Module, ops: Kernels, room: ScratchBuffers, mixer: FusedAttention | FusedDeltaNet, mixed: int
    ) -> None:
        """Collect the matrix products of the decoder layer ``module``, which the kernels ``ops`` compute. ``mixer`` is
        its fused mixer, whose output has ``mixed`` numbers per token before the output product. ``room`` is scratch
        memory."""
        super().__init__(module, ops)
        self._room = room
        self._before, self._after, self._mlp = (getattr(module, name).__dict__["forward"] for name in _PARTS)
        """The fused forward methods of both norms and of the feed-forward part."""
        self._parts: list[Product] = mixer.parts
        """The input products of the mixer."""
        self._products: list[tuple[str, Product]] = list(
            zip(("out", "gate", "up", "down"), (mixer.out, *self._mlp.parts), strict=True)
        )
        """The other products of the layer, by their name in the kernel's arguments."""
        self._hidden = mixer.parts[0].linear.in_features
        """The size of a hidden state."""
        inner = 2 * (self._mlp.parts[0].linear.out_features + _GAP_BYTES // ops.dtype.itemsize)
        self._scratch = self._hidden + sum(part.linear.out_features for part in mixer.parts) + mixed + inner
        """The number of numbers of scratch memory that each token needs."""

    def tokens(self, x: Tensor, turn: RotaryArgs) -> tuple[DecoderTokens, Tensor]:
        """Return the kernel's argument for the tokens ``x``, which must be contiguous, and the tensor for the result.
        ``turn`` is the rotation of the heads."""
        count = x.numel() // self._hidden
        y, scratch = torch.empty_like(x), self._room.get(count * self._scratch)
        return DecoderTokens(x.data_ptr(), y.data_ptr(), scratch.data_ptr(), turn, count, self._hidden), y

    def block(self, num_tokens: int) -> Block:
        """Return the kernel's arguments for the parts around the mixer in a pass of ``num_tokens``, with the present
        addresses of the weights."""
        block = Block(norm_args(self._before.norm), norm_args(self._after.norm))
        for name, product in self._products:
            point(getattr(block, name), product.weights(), num_tokens)
        return block

    def products(self, num_tokens: int) -> Any:
        """Return the kernel's arguments for the input products of the layer's mixer (attention or delta rule) in a pass
        of ``num_tokens``."""
        parts = (ProductPart * len(self._parts))()
        for part, product in zip(parts, self._parts, strict=True):
            point(part, product.weights(), num_tokens)
        return parts


class FusedDecoder(FusedBlock):
    """The forward method of a decoder layer with attention, as one kernel call for a pass over a paged cache. Other
    passes call the layer's modules."""

    def __init__(self, module: nn.Module, ops: Kernels, room: ScratchBuffers) -> None:
        """Prepare the call for the decoder layer ``module``, whose submodules are already fused. ``room`` is scratch
        memory."""
        self._attention: FusedAttention = getattr(module, _ATTENTION).__dict__["forward"]
        """The fused attention of the layer."""
        self._heads, value_size = self._attention.sizes[0][0], self._attention.sizes[2][1]
        super().__init__(module, ops, room, self._attention, self._heads * value_size)

    def compute(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the decoder layer in one kernel call, with its keys and values in the paged cache. Passes without
        such a cache call the original modules."""
        plan, turn = kwargs.get(PLAN), kwargs.get("position_embeddings")
        if not isinstance(plan, PagedPlan) or turn is None:
            return self.original(hidden_states, *args, **kwargs)
        attention, pools = plan.layer(self._attention.rule)
        if not isinstance(attention, CompiledAttention):
            return self.original(hidden_states, *args, **kwargs)
        x = hidden_states.contiguous()
        cos, sin = (each[0].to(self.ops.dtype) for each in turn)
        tokens, y = self.tokens(x, rotary_args((cos, sin)))
        norms = (norm_args(norm) for norm in self._attention.norms)
        parts = Decoder(self.block(tokens.M), *norms, self.products(tokens.M), int(self._attention.gated))
        attention.decode(tokens, parts, attention.shape(self._heads, pools, self._attention.rule))
        return y


class FusedDeltaDecoder(FusedBlock):
    """The forward method of a decoder layer with the gated delta rule, as one kernel call for a pass in which all
    sequences decode. Other passes call the layer's modules."""

    def __init__(self, module: nn.Module, ops: Kernels, room: ScratchBuffers) -> None:
        """Prepare the call for the decoder layer ``module``, whose submodules are already fused. ``room`` is scratch
        memory."""
        self._mixer: FusedDeltaNet = getattr(module, _DELTA).__dict__["forward"]
        """The fused mixer of the layer."""
        _, heads, _, size = self._mixer.sizes
        super().__init__(module, ops, room, self._mixer, heads * size)

    def compute(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the decoder layer in one kernel call, if all sequences of the pass decode; otherwise call the
        original modules."""
        states = decoding_states(kwargs.get(PLAN))
        if states is None or states.num_decode < hidden_states.shape[1]:
            return self.original(hidden_states, *args, **kwargs)
        x = hidden_states.contiguous()
        tokens, y = self.tokens(x, RotaryArgs())
        parts = DeltaDecoder(self.block(tokens.M), self._mixer.net(states), self.products(tokens.M))
        self.ops.delta_decoder(tokens, parts, torch.get_num_threads())
        return y


def fuse_mixers(model: nn.Module, ops: Kernels) -> tuple[dict[str, int], str]:
    """Replace the mixers with the gated delta rule in a model whose modules are fused, if the model then decodes to the
    same logits up to rounding. Return the number of replaced mixers of each class, and the class of mixers that could
    not be replaced (empty if there is none)."""
    mixers = {module: partial(FusedDeltaNet, ops=ops) for module in model.modules() if fits_delta_net(module)}
    counts = _replace_if(close, model, ops, mixers)
    return counts, "" if counts or not mixers else type(next(iter(mixers))).__name__


def fuse_layers(model: nn.Module, ops: Kernels) -> dict[str, int]:
    """Replace the decoder layers of a model whose modules are fused, if its logits stay the same, bit for bit.

    Return the number of replaced layers of each class.
    """
    scratch = ScratchBuffers(ops.dtype)
    layers = {
        module: partial(kind, ops=ops, room=scratch)
        for module in model.modules()
        if (kind := _fused_layer_class(module)) is not None
    }
    return _replace_if(torch.equal, model, ops, layers)  # a layer may compute more than its modules


def _replace_if(
    same: Callable[[Tensor, Tensor], bool], model: nn.Module, ops: Kernels, forwards: Mapping[nn.Module, MakeForward]
) -> dict[str, int]:
    """Replace the forward methods of the modules in ``forwards``, if ``same`` says that the logits of a probe are the
    same with the replacements as before. Return the number of replaced modules of each class."""
    if not forwards:
        return {}
    with torch.inference_mode():
        expected = _decode_probe(model, ops)
        for module, make in forwards.items():
            module.forward = make(module)
        with suppress(Exception):  # a foreign module may raise anything
            if same(_decode_probe(model, ops), expected):
                return dict(Counter(type(module).__name__ for module in forwards))
    for module in forwards:
        restore(module.forward)  # type: ignore[arg-type]
    return {}


def _fused_layer_class(module: nn.Module) -> type[FusedDecoder | FusedDeltaDecoder] | None:
    """Return the class that computes the decoder layer ``module`` in one call; ``None`` for a module that is not a
    decoder layer, or that does not consist of exactly the fused parts."""
    children = dict(module.named_children())
    kinds: dict[str, tuple[type[FusedDecoder | FusedDeltaDecoder], type[Fused]]] = {
        _ATTENTION: (FusedDecoder, FusedAttention),
        _DELTA: (FusedDeltaDecoder, FusedDeltaNet),
    }
    for name, (found, mixer) in kinds.items():
        parts = {**_PARTS, name: mixer}
        plain = set(children) == set(parts) and not list(module.parameters(recurse=False))
        fused = plain and all(isinstance(children[each].__dict__.get("forward"), kind) for each, kind in parts.items())
        if fused and "forward" not in module.__dict__:
            return found
    return None


def _decode_probe(model: nn.Module, ops: Kernels) -> Tensor:
    """Return the logits of a probe that fills a paged cache and then decodes over it with the model's present modules.
    They are compared before and after a replacement."""
    cache = PagedCache(cache_shapes(model), 4, dtype=ops.dtype, device="cpu")  # also layers that attend on torch
    shapes = state_shapes(model)
    pool = StatePool(shapes, 2, "cpu", ops if ops.dtype == torch.float32 else None) if shapes else None
    tables_RB, starts_R, found = np.array([[0, 1], [2, 3]], np.int32), np.zeros(2, np.int64), []
    for counts, decoding in ((_PROBE, 0), ((1, 2), 1), ((1, 1), 2), ((1, 1), 2)):
        counts_R = np.array(counts, np.int64)
        geometry = Geometry(
            tables_RB=tables_RB, starts_R=starts_R.copy(), counts_R=counts_R, num_decode=decoding if shapes else 0
        )
        states = None if pool is None else StatePass(pool, np.arange(2))
        plan = PagedPlan(cache, geometry, lambda g, d: CompiledAttention(ops, g, d), torch.device("cpu"), states)
        ids_N = torch.arange(int(counts_R.sum())) * 3 % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        found.append(forward(model, ids_N, plan))
        starts_R += counts_R
    return torch.cat(found)
