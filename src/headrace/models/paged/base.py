"""A key-value cache in blocks, and the plan of a forward pass over it.

A sequence's cache is a list of blocks (Kwon et al. 2023, *PagedAttention*): a *table* row. Blocks may be in the tables
of several sequences: siblings of one group share their prompt, forks share their prefix. In every layer the keys and
values of all tokens of the pass are written before any of them attends, so a sequence may share a block that another
one fills in the same pass.

    tokens of the pass:   row 0 ──── row 1 ─ row 2 ──────────     each row: counts_R tokens, from position starts_R on
    table of row r:       block 7, block 2, block 9, …             position p lies in block p // S, at place p % S

Shape legend: N tokens of the pass, R rows (sequences of the pass), B blocks of the longest table, S places of a block,
P blocks of the pool, K key-value heads, H query heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.buffers import zeros
from headrace.models.attention import Rule

BLOCK = 16
"""Places of a block: what a shared prefix is cut into."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer stores of a token."""

    heads: int
    """Key-value heads."""
    key_size: int
    """Numbers of one head's key."""
    value_size: int
    """Numbers of one head's value."""

    @property
    def numbers(self) -> int:
        """Keys and values of one token."""
        return self.heads * (self.key_size + self.value_size)


class PagedCache:
    """The pool: for every layer keys ``[P, K, S, E]`` and values ``[P, K, S, E]``, allocated at once. On a CPU the
    system hands out a page of it when it is first written."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self._dtype, self._device = dtype, device
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Of the whole pool, allocated or released."""
        return self.num_blocks * BLOCK * self._dtype.itemsize * sum(shape.numbers for shape in self.shapes)

    def allocate(self) -> None:
        """Take the memory (again); its contents are zeros."""
        self.layers = [
            (self._pool(shape.heads, shape.key_size), self._pool(shape.heads, shape.value_size))
            for shape in self.shapes
        ]

    def release(self) -> None:
        """Give the memory back; its contents are lost."""
        self.layers = []

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks: a fork gets its own copy of a block that is not full."""
        for pair in self.layers:
            for pool in pair:
                pool[list(targets)] = pool[list(sources)]

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks: what is not finite would reach a later sequence as 0 · NaN."""
        for pair in self.layers:
            for pool in pair:
                pool[list(blocks)] = 0

    def _pool(self, heads: int, size: int) -> Tensor:
        shape = (self.num_blocks, heads, BLOCK, size)
        if torch.device(self._device).type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        num_bytes = math.prod(shape) * self._dtype.itemsize  # torch.zeros would write all of them, seconds long
        return torch.from_numpy(zeros(num_bytes)).view(self._dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Which tokens a pass computes and where their context lies. Rows of one token (decoding) stand first."""

    tables_RB: npt.NDArray[np.int32]
    """Blocks of each row, enough for its context and its new tokens; what lies beyond is never read."""
    starts_R: Index
    """Cached tokens before the pass: the position of the row's first new token."""
    counts_R: Index
    """New tokens of each row, ≥ 1."""
    num_decode: int
    """The first rows that have exactly one new token."""

    def positions_N(self) -> Index:
        """Position of every token of the pass in its sequence."""
        if self.num_decode == len(self.counts_R):
            return self.starts_R
        ends_R = np.cumsum(self.counts_R)
        total = int(ends_R[-1]) if len(ends_R) else 0
        places: Index = np.arange(total) + np.repeat(self.starts_R - (ends_R - self.counts_R), self.counts_R)
        return places

    def last_R(self) -> Index:
        """The place in the pass of each row's last token."""
        if self.num_decode == len(self.counts_R):
            return np.arange(self.num_decode)
        places: Index = np.cumsum(self.counts_R) - 1
        return places


class PagedAttention(Protocol):
    """How the attention over one cache is computed: one instance per pass, made from its geometry."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the keys ``[N, K, E]`` and values of ``qkv`` into the ``layer``'s pools, then attend with its queries
        ``[N, H, E]``: ``[N, H, E]`` come back. Row r's token at position p sees positions ≤ p of its own table, within
        the rule's window."""
        ...


class AttentionMaker(Protocol):
    """Makes the attention of one pass; what the registry holds."""

    def __call__(self, geometry: Geometry, device: torch.device) -> PagedAttention: ...


class PagedPlan:
    """The plan of one engine pass (see :class:`headrace.models.attention.Plan`)."""

    def __init__(self, cache: PagedCache, geometry: Geometry, make: AttentionMaker, device: torch.device) -> None:
        self._cache = cache
        self._attention = make(geometry, device)
        self.positions_N = torch.from_numpy(geometry.positions_N()).to(device)
        self.last_R = torch.from_numpy(geometry.last_R()).to(device)
        """The place in the pass of each row's last token: those whose logits are needed."""

    def attend(self, query_NHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, rule: Rule) -> Tensor:
        return self._attention.attend((query_NHE, key_NKE, value_NKE), self._cache.layers[rule.layer], rule)

    def layer(self, rule: Rule) -> tuple[PagedAttention, tuple[Tensor, Tensor]]:
        """What attends, and the pools of the rule's layer: for who computes more than attention in one call."""
        return self._attention, self._cache.layers[rule.layer]
