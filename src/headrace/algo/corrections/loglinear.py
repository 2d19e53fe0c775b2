"""A-3PO: a proximal policy between what sampled and what is trained, by each token's age, at no cost."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs, log_ratio
from headrace.algo.corrections.section import CorrectionSection


class Loglinear(CorrectionSection):
    """log π_old := log μ + α·(log π − log μ), α = (age − 1)/age for age ≥ 1, else 0; weight min(π_old/μ, C).

    With v_prox = v_now − 1 this is α = (v_prox − v_token)/(v_now − v_token). The loss clips against this π_old.
    Source: A-3PO, arXiv 2512.06547, eq. 4 and 5.
    """

    kind: Literal["loglinear"] = "loglinear"
    """Selects this correction."""
    cap: float = Field(default=5.0, gt=0)
    """C: no token weighs more than this."""
    weighs: ClassVar[bool] = True
    replaces_old: ClassVar[bool] = True

    def columns(self) -> frozenset[Column]:
        """μ, and every token's version."""
        return frozenset({"log_mu", "versions"})

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        ages_N = inputs.ages_N().clamp(min=1).to(inputs.log_pi_N.dtype)
        step_N = (ages_N - 1) / ages_N * log_ratio(inputs.log_pi_N.detach(), inputs.log_mu_N)
        return Factor(tokens_N=step_N.exp().clamp(max=self.cap), log_old_N=inputs.log_mu_N + step_N)
