"""Attention over a cache in blocks with compiled kernels, in float32 or bfloat16 on a CPU. It is batch- and
chunk-invariant. Scores, weights and sums are float32 in both.

The keys and values of a block are read once for all query heads that share them, directly from the pool.

Shape legend: as in :mod:`headrace.models.paged.base`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.models.attention import Rule
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import Decoder, DecoderTokens, Kernels, PagedLayer, Pass, Tensor3, kernels
from headrace.models.paged.base import AttentionMaker, Geometry


def maker(dtype: torch.dtype = torch.float32) -> AttentionMaker | None:
    """Return the maker of a pass's attention over a cache of ``dtype``; ``None`` if the kernels are not available. The
    first call compiles the kernels."""
    loaded = kernels(dtype)
    return None if isinstance(loaded, Unavailable) else partial(CompiledAttention, loaded)


class CompiledAttention:
    """The attention of one pass with compiled kernels (see :class:`headrace.models.paged.base.PagedAttention`)."""

    def __init__(self, loaded: Kernels, geometry: Geometry, device: torch.device) -> None:
        """Prepare the pass with the layout ``geometry`` for the kernels ``loaded``; ``device`` must be the CPU."""
        assert device.type == "cpu"
        self._loaded = loaded
        self._tables = np.ascontiguousarray(geometry.tables_RB, np.int32)
        self._starts = np.ascontiguousarray(geometry.starts_R, np.int64)
        self._counts = np.ascontiguousarray(geometry.counts_R, np.int64)
        """The layout of the pass as contiguous arrays, to whose memory ``_pass`` points."""
        rows, width = self._tables.shape
        self._pass = Pass(
            self._tables.ctypes.data, self._starts.ctypes.data, self._counts.ctypes.data, rows, width
        )  # fmt: skip
        """The kernel's argument that describes the pass."""
        self._sinks_H: Tensor | None = None
        """The sinks of the last layer in the format of the cache, to which the kernel's argument points; ``None`` for
        none."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the keys and values of the pass into the layer's blocks, and return the attention ``[N, H, E]`` over
        them."""
        query, key, value = (_dense(tensor.to(self._loaded.dtype)) for tensor in qkv)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        views = (Tensor3 * 3)(*(Tensor3(t.data_ptr(), t.stride(0), t.stride(1)) for t in (query, key, value)))
        shape = self.shape(query.shape[1], layer, rule)
        self._loaded.paged(self._pass, shape, views, out.data_ptr(), torch.get_num_threads())
        return out

    def decode(self, step: DecoderTokens, decoder: Decoder, shape: PagedLayer) -> None:
        """Compute a whole decoder layer, including its attention over the cache, in one kernel call (kernels.cpp).
        ``step`` contains the tokens and the memory of the result, ``decoder`` the weights, and ``shape`` the layer's
        pools."""
        self._loaded.decoder(step, decoder, self._pass, shape, torch.get_num_threads())

    def shape(self, heads: int, layer: tuple[Tensor, Tensor], rule: Rule) -> PagedLayer:
        """Return the kernel's argument for one layer: its pools ``layer`` and the parameters of its ``rule``, for
        ``heads`` query heads."""
        keys, values = layer
        sinks = self._sinks_H = None if rule.sinks_H is None else rule.sinks_H.to(keys.dtype)
        return PagedLayer(
            *(keys.data_ptr(), values.data_ptr(), None if sinks is None else sinks.data_ptr()),
            *(heads, keys.shape[1], keys.shape[3], values.shape[3]),
            *(rule.window or 0, rule.chunk or 0, rule.scale, rule.softcap or 0.0),
        )


def _dense(tensor_NHE: Tensor) -> Tensor:
    """Return the tensor with a contiguous last dimension; the other dimensions may have any stride."""
    return tensor_NHE if tensor_NHE.stride(2) == 1 else tensor_NHE.contiguous()
