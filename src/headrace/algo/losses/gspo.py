"""GSPO: one ratio per sequence, length-normalised, as the reward is one per sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss


class Gspo(ClippedLoss):
    """−min(s·A, clip(s, 1−ε, 1+ε_h)·A), s = exp(mean over the sequence of log r), r = π/π_old.

    Source: Zheng et al., arXiv 2507.18071, eq. 5 and 7; clip range from section 5.1.
    """

    kind: Literal["gspo"] = "gspo"
    """Selects this loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=4e-4, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N())
        return self.surrogate(log_s_S.exp()[inputs.samples_N], inputs.advantages_N)
