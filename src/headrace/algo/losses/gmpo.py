"""GMPO: the geometric mean of clipped token ratios, which one outlying token cannot dominate."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss


class Gmpo(PolicyLoss):
    """−A·exp(mean over the sequence of l), l = log r, bounded above by ε_h where A > 0 and below by −ε where A < 0.

    A is the mean of the sequence's advantages; r = π/π_old. Source: Zhao et al., arXiv 2507.20673, eq. 4.
    """

    kind: Literal["gmpo"] = "gmpo"
    """Selects this loss."""
    clip_low: float = Field(default=0.4, ge=0)
    """ε: the log-ratio is clipped from below at −``clip_low``."""
    clip_high: float = Field(default=0.4, ge=0)
    """ε_h: the log-ratio is clipped from above at ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_r_N = inputs.log_ratio_N()
        advantages_S = inputs.mean_S(inputs.advantages_N)
        up_N, down_N = (advantages_S > 0)[inputs.samples_N], (advantages_S < 0)[inputs.samples_N]
        bounded_N = log_r_N.clamp(max=self.clip_high).where(
            up_N, log_r_N.clamp(min=-self.clip_low).where(down_N, log_r_N)
        )
        tokens_S = -advantages_S * inputs.mean_S(bounded_N).exp()
        cut_N = (up_N & (log_r_N > self.clip_high)) | (down_N & (log_r_N < -self.clip_low))
        return TokenLoss(tokens_N=tokens_S[inputs.samples_N], clipped_N=cut_N)
