"""Truncated importance sampling, one weight per sequence."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection, log_rho_at


class SequenceTis(CorrectionSection):
    """min(w, C), w = Πρ over the sequence, or its geometric mean (Πρ)^{1/T}; ρ = π_old/μ.

    A product over a long answer is far from 1 for any mismatch at all; the geometric mean does not depend on length.
    Source: Liu et al. (2025), "When speed kills stability"; geometric form: Zheng et al., arXiv 2507.18071, eq. 7.
    """

    kind: Literal["sequence_tis"] = "sequence_tis"
    """Selects this correction."""
    level: Literal["sequence", "geometric"] = "sequence"
    """``"sequence"``: the product; ``"geometric"``: the geometric mean."""
    cap: float = Field(default=2.0, gt=0)
    """C: no sequence weighs more than this."""
    weighs: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        return Factor(tokens_N=log_rho_at(self.level, inputs).exp().clamp(max=self.cap))
