"""Rejection by the k3 estimate of the divergence from what sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection, keep_sequences


class K3Rejection(CorrectionSection):
    """1 where k3 ≤ high, else 0; k3 = ρ − 1 − log ρ, ρ = π_old/μ, of the token or as mean over its sequence.

    Never negative, so that deviations of both signs add up. Source: Schulman (2020), "Approximating KL divergence".
    """

    kind: Literal["k3_rejection"] = "k3_rejection"
    """Selects this correction."""
    high: float = Field(default=0.01, gt=0)
    """Greatest divergence that is kept."""
    level: Literal["token", "sequence"] = "sequence"
    """Whether tokens or whole sequences are judged."""

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        log_rho_N = inputs.log_rho_N()
        k3_N = log_rho_N.expm1() - log_rho_N
        if self.level == "sequence":
            return keep_sequences(inputs, inputs.mean_S(k3_N) <= self.high)
        return Factor(tokens_N=(k3_N <= self.high).to(k3_N.dtype))
