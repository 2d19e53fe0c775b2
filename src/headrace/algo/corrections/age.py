"""A weight by age alone."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection


class Age(CorrectionSection):
    """γ^age where age ≤ max_age, else 0. Tokens of one answer differ in age when weights changed under it.

    Not a correction of any ratio: it lets old tokens count less. Source: masked prefixes of partial rollouts (SLIME).
    """

    kind: Literal["age"] = "age"
    """Selects this correction."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """γ: by how much a token's weight shrinks per version."""
    max_age: int | None = Field(default=None, ge=0)
    """Oldest age that is trained on; unset: any."""
    corrects: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """Every token's version."""
        return frozenset({"versions"})

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        ages_N = inputs.ages_N().clamp(min=0)
        weights_N = (ages_N.to(inputs.log_pi_N.dtype) * math.log(self.decay)).exp()
        return Factor(tokens_N=weights_N if self.max_age is None else weights_N.masked_fill(ages_N > self.max_age, 0.0))
