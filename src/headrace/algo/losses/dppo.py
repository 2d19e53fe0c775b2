"""DPPO: the trust region is a bound on the change of probability, not of the ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss


class Dppo(AnchoredLoss):
    """−keep·A·sg(min(r, c))·log π + τ·(log π/μ)²; keep is 0 where A > 0 and π − μ > δ, or A < 0 and π − μ < −δ.

    The square pulls every token to μ, a token whose gain is dropped too. With ``kl_tau = 1e-3``, ``anchor = "mu"`` and
    a ``ratio_cap`` that never acts (1e9: log r is at most 20), its gradient is that of PRIME-RL's default loss.

    Source: "Rethinking the trust region in LLM reinforcement learning", arXiv 2602.04879 (total-variation form); the
    square: Kimi K2.5, arXiv 2602.02276, as PRIME-RL has it.
    """

    kind: Literal["dppo"] = "dppo"
    """Selects this loss."""
    anchor: Anchor = "old"
    """Whether r is π/π_old (``"old"``) or π/μ (``"mu"``)."""
    delta: float = Field(default=0.2, ge=0, le=1)
    """δ: how far the probability of a token may have moved from μ."""
    ratio_cap: float = Field(default=20.0, gt=0)
    """c: no token weighs more than this."""
    kl_tau: float = Field(default=0.0, ge=0)
    """τ: weight of the square; 1e-3 is PRIME-RL's."""

    def formula_columns(self) -> frozenset[Column]:
        """Its anchor, and μ for the trust region."""
        return super().formula_columns() | {"log_mu"}

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        moved_N = inputs.log_pi_N.detach().exp() - inputs.log_mu_N.exp()
        up_N, down_N = inputs.advantages_N > 0, inputs.advantages_N < 0
        cut_N = (up_N & (moved_N > self.delta)) | (down_N & (moved_N < -self.delta))
        ratio_N = inputs.log_ratio_N(self.anchor).detach().exp().clamp(max=self.ratio_cap)
        tokens_N = (-inputs.advantages_N * ratio_N * inputs.log_pi_N).masked_fill(cut_N, 0.0)
        if self.kl_tau > 0:
            tokens_N = tokens_N + self.kl_tau * inputs.log_ratio_N("mu").square()
        return TokenLoss(tokens_N=tokens_N, clipped_N=cut_N)
