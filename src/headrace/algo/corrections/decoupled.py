"""Decoupled PPO: clip against a recent policy, weigh for the one that sampled."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection


class Decoupled(CorrectionSection):
    """min(ρ, C), ρ = π_old/μ per token, with a π_old that the learner has kept or recomputed.

    Source: Hilton et al., arXiv 2110.00641, eq. 5; for language models: AReaL, arXiv 2505.24298, eq. 5.
    """

    kind: Literal["decoupled"] = "decoupled"
    """Selects this correction."""
    cap: float = Field(default=5.0, gt=0)
    """C: no token weighs more than this."""
    weighs: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        return Factor(tokens_N=inputs.log_rho_N().exp().clamp(max=self.cap))
