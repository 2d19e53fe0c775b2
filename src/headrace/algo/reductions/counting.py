"""Counting tokens by sequence or prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algo.base import BatchLayout

if TYPE_CHECKING:
    from torch import Tensor


def tokens_by(owners_S: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
    """For every token, how many tokens of the mask its owner has; and how many owners have any.

    ``owners_S`` says which episode or group each sample belongs to, by any integers. An owner without a token of the
    mask counts in no denominator.
    """
    mask_N = layout.mask_N.float()
    owners, index_S = owners_S.unique(return_inverse=True)
    owners_N = index_S[layout.samples_N]
    counts = mask_N.new_zeros(len(owners)).index_add(0, owners_N, mask_N)
    return counts[owners_N].clamp(min=1.0), (counts > 0).sum().float()
