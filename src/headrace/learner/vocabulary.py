"""The part of a head that one of several tensor-parallel ranks has: the weights of some entries of the vocabulary.

    rank 0   entries 0 to V/2   ──▶ logits of these ──▶ sums ─┐ joined over the ranks: the log-sum-exp and the entropy
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
    """The consecutive entries of the vocabulary whose weights this rank has, and the ranks that have the others."""

    first: int
    """The id of the first of these entries."""
    group: dist.ProcessGroup
    """The ranks that have all entries together."""

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of ``tensors``, all of one dtype, over the ranks, with the same bits on each; they are sent
        as one."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if len(flat):
            dist.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the largest of each element over the ranks."""
        largest = tensor.clone()
        if largest.numel():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def beside(self, tensor_PK: Tensor) -> Tensor:
        """Return the columns of all ranks beside each other, in order of rank; each rank has equally many."""
        parts = [torch.empty_like(tensor_PK) for _ in range(self.group.size())]
        if tensor_PK.numel():
            dist.all_gather(parts, tensor_PK.contiguous(), group=self.group)
        return torch.cat(parts, 1)
