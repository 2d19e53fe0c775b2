"""The kinds of attention that the layers of a model compute, as a short pass shows them.

Shape legend: N tokens of the pass, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.attention import PackedPlan, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """One kind of attention: the sizes of queries, keys and values, and what the rule of the layers adds."""

    heads: int
    """The number of query heads, on this rank."""
    kv_heads: int
    """The number of key-value heads, on this rank."""
    key_size: int
    """The size of one head's query and key."""
    value_size: int
    """The size of one head's value."""
    dtype: torch.dtype
    """The number format of queries, keys and values."""
    scale: float
    """The factor that scores are multiplied by."""
    window: int | None
    """The number of tokens that a token attends to; ``None`` for all before it."""
    chunk: int | None
    """The number of tokens of a chunk; ``None`` for no chunks."""
    softcap: float | None
    """The limit of scores; ``None`` for none."""
    has_sinks: bool
    """Whether a learned score without a value takes part in the softmax of each head."""
    indexed: bool
    """Whether an indexer chooses the tokens that are attended to."""

    def writes_scores(self, *, on_host: bool, shares: bool) -> bool:
        """Return whether padded attention holds the scores of all pairs of tokens, ``on_host`` or on a GPU, where
        samples share tokens (``shares``) or not. torch has kernels without them for plain attention; with a mask, as
        windows and shared tokens need one, a GPU's have no grouped heads."""
        masked = self.window is not None or self.chunk is not None or self.indexed or shares
        plain = self.softcap is None and not self.has_sinks
        return not plain or (masked and not on_host and self.heads != self.kv_heads)

    @property
    def pair_bytes(self) -> int:
        """Return the bytes that written-out scores keep for the backward pass, for each pair of tokens that padded
        attention computes: the weights in float32, the same in the model's dtype unless that is float32, and the
        capped scores before the softmax."""
        itemsize = self.dtype.itemsize
        weights = itemsize if self.dtype.is_floating_point and itemsize == 4 else 4 + itemsize
        return self.heads * (weights + (itemsize if self.softcap is not None else 0))


class KindRecorder(PackedPlan):
    """A plan for one short sequence that records which kind of attention each layer computes."""

    def __init__(self, device: torch.device | str) -> None:
        """Lay out two tokens on ``device``."""
        super().__init__([2], device)
        self.layers: dict[int, AttentionKind] = {}
        """The kind of each layer that has attended."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the kind of the rule's layer, then attend as :class:`PackedPlan` does."""
        self.layers[rule.layer] = AttentionKind(
            heads=query_NHD.shape[1],
            kv_heads=key_NKD.shape[1],
            key_size=query_NHD.shape[2],
            value_size=value_NKD.shape[2],
            dtype=query_NHD.dtype,
            scale=rule.scale,
            window=rule.window,
            chunk=rule.chunk,
            softcap=rule.softcap,
            has_sinks=rule.sinks_H is not None,
            indexed=rule.choice is not None,
        )
        return super().attend(query_NHD, key_NKD, value_NKD, rule)
