"""GSPO-token: the sequence ratio as value, each token's own gradient, for advantages that differ by token."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss


class GspoToken(ClippedLoss):
    """−min(s_t·A_t, clip(s_t, 1−ε, 1+ε_h)·A_t), s_t = sg(s)·π/sg(π), s = exp(mean over the sequence of log r).

    Source: Zheng et al., arXiv 2507.18071, eq. 13 and 14.
    """

    kind: Literal["gspo_token"] = "gspo_token"
    """Selects this loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=4e-4, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N().detach())
        one_N = (inputs.log_pi_N - inputs.log_pi_N.detach()).exp()
        return self.surrogate(log_s_S.exp()[inputs.samples_N] * one_N, inputs.advantages_N)
