"""Counting tokens by sequence or prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algo.base import BatchLayout

if TYPE_CHECKING:
    from torch import Tensor


def tokens_by(owners_S: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
    """For every token, how many tokens of the mask its owner has; and how many owners have any.

    ``owners_S`` says which episode or group each sample belongs to. An owner without a token of the mask counts in no
    denominator.
    """
    mask_N = layout.mask_N.float()
    owners_N = owners_S[layout.samples_N]
    size = int(owners_S.max()) + 1 if owners_S.numel() else 1
    counts = mask_N.new_zeros(size).index_add(0, owners_N, mask_N)
    return counts[owners_N].clamp(min=1.0), (counts > 0).sum().float()
