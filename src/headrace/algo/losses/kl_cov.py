"""KL-Cov: a pull to π_old for the few tokens that would lower the entropy most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.algo.base import Column, LossInputs, TokenLoss
from headrace.algo.losses.covariance import largest_covariance
from headrace.algo.losses.section import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class KlCov(PolicyLoss):
    """−r·A, plus β·|log r| for the fraction of tokens with the largest (A − mean A)·(log π − mean log π) of the batch.

    Source: Cui et al., arXiv 2505.22617, eq. 11; r = π/π_old.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    """Selects this loss."""
    fraction: float = Field(default=2e-4, ge=0, le=1)
    """Share of the batch's tokens that are chosen; at least one if it is above 0, but none whose
    covariance is not above 0."""
    beta: float = Field(default=1.0, ge=0)
    """β: weight of the pull."""

    def formula_columns(self) -> frozenset[Column]:
        """π_old, and the tokens chosen."""
        return super().formula_columns() | {"selected"}

    def select(self, whole: LossInputs) -> Tensor:
        """The tokens with the largest covariance."""
        return largest_covariance(whole, self.fraction)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.selected_NP is not None
        log_r_N = inputs.log_ratio_N()
        pull_N = self.beta * log_r_N.abs().masked_fill(~inputs.selected_NP[:, 0], 0.0)
        return TokenLoss(tokens_N=pull_N - log_r_N.exp() * inputs.advantages_N)
