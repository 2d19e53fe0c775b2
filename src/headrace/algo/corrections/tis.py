"""Truncated importance sampling, token by token."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection


class Tis(CorrectionSection):
    """min(ρ, C), ρ = π_old/μ per token.

    Source: Ionides (2008), "Truncated importance sampling"; Yao et al. (2025), "Your efficient RL framework secretly
    brings you off-policy RL training".
    """

    kind: Literal["tis"] = "tis"
    """Selects this correction."""
    cap: float = Field(default=2.0, gt=0)
    """C: no token weighs more than this."""
    weighs: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        return Factor(tokens_N=inputs.log_rho_N().exp().clamp(max=self.cap))
