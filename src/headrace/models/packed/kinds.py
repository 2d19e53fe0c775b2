"""The kinds of attention that the layers of a model compute, as recorded in a short pass.

Shape legend: N tokens of the pass, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.models.attention import PackedPlan, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKind:
    """One kind of attention: the sizes of queries, keys and values, and the parameters of the layers' rule."""

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
    """The factor by which scores are multiplied."""
    window: int | None
    """The number of latest tokens that a token attends to, itself included; ``None`` for all tokens before it."""
    chunk: int | None
    """The number of tokens of a chunk; ``None`` for no chunks."""
    softcap: float | None
    """The soft cap of scores; ``None`` for none."""
    has_sinks: bool
    """Whether a learned score without a value takes part in the softmax of each head."""
    indexed: bool
    """Whether an indexer chooses the tokens to attend to."""

    def writes_scores(self, *, on_host: bool, shares: bool) -> bool:
        """Return whether padded attention stores the scores of all pairs of tokens in memory. ``on_host`` says whether
        it runs on a CPU, ``shares`` whether samples share tokens. torch has kernels without stored scores for plain
        attention. Windows and shared tokens need a mask, and with a mask a GPU's kernels support no grouped heads."""
        masked = self.window is not None or self.chunk is not None or self.indexed or shares
        plain = self.softcap is None and not self.has_sinks
        return not plain or (masked and not on_host and self.heads != self.kv_heads)


class KindRecorder(PackedPlan):
    """A plan for one short sequence that records the kind of attention that each layer computes."""

    def __init__(self, device: torch.device | str) -> None:
        """Arrange two tokens on ``device``."""
        super().__init__([2], device)
        self.layers: dict[int, AttentionKind] = {}
        """The kind of attention of each layer that has been computed, by the layer's index."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the kind of the layer's attention, then compute it as :class:`PackedPlan` does."""
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
