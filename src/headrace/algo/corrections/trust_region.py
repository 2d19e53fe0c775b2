"""A band for each token's weight that narrows with its age."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection


class TrustRegion(CorrectionSection):
    """ρ where |log ρ| ≤ δ·γ^age, else 0; ρ = π_old/μ.

    Tokens of older weights have to agree more closely to be trained on. γ = 1 is icepop with a symmetric band.
    """

    kind: Literal["trust_region"] = "trust_region"
    """Selects this correction."""
    delta: float = Field(default=1.0, gt=0)
    """δ: half the width of the band of log ρ at age 0."""
    decay: float = Field(default=0.9, gt=0, le=1)
    """γ: by how much the band narrows per version."""
    weighs: ClassVar[bool] = True

    def columns(self) -> frozenset[Column]:
        """Both policies, and every token's version."""
        return super().columns() | {"versions"}

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        log_rho_N = inputs.log_rho_N()
        ages_N = inputs.ages_N().clamp(min=0).to(log_rho_N.dtype)
        width_N = self.delta * (ages_N * math.log(self.decay)).exp()
        return Factor(tokens_N=log_rho_N.exp().masked_fill(log_rho_N.abs() > width_N, 0.0))
