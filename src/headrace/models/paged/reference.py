"""Attention over a cache in blocks in plain torch, on any device. Keys and values are written by index, the blocks of
the tables are gathered, and attention is computed over them.

A pass has three kinds of rows. *Decoding* rows have one query each: their blocks are gathered for one batched call.
*Fresh* rows start at position 0: their whole context is in the pass, so that nothing is gathered. *Resumed* rows have
some context and several queries: rows with similar lengths and numbers of queries are gathered together.

Shape legend: N tokens of the pass, F of them after the decoding rows, R rows of one bucket, Q their padded number of
queries, B their blocks, C = B · S columns, P blocks of the pool, S tokens of a block, K key-value heads, H query heads,
G = H / K, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.models.attention import PackedPlan, Rule, attend_masked, bucket_by_length
from headrace.models.padding import gather_rows
from headrace.models.paged.base import BLOCK, Geometry, Index


class ReferenceAttention:
    """The attention of one pass in plain torch (see :class:`headrace.models.paged.base.PagedAttention`)."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Prepare the decoding rows and the other rows of the pass with the layout ``geometry``, with index tensors on
        ``device``."""
        self._write = Writer(geometry, device)
        """The writer of new keys and values into the cache."""
        self._num_decode = split = geometry.num_decode
        self._decode = _Gathered(geometry, np.arange(split), device) if split else None
        """The attention of the decoding rows; ``None`` without such rows."""
        self._prompts = Prompts(geometry, device) if len(geometry.counts_R) > split else None
        """The attention of the other rows; ``None`` without such rows."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the keys and values of the pass into the layer's blocks, and return the attention of the decoding rows,
        followed by that of the other rows."""
        self._write(qkv[1], qkv[2], layer)
        split = self._num_decode
        parts = []
        if self._decode is not None:
            parts.append(self._decode.attend(qkv[0][:split, None], layer, rule)[:, 0])
        if self._prompts is not None:
            query, key, value = (tensor[split:] for tensor in qkv)
            parts.append(self._prompts.attend((query, key, value), layer, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Writer:
    """A function object that writes the keys and values of a pass into their blocks; all implementations use it."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Compute the block of each token of the pass with the layout ``geometry``, and the token's index in the block,
        as tensors on ``device``."""
        positions_N = geometry.positions_N()
        rows_N = np.repeat(np.arange(len(geometry.counts_R)), geometry.counts_R)
        blocks_N = geometry.tables_RB[rows_N, positions_N // BLOCK].astype(np.int64)
        self.blocks_N = torch.from_numpy(blocks_N).to(device)
        """The block of each token of the pass."""
        self.places_N = torch.from_numpy(positions_N % BLOCK).to(device)
        """The index of each token in its block."""

    def __call__(self, key_NKE: Tensor, value_NKE: Tensor, layer: tuple[Tensor, Tensor]) -> None:
        """Write the keys and values of the pass into the pools of a layer."""
        layer[0][self.blocks_N, :, self.places_N] = key_NKE
        layer[1][self.blocks_N, :, self.places_N] = value_NKE


class Prompts:
    """The attention of the rows after the decoding rows. Its tensors contain only the tokens of these rows."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Divide the rows after the decoding rows of the pass with the layout ``geometry`` into fresh rows, which start
        at position 0, and resumed rows, which have some context. Index tensors are on ``device``."""
        rows = np.arange(geometry.num_decode, len(geometry.counts_R))
        counts_R = geometry.counts_R
        begins_R = np.cumsum(counts_R) - counts_R - geometry.num_decode
        fresh, resumed = rows[geometry.starts_R[rows] == 0], rows[geometry.starts_R[rows] > 0]
        self._fresh = PackedPlan(counts_R[fresh], device) if len(fresh) else None
        """The attention of the fresh rows; ``None`` without such rows."""
        self._resumed: list[tuple[_Gathered, Tensor]] = []
        """The attention of the resumed rows, in buckets, and the indices of the tokens in the padded rows of each."""
        # place_F: the index of each token in the concatenated outputs of all parts
        fresh_F = _concatenate_runs(begins_R[fresh], counts_R[fresh])
        place_F = np.empty(int(counts_R[rows].sum()), np.int64)
        place_F[fresh_F] = np.arange(len(fresh_F))
        filled = len(fresh_F)
        for bucket in row_buckets(geometry, resumed):
            part = _Gathered(geometry, bucket, device)
            gather_RQ = gather_rows(begins_R[bucket], counts_R[bucket], place_F, filled)
            filled += gather_RQ.size
            self._resumed.append((part, torch.from_numpy(gather_RQ).to(device)))
        self._fresh_F = torch.from_numpy(fresh_F).to(device)
        """The indices of the fresh rows' tokens."""
        self._place_F = torch.from_numpy(place_F).to(device)
        """The index of each token in the concatenated outputs of all parts."""

    def attend(self, qkv_F: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Compute the attention ``[F, H, E]`` of the F tokens after the decoding rows under ``rule``, from their
        queries, keys and values ``qkv_F``. These keys and values must already be in the blocks of ``layer``."""
        if self._fresh is not None and not self._resumed:
            return self._fresh.attend(*qkv_F, rule)
        parts = []
        if self._fresh is not None:
            query, key, value = (tensor.index_select(0, self._fresh_F) for tensor in qkv_F)
            parts.append(self._fresh.attend(query, key, value, rule))
        for part, gather_RQ in self._resumed:
            parts.append(part.attend(qkv_F[0][gather_RQ], layer, rule).flatten(0, 1))
        return torch.cat(parts).index_select(0, self._place_F)


@dataclass(frozen=True, slots=True, kw_only=True)
class _VisibleContext:
    """The context of some rows that is visible under one window and chunk size."""

    blocks_RB: Tensor
    """The visible blocks of each row. A shorter row repeats its last block, since a block of another sequence may
    contain values that are not finite."""
    mask_RQC: Tensor
    """The mask that is added to the scores: 0 where a query attends to a key, else −∞."""


class _Gathered:
    """The attention of some rows over their gathered blocks, in one call. Padding repeats the last query of a row."""

    def __init__(self, geometry: Geometry, rows_R: Index, device: torch.device) -> None:
        """Prepare the attention of the rows with the indices ``rows_R`` in the pass with the layout ``geometry``, with
        index tensors on ``device``."""
        self._tables_RB = geometry.tables_RB[rows_R]
        self._starts_R = geometry.starts_R[rows_R]
        self._last_R = self._starts_R + geometry.counts_R[rows_R] - 1
        """The blocks of each row, the position of its first new token, and the position of its last one."""
        self._num_queries = int(geometry.counts_R[rows_R].max())
        """The largest number of new tokens of a row."""
        self._longest = int(self._last_R.max()) + 1
        """The largest number of tokens of a row, its context included."""
        self._device = device
        self._visible_contexts: dict[tuple[int, int, torch.dtype], _VisibleContext] = {}
        """The visible contexts that layers have used so far, by window, chunk size and dtype."""
        self._indices: dict[tuple[int, int, int], Tensor] = {}
        """The index tensors by which layers gathered keys or values so far, by the arguments that determine them."""
        self._gathered: dict[tuple[int, ...], Tensor] = {}
        """Buffers for gathered keys and values, which all layers use in turn, since allocating memory takes longer than
        writing it."""

    def attend(self, query_RQHE: Tensor, layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Return the attention ``[R, Q, H, E]`` of the rows' queries ``query_RQHE`` over the blocks of ``layer``, under
        the window, chunks and soft cap of ``rule``."""
        window = self._longest if rule.window is None else min(rule.window, self._longest)
        limits = window, rule.chunk or self._longest
        visible = self._visible_context(limits, query_RQHE.dtype)
        key_RKCE, value_RKCE = (self._gather(which, layer[which], visible, limits) for which in (0, 1))
        if not rule.plain:
            query_RHQE = query_RQHE.transpose(1, 2)
            mask = visible.mask_RQC[:, None, None]
            return attend_masked(query_RHQE, key_RKCE, value_RKCE, mask, rule).transpose(1, 2)
        # query heads of one key-value head become further queries, so that no key or value is repeated
        groups = query_RQHE.shape[2] // key_RKCE.shape[1]
        query = query_RQHE.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = visible.mask_RQC if self._num_queries == 1 else visible.mask_RQC.repeat(1, groups, 1)
        out = attend_masked(query, key_RKCE, value_RKCE, mask[:, None], rule)
        separate: Tensor = out.unflatten(2, (groups, self._num_queries))
        return separate.permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _gather(self, which: int, pool_PKSE: Tensor, visible: _VisibleContext, limits: tuple[int, int]) -> Tensor:
        """Return the keys (``which`` = 0) or values (1) ``[R, K, C, E]`` of the visible blocks, gathered in one copy,
        for which the pool is viewed as rows ``[P · K, S · E]``. ``limits`` are the window and the chunk size; the
        indices are cached for each."""
        num_heads, size = pool_PKSE.shape[1], pool_PKSE.shape[3]
        place = (*limits, num_heads)
        if place not in self._indices:
            heads_K1 = torch.arange(num_heads, device=self._device)[:, None]
            self._indices[place] = (visible.blocks_RB[:, None] * num_heads + heads_K1).flatten()
        index = self._indices[place]
        key = (which, len(index), size)
        if key not in self._gathered:
            self._gathered[key] = pool_PKSE.new_empty(len(index), BLOCK * size)
        torch.index_select(pool_PKSE.view(-1, BLOCK * size), 0, index, out=self._gathered[key])
        return self._gathered[key].view(len(self._starts_R), num_heads, -1, size)

    def _visible_context(self, limits: tuple[int, int], dtype: torch.dtype) -> _VisibleContext:
        """Return the visible context under ``limits``, the window and the chunk size, with a mask in ``dtype``. It is
        cached for later layers."""
        key = (*limits, dtype)
        if key not in self._visible_contexts:
            self._visible_contexts[key] = self._compute_visible_context(*limits, dtype)
        return self._visible_contexts[key]

    def _compute_visible_context(self, window: int, chunk: int, dtype: torch.dtype) -> _VisibleContext:
        """Return the blocks that contain the visible context of each row under this window and chunk size, and the mask
        of their positions, as ``dtype``."""
        # the first query of a row sees the earliest positions: its first visible block is the row's first
        first_R: Index = np.maximum(self._starts_R - window + 1, self._starts_R // chunk * chunk) // BLOCK
        final_R: Index = self._last_R // BLOCK
        places_RB = first_R[:, None] + np.arange(int((final_R - first_R).max()) + 1)
        blocks_RB = np.take_along_axis(self._tables_RB, np.minimum(places_RB, final_R[:, None]), axis=1)
        positions_RQ = np.minimum(self._starts_R[:, None] + np.arange(self._num_queries), self._last_R[:, None])
        position_RQ1 = torch.from_numpy(positions_RQ)[:, :, None].to(self._device)
        columns_C = torch.arange(places_RB.shape[1] * BLOCK, device=self._device)
        column_R1C = torch.from_numpy(first_R * BLOCK)[:, None, None].to(self._device) + columns_C
        first_RQ1 = torch.maximum(position_RQ1 - window + 1, position_RQ1 // chunk * chunk)
        hidden_RQC = (column_R1C > position_RQ1) | (column_R1C < first_RQ1)
        mask_RQC = torch.zeros(hidden_RQC.shape, dtype=dtype, device=self._device)
        return _VisibleContext(
            blocks_RB=torch.from_numpy(blocks_RB.astype(np.int64)).to(self._device),
            mask_RQC=mask_RQC.masked_fill_(hidden_RQC, -torch.inf),
        )


def _concatenate_runs(begins_R: Index, counts_R: Index) -> Index:
    """Return the concatenation of runs of consecutive numbers. Run r begins with ``begins_R[r]`` and has
    ``counts_R[r]`` numbers."""
    ends_R = np.cumsum(counts_R)
    numbers: Index = np.arange(int(counts_R.sum())) + np.repeat(begins_R - (ends_R - counts_R), counts_R)
    return numbers


def row_buckets(geometry: Geometry, rows: Index) -> Iterator[Index]:
    """Yield groups of ``rows`` of the pass with the layout ``geometry`` with similar numbers of queries and similar
    lengths, so that a padded group contains little padding."""
    for few in bucket_by_length(geometry.counts_R[rows]):
        alike = rows[few]
        for chosen in bucket_by_length(geometry.starts_R[alike] + geometry.counts_R[alike]):
            yield alike[chosen]
