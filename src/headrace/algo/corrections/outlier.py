"""Rejection of sequences with one impossible token."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection, keep_sequences, refuse_crossed


class Outlier(CorrectionSection):
    """0 for every token of a sequence in which any ρ = π_old/μ lies outside [low, high], else 1.

    Such a ratio is a fault (a different tokenisation, a corrupt cache), not a drift. Source: PRIME-RL, outlier masking.
    """

    kind: Literal["outlier"] = "outlier"
    """Selects this correction."""
    low: float = Field(default=1e-4, ge=0)
    """Least ratio that a token may have."""
    high: float = Field(default=100.0, gt=0)
    """Greatest ratio that a token may have."""
    corrects: ClassVar[bool] = False

    @pydantic.model_validator(mode="after")
    def _has_a_band(self) -> Outlier:
        refuse_crossed(self.kind, self.low, self.high)
        return self

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        rho_N = inputs.log_rho_N().exp()
        strange_N = ((rho_N < self.low) | (rho_N > self.high)).to(rho_N.dtype)
        return keep_sequences(inputs, inputs.sum_S(strange_N) == 0)
