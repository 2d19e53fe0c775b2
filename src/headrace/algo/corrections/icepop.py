"""IcePop, also called masked importance sampling: a weight inside a band, nothing outside."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection, Level, log_rho_at, refuse_crossed


class Icepop(CorrectionSection):
    """ρ where low ≤ ρ ≤ high, else 0; ρ = π_old/μ of the token, its product or geometric mean over the sequence.

    Source: Ling team, arXiv 2510.18855, eq. 3; MIS: Liu et al. (2025), "When speed kills stability".
    """

    kind: Literal["icepop"] = "icepop"
    """Selects this correction."""
    low: float = Field(default=0.5, ge=0)
    """Least weight that is kept."""
    high: float = Field(default=5.0, gt=0)
    """Greatest weight that is kept."""
    level: Level = "token"
    """Whether ρ is the token's, the product over its sequence, or the geometric mean over it."""
    weighs: ClassVar[bool] = True

    @pydantic.model_validator(mode="after")
    def _has_a_band(self) -> Icepop:
        refuse_crossed(self.kind, self.low, self.high)
        return self

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        rho_N = log_rho_at(self.level, inputs).exp()
        return Factor(tokens_N=rho_N.masked_fill((rho_N < self.low) | (rho_N > self.high), 0.0))
