"""The clipped surrogate that PPO's descendants share, over a ratio of tokens or of sequences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.algo.base import TokenLoss
from headrace.algo.losses.section import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class ClippedLoss(PolicyLoss):
    """Settings of −min(min(r, δ)·A, clip(r, 1−ε, 1+ε_h)·A), δ = ``ratio_cap``."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε: the ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=0.2, ge=0)
    """ε_h: the ratio is clipped from above at 1 + ``clip_high``."""
    dual_clip: float | None = Field(default=None, gt=1)
    """c: where A < 0, a token loses at most −c·A (3 is usual); unset: no such bound."""
    ratio_cap: float | None = Field(default=None, gt=0)
    """δ of two-sided clipping: the unclipped r is at most this, for A < 0 too, where a clipped r that is greater still
    counts: below 1 + ``clip_high`` it bounds A > 0 alone; unset: no such bound."""

    def surrogate(self, ratio_N: Tensor, advantages_N: Tensor) -> TokenLoss:
        """The clipped surrogate, and which tokens it gives no gradient."""
        up_N, down_N = advantages_N > 0, advantages_N < 0
        low, high = 1 - self.clip_low, 1 + self.clip_high
        cap = math.inf if self.ratio_cap is None else self.ratio_cap
        capped_N = ratio_N if self.ratio_cap is None else ratio_N.clamp(max=cap)
        tokens_N = -(capped_N * advantages_N).minimum(ratio_N.clamp(low, high) * advantages_N)
        cut_N = (up_N & (ratio_N > min(cap, high))) | (down_N & ((ratio_N < low) | (ratio_N > max(cap, high))))
        if self.dual_clip is not None:
            tokens_N = tokens_N.minimum(-self.dual_clip * advantages_N).where(down_N, tokens_N)
            cut_N |= down_N & (ratio_N > self.dual_clip)
        return TokenLoss(tokens_N=tokens_N, clipped_N=cut_N)
