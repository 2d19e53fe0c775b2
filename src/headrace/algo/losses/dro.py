"""DRO: direct reward optimisation with a quadratic pull to π_old."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss


class Dro(PolicyLoss):
    """−(A·log π − β/2·(log r)²), r = π/π_old; in a run the pull is idle unless ``algo.old = "engine"`` makes π_old μ.

    Source: Richemond et al., arXiv 2405.19107, eq. 6, the value function replaced by the group's baseline.
    """

    kind: Literal["dro"] = "dro"
    """Selects this loss."""
    beta: float = Field(default=0.05, ge=0)
    """β: weight of the square."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        pull_N = self.beta / 2 * inputs.log_ratio_N().square()
        return TokenLoss(tokens_N=pull_N - inputs.advantages_N * inputs.log_pi_N)
