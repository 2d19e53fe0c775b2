"""ASPO: what is good and rare weighs more than what is good and common."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss


class Aspo(PolicyLoss):
    """A > 0: −sg(min(1/r, c))·A·π/sg(π), no gradient where r > 1+ε_h; A < 0: −clip(r, 1−ε, c)·A, the dual clip.

    Source: Wang et al., arXiv 2510.06062 (ratios of positive tokens inverted, soft dual clip); r = π/π_old.
    """

    kind: Literal["aspo"] = "aspo"
    """Selects this loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε: where A < 0, a ratio below 1 − ``clip_low`` has no gradient."""
    clip_high: float = Field(default=0.2, ge=0)
    """ε_h: where A > 0, a ratio above 1 + ``clip_high`` has no gradient."""
    dual_clip: float = Field(default=3.0, gt=1)
    """c: no token weighs more than this, inverted or not."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_r_N, advantages_N = inputs.log_ratio_N(), inputs.advantages_N
        ratio_N, inverse_N = log_r_N.exp(), (-log_r_N.detach()).exp()
        above_N, below_N = ratio_N > 1 + self.clip_high, ratio_N < 1 - self.clip_low
        one_N = (log_r_N - log_r_N.detach()).exp().masked_fill(above_N, 1.0)
        rise_N = -inverse_N.clamp(max=self.dual_clip) * one_N * advantages_N
        fall_N = -ratio_N.clamp(1 - self.clip_low, self.dual_clip) * advantages_N
        up_N = advantages_N > 0
        cut_N = above_N.where(up_N, below_N | (ratio_N > self.dual_clip))
        return TokenLoss(tokens_N=rise_N.where(up_N, fall_N), clipped_N=cut_N)
