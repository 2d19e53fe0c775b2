"""A key-value cache in blocks, and the plan of a forward pass over it.

A sequence's cache is a list of blocks (Kwon et al. 2023, *PagedAttention*), which is a row of the *table*. A block may
belong to several sequences: siblings of one group share their prompt, forks share their prefix. In every layer the keys
and values of all tokens of the pass are written before any of them attends, so a sequence may share a block that
another one fills in the same pass.

    tokens of the pass:   row 0 ──── row 1 ─ row 2 ──────────     each row: counts_R tokens, from position starts_R on
    table of row r:       block 7, block 2, block 9, …             position p is in block p // S, at index p % S

Shape legend: N tokens of the pass, R rows (sequences of the pass), B blocks of the longest table, S tokens of a block,
P blocks of the pool, K key-value heads, H query heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.buffers import zeros
from headrace.models.attention import Choice, Choose, PackedPlan, Rule, forward
from headrace.models.indexed import keys_of
from headrace.models.recurrent.base import Key, Recurrence, Tensors
from headrace.models.recurrent.states import StatePass

if TYPE_CHECKING:
    from headrace.models.paged.indexed import IndexedPass

BLOCK = 16
"""The number of tokens in a block; a prefix is shared in whole blocks."""

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

    @property
    def numbers(self) -> int:
        """Return the size of one token's keys and values together."""
        return self.heads * (self.key_size + self.value_size)


class PagedCache:
    """The memory pool of a key-value cache: for every layer keys ``[P, K, S, E]`` and values ``[P, K, S, E]``,
    allocated at once. On a CPU the system provides a memory page when it is first written."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_blocks: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self._dtype, self._device = dtype, device
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.allocated = False
        """Whether the memory is allocated."""
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Return the size of the whole pool in bytes, whether it is allocated or released."""
        return self.num_blocks * BLOCK * self._dtype.itemsize * sum(shape.numbers for shape in self.shapes)

    def allocate(self) -> None:
        """Allocate the memory, also after a release; its contents are zeros."""
        self.layers = [
            (self._pool(shape.heads, shape.key_size), self._pool(shape.heads, shape.value_size))
            for shape in self.shapes
        ]
        self.allocated = True

    def release(self) -> None:
        """Free the memory; its contents are lost."""
        self.layers = []
        self.allocated = False

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks: a fork gets its own copy of a block that is not full."""
        for pair in self.layers:
            for pool in pair:
                pool[list(targets)] = pool[list(sources)]

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros: a value that is not finite would reach a later sequence as 0 · NaN."""
        for pair in self.layers:
            for pool in pair:
                pool[list(blocks)] = 0

    def _pool(self, heads: int, size: int) -> Tensor:
        shape = (self.num_blocks, heads, BLOCK, size)
        if torch.device(self._device).type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        num_bytes = math.prod(shape) * self._dtype.itemsize  # torch.zeros would write all of them, which takes seconds
        return torch.from_numpy(zeros(num_bytes)).view(self._dtype).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The layout of a pass: the tokens that it computes and the blocks of their context. Rows with one token
    (decoding) come first."""

    tables_RB: npt.NDArray[np.int32]
    """The blocks of each row, enough for its context and its new tokens; entries beyond are never read."""
    starts_R: Index
    """The number of cached tokens of each row before the pass, which is the position of its first new token."""
    counts_R: Index
    """The number of new tokens of each row, ≥ 1."""
    num_decode: int
    """The number of rows at the beginning that have exactly one new token."""

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
    """The attention over a cache for one pass. An instance is made from the geometry of the pass."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], layer: tuple[Tensor, Tensor], rule: Rule) -> Tensor:
        """Write the keys ``[N, K, E]`` and values of ``qkv`` into the ``layer``'s pools, then compute attention for
        its queries ``[N, H, E]``, and return ``[N, H, E]``. The token of row r at position p attends to positions ≤
        p of its own table, within the rule's window."""
        ...


