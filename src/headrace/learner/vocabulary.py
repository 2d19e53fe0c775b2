"""The part of a head on one of several tensor-parallel ranks, which has the weights of some entries of the vocabulary,
and the reductions over these ranks.

    rank 0   entries 0 to V/2   ──▶ logits of these ──▶ sums ─┐ reduced over the ranks: the log-sum-exp and the entropy
    rank 1   entries V/2 to V   ──▶ logits of these ──▶ sums ─┘ of the whole vocabulary; no rank has all logits

All ranks of the group compute the same tokens, and call every method together.

Shape legend: P tokens, K entries of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The consecutive entries of the vocabulary whose weights this rank has, and the group of ranks that together have
    all entries."""

    first: int
    """The id of the first of these entries."""
    group: dist.ProcessGroup
    """The process group of the ranks that together have all entries."""

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of ``tensors``, all of one dtype, over the ranks. All ranks get the same bits. The tensors
        are reduced in one call."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if len(flat):
            dist.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum of ``tensor`` over the ranks."""
        largest = tensor.clone()
        if largest.numel():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def gather(self, tensor_PK: Tensor) -> Tensor:
        """Return the columns ``tensor_PK`` of all ranks concatenated, in the order of the ranks. Each rank must have
        the same number."""
        parts = [torch.empty_like(tensor_PK) for _ in range(self.group.size())]
        if tensor_PK.numel():
            dist.all_gather(parts, tensor_PK.contiguous(), group=self.group)
        return torch.cat(parts, 1)
