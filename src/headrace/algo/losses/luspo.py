"""LUSPO: GSPO whose sequences weigh by their length, so that short answers are not favoured."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss


class Luspo(ClippedLoss):
    """−min(s·A, clip(s, 1−ε, 1+ε_h)·A)·|y|, s = exp(mean over the sequence of log r), r = π/π_old.

    The factor |y| is the reduction's: the token sum of a value that all tokens of a sequence share.
    Source: LUSPO, arXiv 2602.05261.
    """

    kind: Literal["luspo"] = "luspo"
    """Selects this loss."""
    clip_low: float = Field(default=2e-3, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=2.5e-3, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_sum"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N())
        return self.surrogate(log_s_S.exp()[inputs.samples_N], inputs.advantages_N)