class AttentionMaker(Protocol):
    """A function that makes the attention of one pass; the registry contains these."""

    def __call__(self, geometry: Geometry, device: torch.device) -> PagedAttention: ...


class PagedPlan:
    """The plan of one engine pass over a paged cache (see :class:`headrace.models.attention.Plan`), and over the states
    of recurrent layers, if the model has any."""

    def __init__(
        self,
        cache: PagedCache,
        geometry: Geometry,
        make: AttentionMaker,
        device: torch.device,
        states: StatePass | None = None,
    ) -> None:
        self._cache = cache
        self._states = states
        self._make_indexed = partial(_indexed_pass, geometry, device)
        self._indexed: IndexedPass | None = None
        if states is not None:
            states.begin(geometry.starts_R, geometry.counts_R, geometry.num_decode, device)
        self._attention = make(geometry, device)
        self.positions_N = torch.from_numpy(geometry.positions_N()).to(device)
        self.last_R = torch.from_numpy(geometry.last_R()).to(device)
        """The index in the pass of each row's last token, whose logits are needed."""

    def attend(self, query_NHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, rule: Rule) -> Tensor:
        by = self._attention if rule.choice is None or self._indexed is None else self._indexed
        return by.attend((query_NHE, key_NKE, value_NKE), self._cache.layers[rule.layer], rule)

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> Choice:
        if self._indexed is None:
            self._indexed = self._make_indexed()
        return self._indexed.choose(choose, inputs_N, self._cache.layers[len(self._cache.layers) // 2 + layer][0])

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        assert self._states is not None, "a pass over a model with recurrent layers needs their states"
        return self._states.recur(key, recurrence, inputs_N)

    def layer(self, rule: Rule) -> tuple[PagedAttention, tuple[Tensor, Tensor]]:
        """Return the attention of the pass, and the pools of the rule's layer, for a kernel that computes more than
        attention in one call."""
        return self._attention, self._cache.layers[rule.layer]


NUM_TOKENS = 2
"""The number of tokens of the pass that :func:`cache_shapes` runs; enough for every layer to be called."""


def _indexed_pass(geometry: Geometry, device: torch.device) -> IndexedPass:
    from headrace.models.paged.indexed import IndexedPass  # it needs the geometry

    return IndexedPass(geometry, device)


_NO_CACHE = LayerShape(heads=0, key_size=0, value_size=0)
"""The shape of a layer that does not attend."""


class _ShapeRecorder(PackedPlan):
    """A plan that records the shapes of each layer's keys and values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([NUM_TOKENS], device)
        self.shapes: dict[int, LayerShape] = {}
        self.indexers: dict[int, LayerShape] = {}

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> Choice:
        size = keys_of(choose, inputs_N).shape[-1]
        self.indexers[layer] = LayerShape(heads=1, key_size=size, value_size=0)
        return super().choose(layer, choose, inputs_N)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        self.shapes[rule.layer] = LayerShape(
            heads=key_NKD.shape[1], key_size=key_NKD.shape[2], value_size=value_NKD.shape[2]
        )
        return super().attend(query_NHD, key_NKD, value_NKD, rule)


@torch.inference_mode()
def cache_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Return the shape of every layer's keys and values, in the order of the layers, up to the last one that attends.
    A layer that does not attend has none; that it may leave it out is checked at load (:mod:`headrace.models.check`).
    If layers have indexers, as many shapes follow: those of each layer's indexer.
    """
    watch = _ShapeRecorder(model.device)
    forward(model, torch.zeros(NUM_TOKENS, dtype=torch.long, device=model.device), watch)
    layers = range(max(watch.shapes, default=-1) + 1)
    shapes = tuple(watch.shapes.get(layer, _NO_CACHE) for layer in layers)
    return shapes + (tuple(watch.indexers.get(layer, _NO_CACHE) for layer in layers) if watch.indexers else ())
