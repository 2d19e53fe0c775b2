"""Losses with one clipped ratio for a whole sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipped import ClippedLoss
from headrace.algo.losses.section import PolicyLoss


class Gspo(ClippedLoss):
    """GSPO's loss: one length-normalised ratio per sequence, as there is one reward per sequence.

    −min(s·A, clip(s, 1−ε, 1+ε_h)·A), s = exp(mean over the sequence of log r), r = π/π_old.

    Source: Zheng et al., arXiv 2507.18071, eq. 5 and 7; clip range from section 5.1.
    """

    kind: Literal["gspo"] = "gspo"
    """The name that selects this loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=4e-4, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N())
        return self.surrogate(log_s_S.exp()[inputs.samples_N], inputs.advantages_N)


class GspoToken(ClippedLoss):
    """GSPO-token: the value of the sequence ratio with each token's own gradient, for advantages that differ by
    token.

    −min(s_t·A_t, clip(s_t, 1−ε, 1+ε_h)·A_t), s_t = sg(s)·π/sg(π), s = exp(mean over the sequence of log r).

    Source: Zheng et al., arXiv 2507.18071, eq. 13 and 14.
    """

    kind: Literal["gspo_token"] = "gspo_token"
    """The name that selects this loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=4e-4, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N().detach())
        one_N = (inputs.log_pi_N - inputs.log_pi_N.detach()).exp()
        return self.surrogate(log_s_S.exp()[inputs.samples_N] * one_N, inputs.advantages_N)


class Gmpo(PolicyLoss):
    """GMPO's loss: the geometric mean of clipped token ratios, which one extreme token cannot dominate.

    −A·exp(mean over the sequence of l), l = log r, bounded above by ε_h where A > 0 and below by −ε where A < 0.

    A is the mean of the sequence's advantages; r = π/π_old. Source: Zhao et al., arXiv 2507.20673, eq. 4.
    """

    kind: Literal["gmpo"] = "gmpo"
    """The name that selects this loss."""
    clip_low: float = Field(default=0.4, ge=0)
    """ε: the log-ratio is clipped from below at −``clip_low``."""
    clip_high: float = Field(default=0.4, ge=0)
    """ε_h: the log-ratio is clipped from above at ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token."""
        log_r_N = inputs.log_ratio_N()
        advantages_S = inputs.mean_S(inputs.advantages_N)
        up_N, down_N = (advantages_S > 0)[inputs.samples_N], (advantages_S < 0)[inputs.samples_N]
        bounded_N = log_r_N.clamp(max=self.clip_high).where(
            up_N, log_r_N.clamp(min=-self.clip_low).where(down_N, log_r_N)
        )
        tokens_S = -advantages_S * inputs.mean_S(bounded_N).exp()
        cut_N = (up_N & (log_r_N > self.clip_high)) | (down_N & (log_r_N < -self.clip_low))
        return TokenLoss(tokens_N=tokens_S[inputs.samples_N], clipped_N=cut_N)
