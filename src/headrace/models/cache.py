"""The key-value cache of an engine, and the plan of a forward pass over it.

Rows are dense: rows ``0 .. n-1`` hold the running sequences, so that decoding attends over plain slices of the cache.

Shape legend: N tokens of the pass, D decoding rows (one token each, first in the pass), J joining sequences, C columns
of the cache, K key-value heads, H query heads, G = H / K, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.models.attention import PackedPlan, Rule, attend_masked


class KeyValueCache:
    """Keys and values of up to ``num_rows`` sequences of up to ``num_columns`` tokens, allocated layer by layer at the
    first forward pass: what a layer stores is whatever it hands to attention."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        self.num_columns = num_columns
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(
        self, layer: int, pair_NKE: tuple[Tensor, Tensor], rows_N: Tensor, columns_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put each token's key and value at its row and column; the layer's whole ``[rows, K, C, E]`` keys and values
        come back."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(pair_NKE[0]), self._empty(pair_NKE[1]))
        keys, values = self._layers[layer]
        keys[rows_N, :, columns_N] = pair_NKE[0]
        values[rows_N, :, columns_N] = pair_NKE[1]
        return keys, values

    @torch.inference_mode()
    def move(self, sources: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], length: int) -> None:
        """Copy the first ``length`` columns of rows ``sources`` over those of rows ``targets``."""
        for tensor in self._tensors():
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def clear(self, rows: np.ndarray[Any, Any]) -> None:
        """Zero these rows: what is not finite would reach a later sequence of the row as 0 · NaN."""
        for tensor in self._tensors():
            tensor[torch.from_numpy(rows).to(tensor.device)] = 0

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self._layers.values() for tensor in pair]

    def _empty(self, like_NKE: Tensor) -> Tensor:
        return like_NKE.new_zeros(self.num_rows, like_NKE.shape[1], self.num_columns, like_NKE.shape[2])


class CachePlan:
    """One engine step: rows ``0 .. D-1`` decode one token each, rows ``D .. D+J-1`` bring their whole prompt.

    ``positions_D`` are the positions of the decoded tokens, ``lengths_J`` the lengths of the prompts. The tokens of the
    pass are the decoded ones, then the prompts one after the other.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        positions_D: np.ndarray[Any, Any],
        lengths_J: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        self._cache = cache
        self._num_decode = len(positions_D)
        self._reach = int(positions_D.max()) + 1 if self._num_decode else 0
        self._prompts = PackedPlan(lengths_J, device) if len(lengths_J) else None
        lengths_R = np.concatenate([np.ones(self._num_decode, np.int64), np.asarray(lengths_J, np.int64)])
        decode_D = torch.from_numpy(positions_D).to(device)
        joined = [decode_D] if self._prompts is None else [decode_D, self._prompts.positions_N]
        self.positions_N = torch.cat(joined)
        self._rows_N = torch.from_numpy(np.repeat(np.arange(len(lengths_R)), lengths_R)).to(device)
        self.last_R = torch.from_numpy(np.cumsum(lengths_R) - 1).to(device)
        """The place in the pass of each row's last token: the one whose logits are needed."""
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query_NHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, rule: Rule) -> Tensor:
        keys, values = self._cache.write(rule.layer, (key_NKE, value_NKE), self._rows_N, self.positions_N)
        split = self._num_decode
        if self._prompts is None:
            return self._decode(query_NHE, keys, values, rule)
        prompts = self._prompts.attend(query_NHE[split:], key_NKE[split:], value_NKE[split:], rule)
        if not split:
            return prompts
        return torch.cat([self._decode(query_NHE[:split], keys, values, rule), prompts])

    def _decode(self, query_DHE: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> Tensor:
        """The query heads of one key-value head stand as G queries, so no key or value is repeated."""
        key_DKCE = keys[: self._num_decode, :, : self._reach]
        value_DKCE = values[: self._num_decode, :, : self._reach]
        mask = self._mask(rule, query_DHE)
        if not rule.plain:
            return attend_masked(query_DHE[:, :, None], key_DKCE, value_DKCE, mask[:, None], rule)[:, :, 0]
        grouped = query_DHE.reshape(self._num_decode, key_DKCE.shape[1], -1, query_DHE.shape[2])
        return attend_masked(grouped, key_DKCE, value_DKCE, mask, rule).flatten(1, 2)

    def _mask(self, rule: Rule, like: Tensor) -> Tensor:
        """``[D, 1, 1, C]``, added to the scores; one per window and step."""
        if rule.window not in self._masks:
            position_D1 = self.positions_N[: self._num_decode, None]
            column_C = torch.arange(self._reach, device=like.device)
            hidden = column_C > position_D1
            if rule.window is not None:
                hidden |= column_C <= position_D1 - rule.window
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
            self._masks[rule.window] = mask[:, None, None]
        return self._masks[rule.window]
