"""SAPO: a smooth gate in place of the clip, steeper where A < 0."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss


class Sapo(PolicyLoss):
    """−(4/τ)·σ(τ·(r − 1))·A, r = π/π_old, τ by the sign of A.

    Source: Gao et al., arXiv 2511.20347, eq. 5 and 6.
    """

    kind: Literal["sapo"] = "sapo"
    """Selects this loss."""
    tau_pos: float = Field(default=1.0, gt=0)
    """τ where A > 0."""
    tau_neg: float = Field(default=1.05, gt=0)
    """τ elsewhere."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        tau_N = inputs.advantages_N.new_full((), self.tau_pos).where(inputs.advantages_N > 0, self.tau_neg)
        gate_N = (tau_N * (inputs.log_ratio_N().exp() - 1)).sigmoid() * 4 / tau_N
        return TokenLoss(tokens_N=-gate_N * inputs.advantages_N)
