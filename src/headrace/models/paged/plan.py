"""The plan of an engine pass over a paged cache, and the shapes of the cache that a model needs.

Shape legend: N tokens of the pass, R rows (sequences of the pass), H query heads, K key-value heads, E head size in a
pass over the cache, D head size in a pass without one.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.models.attention import Choose, ChosenTokens, PackedPlan, Rule, forward
from headrace.models.indexed import compute_keys
from headrace.models.paged.base import AttentionMaker, Geometry, LayerShape, PagedAttention, PagedCache
from headrace.models.paged.indexed import IndexedPass
from headrace.models.recurrent.base import Key, Recurrence, Tensors
from headrace.models.recurrent.states import StatePass


class PagedPlan:
    """The plan of one engine pass over a paged cache; it implements :class:`headrace.models.attention.Plan`. The layers
    of a model call it for attention, for the choices of indexers, and for recurrences over the states of sequences.
    """

    def __init__(
        self,
        cache: PagedCache,
        geometry: Geometry,
        make: AttentionMaker,
        device: torch.device,
        states: StatePass | None = None,
    ) -> None:
        """Prepare the pass with the layout ``geometry`` over ``cache``, with index tensors on ``device``. ``make``
        creates the attention of the pass. ``states`` are the states of recurrent layers; ``None`` for a model without
        such layers."""
        self._cache, self._first_layer = cache, 0
        """The cache, and the index of the first layer of the part of the model that is being computed."""
        self.states = states
        """The states of recurrent layers in this pass; ``None`` for a model without such layers."""
        self._make_indexed = partial(IndexedPass, geometry, device)
        """A function that makes the pass of layers with an indexer."""
        self._indexed: IndexedPass | None = None
        """The pass of layers with an indexer; ``None`` until such a layer is computed."""
        if states is not None:
            states.begin(geometry.starts_R, geometry.counts_R, geometry.num_decode, device)
        self._attention = make(geometry, device)
        """The attention of the pass."""
        self.positions_N = torch.from_numpy(geometry.positions_N()).to(device)
        self.last_R = torch.from_numpy(geometry.last_R()).to(device)
        """The index in the pass of each row's last token, the only token of a row whose logits are computed."""

    def attend(self, query_NHE: Tensor, key_NKE: Tensor, value_NKE: Tensor, rule: Rule) -> Tensor:
        """Write the keys and values of one layer into its pools, and return its attention ``[N, H, E]``. A rule with a
        choice restricts attention to the tokens that :meth:`choose` has returned in this pass."""
        attention = self._attention if rule.choice is None or self._indexed is None else self._indexed
        pools = self._cache.layers[self._first_layer + rule.layer]
        return attention.attend((query_NHE, key_NKE, value_NKE), pools, rule)

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Write the keys of a layer's indexer into their pool, and return the tokens that the indexer chooses for each
        token of the pass."""
        if self._indexed is None:
            self._indexed = self._make_indexed()
        # in a model with indexers, the second half of the cache's layers contains their keys, see cache_shapes
        index_keys, _ = self._cache.layers[len(self._cache.layers) // 2 + layer]
        return self._indexed.choose(choose, inputs_N, index_keys)

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence over the tokens of the pass, update the states of the sequences, and return the outputs
        ``[N, ...]``. ``key`` identifies the state."""
        assert self.states is not None, "a pass over a model with recurrent layers needs their states"
        return self.states.recur(key, recurrence, inputs_N)

    def layer(self, rule: Rule) -> tuple[PagedAttention, tuple[Tensor, Tensor]]:
        """Return the attention of the pass and the pools of the rule's layer, for a kernel that computes attention
        together with other operations."""
        return self._attention, self._cache.layers[self._first_layer + rule.layer]

    def at_layer(self, first: int) -> PagedPlan:
        """Return the plan of a pass over the same rows and tokens for another model, whose first layer has the pools
        with the index ``first`` of the cache."""
        other = copy.copy(self)
        other._first_layer = first
        return other


NUM_TOKENS = 2
"""The number of tokens of the pass in :func:`cache_shapes`; enough for every layer to be called."""


_NO_CACHE = LayerShape(heads=0, key_size=0, value_size=0)
"""The shape of a layer without attention."""


class _ShapeRecorder(PackedPlan):
    """A plan that records the shapes of each layer's keys and values in a short pass, for :func:`cache_shapes`."""

    def __init__(self, device: torch.device) -> None:
        """Arrange one short sequence on ``device``."""
        super().__init__([NUM_TOKENS], device)
        self.shapes: dict[int, LayerShape] = {}
        self.indexers: dict[int, LayerShape] = {}

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Record the shape of the keys of the layer's indexer, then choose as :class:`PackedPlan` does."""
        size = compute_keys(choose, inputs_N).shape[-1]
        self.indexers[layer] = LayerShape(heads=1, key_size=size, value_size=0)
        return super().choose(layer, choose, inputs_N)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the shape of the layer's keys and values, then compute attention as :class:`PackedPlan` does."""
        self.shapes[rule.layer] = LayerShape.from_tensors(key_NKD, value_NKD)
        return super().attend(query_NHD, key_NKD, value_NKD, rule)


@torch.inference_mode()
def cache_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Return the shapes of every layer's keys and values, in the order of the layers, up to the last layer with
    attention. The shape of a layer without attention is empty: :mod:`headrace.models.check` has verified that such a
    layer needs no cache. If the model has indexers, the same number of shapes follows, for the keys of each layer's
    indexer.
    """
    recorder = _ShapeRecorder(model.device)
    forward(model, torch.zeros(NUM_TOKENS, dtype=torch.long, device=model.device), recorder)
    layers = range(max(recorder.shapes, default=-1) + 1)
    shapes = tuple(recorder.shapes.get(layer, _NO_CACHE) for layer in layers)
    return shapes + (tuple(recorder.indexers.get(layer, _NO_CACHE) for layer in layers) if recorder.indexers else ())
