"""Rejection of whole sequences by their mean log-ratio."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection, keep_sequences, refuse_crossed


class GeometricRejection(CorrectionSection):
    """1 for every token of a sequence if low ≤ (Πρ)^{1/T} ≤ high, else 0; ρ = π_old/μ.

    Source: Liu et al. (2025), "When speed kills stability", geometric-level masking.
    """

    kind: Literal["geometric_rejection"] = "geometric_rejection"
    """Selects this correction."""
    low: float = Field(default=0.999, ge=0)
    """Least geometric mean of a sequence that is kept."""
    high: float = Field(default=1.001, gt=0)
    """Greatest geometric mean of a sequence that is kept."""

    @pydantic.model_validator(mode="after")
    def _has_a_band(self) -> GeometricRejection:
        refuse_crossed(self.kind, self.low, self.high)
        return self

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        mean_S = inputs.mean_S(inputs.log_rho_N()).exp()
        return keep_sequences(inputs, (mean_S >= self.low) & (mean_S <= self.high))
