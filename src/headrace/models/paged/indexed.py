"""Sparse attention over a cache in blocks, in plain torch (see :mod:`headrace.models.indexed`).

The keys of an indexer are in blocks, too, like the keys of its layer, so that prefixes, forks and preemption share,
copy and drop both in the same way. All keys of a pass are written before a row of the pass chooses, since another row
may fill a shared block.

Shape legend: N tokens of the pass, B rows of a bucket, L their padded number of new tokens, M blocks of the longest, S
tokens of a block, C = M · S positions, P blocks of the pool, K key-value heads, H query heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.models.attention import Choose, ChosenTokens, Rule, attend_masked
from headrace.models.indexed import KeyExchange, compute_keys
from headrace.models.padding import gather_rows
from headrace.models.paged.base import BLOCK, Geometry, Index
from headrace.models.paged.reference import Writer, row_buckets

Pools = tuple[Tensor, Tensor]
"""The keys and the values of a layer, each ``[P, K, S, E]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexedRows:
    """The index tensors for rows of similar lengths in a pass, padded to the longest row."""

    gather_BL: Tensor
    """The index in the pass of each new token; padding repeats the first token of its row."""
    blocks_BM: Tensor
    """The blocks of each row; a shorter row repeats its last block."""
    seen_BLC: Tensor
    """Whether each new token may attend to each position."""

    def gathered(self, pool_PKSE: Tensor) -> Tensor:
        """Return the keys or values of all positions, ``[B, K, C, E]``, from a pool."""
        return pool_PKSE[self.blocks_BM].transpose(1, 2).flatten(2, 3)


class IndexedPass:
    """Sparse attention in one engine pass: an indexer chooses positions for each token, and the token attends only to
    these. The plan of the pass creates this object when the first layer with an indexer calls it."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        """Prepare the pass with the layout ``geometry`` on ``device``: rows of similar length are grouped into
        buckets."""
        self._write = Writer(geometry, device)
        """The writer of the pass's entries into the cache."""
        rows = np.arange(len(geometry.counts_R))
        decode, others = rows[: geometry.num_decode], rows[geometry.num_decode :]
        parts = [*([decode] if len(decode) else []), *row_buckets(geometry, others)]
        begins_R = np.cumsum(geometry.counts_R) - geometry.counts_R
        place_N, filled = np.empty(int(geometry.counts_R.sum()), np.int64), 0
        self._buckets: list[_IndexedRows] = []
        """The rows of the pass in buckets of similar length."""
        for members in parts:  # rows of similar length, padded to the longest of them
            gather_BL = gather_rows(begins_R[members], geometry.counts_R[members], place_N, filled)
            filled += gather_BL.size
            self._buckets.append(_make_rows(geometry, members, gather_BL, device))
        self._place_N = torch.from_numpy(place_N).to(device)
        """The index of each token in the concatenated outputs of all buckets."""

    def choose(self, choose: Choose, inputs_N: tuple[Tensor, ...], pool_P1SE: Tensor) -> ChosenTokens:
        """Write the indexer's keys for the tokens of the pass into its pool ``pool_P1SE``, and return the positions
        that it chooses in each row. ``choose`` executes the indexer with the inputs ``inputs_N``."""
        pool_P1SE[self._write.blocks_N, :, self._write.places_N] = compute_keys(choose, inputs_N)[:, None]
        masks = []
        for rows in self._buckets:
            keys_BCE = rows.gathered(pool_P1SE)[:, 0]
            inputs_BL = tuple(each[rows.gather_BL] for each in inputs_N)
            masks.append(choose(inputs_BL, rows.seen_BLC, KeyExchange(partial(_keys_of_sequences, keys_BCE))))
        return ChosenTokens(tuple(masks))

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: Pools, rule: Rule) -> Tensor:
        """Write the keys and values in ``qkv`` into the ``layer``'s pools, and return the attention ``[N, H, E]`` of
        the queries to the positions in ``rule.choice``."""
        assert rule.choice is not None
        self._write(qkv[1], qkv[2], layer)
        parts = []
        for rows, chosen_BLC in zip(self._buckets, rule.choice.masks, strict=True):
            query_BHLE = qkv[0][rows.gather_BL].transpose(1, 2)
            keys, values = (rows.gathered(pool) for pool in layer)
            parts.append(
                attend_masked(query_BHLE, keys, values, chosen_BLC[:, None], rule).transpose(1, 2).flatten(0, 1)
            )
        return torch.cat(parts).index_select(0, self._place_N)


def _keys_of_sequences(keys_BCE: Tensor, _: Tensor) -> Tensor:
    """Return the keys of whole sequences, ``keys_BCE``, instead of the indexer's keys for the pass."""
    return keys_BCE


def _make_rows(geometry: Geometry, members: Index, gather_BL: Index, device: torch.device) -> _IndexedRows:
    """Return the index tensors for the rows ``members`` of a pass: their tokens ``gather_BL``, their blocks, and the
    positions to which each token may attend."""
    starts_B, counts_B = geometry.starts_R[members], geometry.counts_R[members]
    final_B = (starts_B + counts_B - 1) // BLOCK
    places_BM = np.minimum(np.arange(int(final_B.max()) + 1), final_B[:, None])
    blocks_BM = np.take_along_axis(geometry.tables_RB[members], places_BM, axis=1).astype(np.int64)
    own_BL = np.minimum(np.arange(gather_BL.shape[1]), counts_B[:, None] - 1)
    positions_BL = torch.from_numpy(starts_B[:, None] + own_BL)
    columns_C = torch.arange(places_BM.shape[1] * BLOCK)
    return _IndexedRows(
        gather_BL=torch.from_numpy(gather_BL).to(device),
        blocks_BM=torch.from_numpy(blocks_BM).to(device),
        seen_BLC=(columns_C <= positions_BL[..., None]).to(device),
    )
