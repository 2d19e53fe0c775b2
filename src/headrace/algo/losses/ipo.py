"""IPO, one of PRIME-RL's losses: an importance ratio inside a band of probability, and a quadratic pull to μ."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import Column, LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss


class Ipo(PolicyLoss):
    """−keep·A·r + τ·(log r)², r = π/μ, keep where |π − μ| ≤ δ.

    Source: PRIME-RL's loss of type "ipo" (its default is ``dppo`` with ``kl_tau``); the
    trust region as in arXiv 2602.04879, on both sides whatever the sign of A.
    """

    kind: Literal["ipo"] = "ipo"
    """Selects this loss."""
    delta: float = Field(default=0.1, ge=0, le=1)
    """δ: how far the probability of a token may have moved from μ."""
    tau: float = Field(default=1e-3, ge=0)
    """τ: weight of the square."""

    def formula_columns(self) -> frozenset[Column]:
        """μ alone."""
        return frozenset({"log_mu"})

    def corrects(self) -> bool:
        """Its ratio is taken against μ."""
        return True

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_r_N = inputs.log_ratio_N("mu")
        moved_N = inputs.log_pi_N.detach().exp() - inputs.log_mu_N.exp()
        cut_N = moved_N.abs() > self.delta
        gain_N = (inputs.advantages_N * log_r_N.exp()).masked_fill(cut_N, 0.0)
        return TokenLoss(tokens_N=self.tau * log_r_N.square() - gain_N, clipped_N=cut_N)
