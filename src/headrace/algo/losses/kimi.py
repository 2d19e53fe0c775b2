"""Kimi k1.5: a plain policy gradient, held near π_old by the square of the log-ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss


class Kimi(PolicyLoss):
    """−A·log π + τ/2·(log r)², r = π/π_old; in a run the pull is idle unless ``algo.old = "engine"`` makes π_old μ.

    Source: Kimi k1.5, arXiv 2501.12599, eq. 3.
    """

    kind: Literal["kimi"] = "kimi"
    """Selects this loss."""
    tau: float = Field(default=0.1, ge=0)
    """τ: weight of the square."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        return TokenLoss(tokens_N=-inputs.advantages_N * inputs.log_pi_N + self.tau / 2 * inputs.log_ratio_N().square())
