"""Decoupled PPO: clip against a recent policy, weigh for the one that sampled."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection


class Decoupled(CorrectionSection):
    """min(ρ, C), ρ = π_old/μ per token: tis with a wider bound, for a loss that clips π/π_old.

    In a run π_old is the learner before this step, and a batch is one update: the ratio that the loss clips is 1 then,
    and what remains is the weight. ``loglinear`` puts π_old between μ and π, ``algo.old = "engine"`` at μ: clips act.

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
