"""The key-value cache in blocks, the layout of a forward pass over it, and the interface of its attention.

A sequence's cache is a list of blocks (Kwon et al. 2023, *PagedAttention*), which is a row of the *table*. A block may
belong to several sequences: siblings of one group share their prompt, forks share their prefix. In every layer, the
keys and values of all tokens of the pass are written before attention is computed, so that a sequence may share a block
that another sequence fills in the same pass.

    tokens of the pass:   row 0 ──── row 1 ─ row 2 ──────────     each row: counts_R tokens, from position starts_R on
    table of row r:       block 7, block 2, block 9, …             position p is in block p // S, at index p % S

Shape legend: N tokens of the pass, R rows (sequences of the pass), B blocks of the longest table, S tokens of a block,
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
"""The number of tokens in a block. Prefixes are shared in whole blocks."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes of the keys and values that one layer stores for a token."""

    heads: int
    """The number of key-value heads."""
    key_size: int
    """The size of one head's key."""
    value_size: int
    """The size of one head's value."""

    @classmethod
    def from_tensors(cls, key_NKD: Tensor, value_NKD: Tensor) -> LayerShape:
        """Return the sizes of a layer that computes the keys ``key_NKD`` and the values ``value_NKD``."""
        return cls(heads=key_NKD.shape[1], key_size=key_NKD.shape[2], value_size=value_NKD.shape[2])

    @property
    def numbers(self) -> int:
        """Return the number of numbers in the keys and values of one token."""
        return self.heads * (self.key_size + self.value_size)


class PagedCache:
    """The memory pool of a key-value cache: for every layer, keys ``[P, K, S, E]`` and values ``[P, K, S, E]``,
    allocated at once. The engine owns the pool, and assigns blocks to sequences. On a CPU, the system provides a memory
    page when it is first written."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate ``num_blocks`` blocks for each layer. ``shapes`` are the sizes of one token's keys and values, one
        per layer. They are stored as ``dtype`` on ``device``."""
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self._dtype, self._device = dtype, device
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.allocated = False
        """Whether the memory is allocated at present."""
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole pool in bytes, also while it is released."""
        return self.num_blocks * BLOCK * self._dtype.itemsize * sum(shape.numbers for shape in self.shapes)

    def allocate(self) -> None:
        """Allocate the memory, which may have been released before; its content is zeros."""
        self.layers = [
            (self._pool(shape.heads, shape.key_size), self._pool(shape.heads, shape.value_size))
            for shape in self.shapes
        ]
        self.allocated = True

    def release(self) -> None:
        """Free the memory; its content is lost."""
        self.layers = []
        self.allocated = False

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the blocks with the numbers ``sources`` into the blocks with the numbers ``targets``, in every layer: a
        fork needs its own copy of a block that is not full."""
        for pair in self.layers:
            for pool in pair:
                pool[list(targets)] = pool[list(sources)]

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros. Otherwise a value that is not finite would enter a later sequence as 0 · NaN."""
        for pair in self.layers:
            for pool in pair:
                pool[list(blocks)] = 0

    @torch.inference_mode()
    def clear_places(self, blocks: Index, places: Index) -> None:
        """Fill single positions of blocks with zeros: in each of ``blocks``, the position in ``places``. The reason is
        that of :meth:`clear`."""
        for pair in self.layers:
            for pool in pair:
                pool[blocks, :, places] = 0

    def _pool(self, heads: int, size: int) -> Tensor:
        """Return new memory for the keys or the values of one layer, with ``heads`` key-value heads of ``size``
        numbers."""
        shape = (self.num_blocks, heads, BLOCK, size)
        if torch.device(self._device).type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        num_bytes = math.prod(shape) * self._dtype.itemsize  # torch.zeros would write all bytes, which takes seconds
        return torch.from_numpy(zeros(num_bytes)).view(self._dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The layout of a pass: the tokens to compute, and the blocks of their context. Rows with one token (decoding) come
    first."""

    tables_RB: npt.NDArray[np.int32]
    """The blocks of each row, enough for its context and its new tokens; further entries are never read."""
    starts_R: Index
    """The number of cached tokens of each row before the pass, which is the position of its first new token."""
    counts_R: Index
    """The number of new tokens of each row, at least 1."""
    num_decode: int
    """The number of rows at the beginning with exactly one new token."""

    def positions_N(self) -> Index:
        """Return the position of every token of the pass in its sequence."""
        if self.num_decode == len(self.counts_R):
            return self.starts_R
        ends_R = np.cumsum(self.counts_R)
        total = int(ends_R[-1]) if len(ends_R) else 0
        places: Index = np.arange(total) + np.repeat(self.starts_R - (ends_R - self.counts_R), self.counts_R)
        return places

    def last_R(self) -> Index:
        """Return the index in the pass of each row's last token."""
        if self.num_decode == len(self.counts_R):
            return np.arange(self.num_decode)
        places: Index = np.cumsum(self.counts_R) - 1
        return places


class PagedAttention(Protocol):
    """The interface of the attention over a cache in one pass. An instance is created for the layout of the pass."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the keys ``[N, K, E]`` and values in ``qkv`` into the ``layer``'s pools, compute attention for the
        queries ``[N, H, E]``, and return ``[N, H, E]``. The token at position p of row r attends to positions ≤ p of
        its own table, within the limits of ``rule``."""
        ...


class AttentionMaker(Protocol):
    """The interface of a function that creates the attention of one pass, for the registry of implementations."""

    def __call__(self, geometry: Geometry, device: torch.device) -> PagedAttention:
        """Return the attention of a pass with this ``geometry`` on ``device``."""
        ...
