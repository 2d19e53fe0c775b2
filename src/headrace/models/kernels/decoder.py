"""One call for a whole decoder layer, if the layer is two norms, attention and a gated MLP around two residuals.

The call computes what the layer's fused modules compute, operation by operation, with the same bits. It saves the time
of Python calls and of threads that wait for each other. It is used for passes over a paged cache; other passes, and
those with gradients, call the modules.

Shape legend: N tokens, D hidden size, K key-value heads, S tokens of a block, E head size, R rows, B blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.models.attention import PLAN, forward
from headrace.models.kernels.fused import Fused, FusedAttention, FusedGated, FusedNorm
from headrace.models.kernels.ops import Decoder, DecoderTokens, Kernels, norm_args, point, rotary_args
from headrace.models.kernels.panels import Product
from headrace.models.paged.base import Geometry, PagedCache
from headrace.models.paged.compiled import CompiledAttention
from headrace.models.paged.plan import PagedPlan, cache_shapes
from headrace.models.recurrent import StatePass, StatePool, state_shapes

_PARTS = {
    "input_layernorm": FusedNorm,
    "self_attn": FusedAttention,
    "post_attention_layernorm": FusedNorm,
    "mlp": FusedGated,
}
_GAP = 16
"""The padding, in numbers, between the rows of the MLP's inner activations; the same value as in kernels.cpp."""
_PROBE = (2, 15)
"""The numbers of new tokens of the probe's two rows. The second row reaches its second block when it continues."""


class ScratchBuffers:
    """Scratch memory that the layers of a model use one after the other. Memory that is allocated anew each time
    would be cleared by the system each time."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)

    def of(self, count: int) -> Tensor:
        """Return a tensor of at least ``count`` numbers with arbitrary values."""
        if len(self._numbers) < count:
            self._numbers = torch.empty(count)
        return self._numbers


class FusedDecoder(Fused):
    """The forward of a decoder layer as one kernel call."""

    def __init__(self, module: nn.Module, ops: Kernels, room: ScratchBuffers) -> None:
        super().__init__(module, ops)
        self._room = room
        self._before, self._attention, self._after, self._mlp = (
            getattr(module, name).__dict__["forward"] for name in _PARTS
        )
        parts = (*self._attention.parts, self._attention.out, *self._mlp.parts)
        self._products: list[tuple[str, Product]] = list(
            zip(("q", "k", "v", "out", "gate", "up", "down"), parts, strict=True)
        )
        self._heads = self._attention.sizes[0][0]
        queries, keys, values = ((heads, size) for heads, size in self._attention.sizes)
        mixed = queries[0] * values[1]
        inner = 2 * (parts[4].linear.out_features + _GAP)
        self._hidden = parts[0].linear.in_features
        self._scratch = self._hidden + sum(h * size for h, size in (queries, keys, values)) + mixed + inner

    def compute(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan, turn = kwargs.get(PLAN), kwargs.get("position_embeddings")
        if not isinstance(plan, PagedPlan) or turn is None:
            return self.original(hidden_states, *args, **kwargs)
        attention, pools = plan.layer(self._attention.rule)
        if not isinstance(attention, CompiledAttention):
            return self.original(hidden_states, *args, **kwargs)
        x = hidden_states.contiguous()
        tokens = x.numel() // self._hidden
        y, scratch = torch.empty_like(x), self._room.of(tokens * self._scratch)
        step = DecoderTokens(
            *(x.data_ptr(), y.data_ptr(), scratch.data_ptr(), rotary_args((turn[0][0], turn[1][0]))),
            *(tokens, self._hidden),
        )
        attention.decode(step, self._parts(), attention.shape(self._heads, pools, self._attention.rule))
        return y

    def _parts(self) -> Decoder:
        """Return the kernel's arguments with the present address of every weight."""
        parts = Decoder(
            norm_args(self._before.norm),
            norm_args(self._after.norm),
            *(norm_args(norm) for norm in self._attention.norms),
        )
        for name, product in self._products:
            point(getattr(parts, name), product.weights())
        return parts


def fuse_layers(model: nn.Module, ops: Kernels) -> dict[str, int]:
    """Replace the plain decoder layers of a model whose modules are fused, if its logits stay the same bit for bit.

    Return the number of replaced layers of each class.
    """
    layers = [module for module in model.modules() if _is_plain(module)]
    if not layers:
        return {}
    with torch.inference_mode():
        wanted, room = _decoded(model, ops), ScratchBuffers()
        for module in layers:
            module.forward = FusedDecoder(module, ops, room)
        try:
            same = torch.equal(_decoded(model, ops), wanted)
        except Exception:  # noqa: BLE001 - a foreign layer may raise anything
            same = False
    if not same:  # the layer does more than its modules
        for module in layers:
            del module.forward
        return {}
    return dict(Counter(type(module).__name__ for module in layers))


def _is_plain(module: nn.Module) -> bool:
    children = dict(module.named_children())
    plain = set(children) == set(_PARTS) and not list(module.parameters(recurse=False))
    return plain and "forward" not in module.__dict__ and all(
        isinstance(children[name].__dict__.get("forward"), kind) for name, kind in _PARTS.items()
    )  # fmt: skip


def _decoded(model: nn.Module, ops: Kernels) -> Tensor:
    """Return the logits of a probe that fills a paged cache and then decodes over it."""
    cache = PagedCache(cache_shapes(model), 4, dtype=torch.float32, device="cpu")  # also layers that attend on torch
    shapes = state_shapes(model)
    pool = StatePool(shapes, 2, "cpu") if shapes else None
    tables_RB, starts_R, found = np.array([[0, 1], [2, 3]], np.int32), np.zeros(2, np.int64), []
    for counts in (_PROBE, (1, 1), (1, 1)):
        counts_R = np.array(counts, np.int64)
        geometry = Geometry(tables_RB=tables_RB, starts_R=starts_R.copy(), counts_R=counts_R, num_decode=0)
        states = None if pool is None else StatePass(pool, np.arange(2))
        plan = PagedPlan(cache, geometry, lambda g, d: CompiledAttention(ops, g, d), torch.device("cpu"), states)
        ids_N = torch.arange(int(counts_R.sum())) * 3 % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        found.append(forward(model, ids_N, plan))
        starts_R += counts_R
    return torch.cat(found)
