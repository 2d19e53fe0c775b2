"""Attention over blocks by compiled kernels: float32 on a CPU, batch- and chunk-invariant.

The keys and values of a block are read once for all query heads that share them, straight from the pool.

Shape legend: as in :mod:`headrace.models.paged.base`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.models.attention import Rule
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import Kernels, Layer, Pass, Tensor3, kernels
from headrace.models.paged.base import AttentionMaker, Geometry


def maker() -> AttentionMaker | None:
    """The maker of a pass's attention; ``None`` where the kernels are not available. The first call compiles them."""
    loaded = kernels()
    return None if isinstance(loaded, Unavailable) else partial(CompiledAttention, loaded)


class CompiledAttention:
    """The attention of one pass (see :class:`headrace.models.paged.base.PagedAttention`)."""

    def __init__(self, loaded: Kernels, geometry: Geometry, device: torch.device) -> None:
        assert device.type == "cpu"
        self._paged = loaded.paged
        self._tables = np.ascontiguousarray(geometry.tables_RB, np.int32)
        self._starts = np.ascontiguousarray(geometry.starts_R, np.int64)
        self._counts = np.ascontiguousarray(geometry.counts_R, np.int64)
        rows, width = self._tables.shape
        self._pass = Pass(
            self._tables.ctypes.data, self._starts.ctypes.data, self._counts.ctypes.data, rows, width
        )  # fmt: skip

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        query, key, value = (_dense(tensor) for tensor in qkv)
        keys, values = layer
        sinks = rule.sinks_H
        shape = Layer(
            *(keys.data_ptr(), values.data_ptr(), None if sinks is None else sinks.data_ptr()),
            *(query.shape[1], key.shape[1], key.shape[2], value.shape[2]),
            *(rule.window or 0, rule.scale, rule.softcap or 0.0),
        )
        out = torch.empty(query.shape[0], query.shape[1], value.shape[2])
        views = (Tensor3 * 3)(*(Tensor3(t.data_ptr(), t.stride(0), t.stride(1)) for t in (query, key, value)))
        self._paged(self._pass, shape, views, out.data_ptr(), torch.get_num_threads())
        return out


def _dense(tensor_NHE: Tensor) -> Tensor:
    """With a dense last dimension; the others may have any stride."""
    return tensor_NHE if tensor_NHE.stride(2) == 1 else tensor_NHE.contiguous()
