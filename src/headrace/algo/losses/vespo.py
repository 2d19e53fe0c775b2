"""VESPO: a soft weight over the whole sequence's ratio, fading on both sides of 1."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import Anchor, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss


class Vespo(AnchoredLoss):
    """−sg(φ(W))·A·log π, φ(W) = W^k·e^{λ(1−W)}, W = Π r over the sequence, r = π/μ; k and λ by the sign of A.

    Source: VESPO, arXiv 2602.10693.
    """

    kind: Literal["vespo"] = "vespo"
    """Selects this loss."""
    anchor: Anchor = "mu"
    """Whether r is π/π_old (``"old"``) or π/μ (``"mu"``)."""
    k_pos: float = Field(default=2.0, ge=0)
    """k where A ≥ 0."""
    lambda_pos: float = Field(default=3.0, ge=0)
    """λ where A ≥ 0."""
    k_neg: float = Field(default=3.0, ge=0)
    """k where A < 0."""
    lambda_neg: float = Field(default=2.0, ge=0)
    """λ where A < 0."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_w_S = inputs.sum_S(inputs.log_ratio_N(self.anchor).detach()).clamp(-20.0, 20.0)
        log_w_N = log_w_S[inputs.samples_N]
        up_N = inputs.advantages_N >= 0
        rise_N = self.k_pos * log_w_N + self.lambda_pos * (1 - log_w_N.exp())
        fall_N = self.k_neg * log_w_N + self.lambda_neg * (1 - log_w_N.exp())
        return TokenLoss(tokens_N=-rise_N.where(up_N, fall_N).exp() * inputs.advantages_N * inputs.log_pi_N)
