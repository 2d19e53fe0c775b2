"""Clip-Cov: no gradient for the few tokens that would lower the entropy most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.algo.base import Column, LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss
from headrace.algo.losses.covariance import largest_covariance

if TYPE_CHECKING:
    from torch import Tensor


class ClipCov(ClippedLoss):
    """The clipped surrogate; 0 for the fraction of the batch with the largest (A − mean A)·(log π − mean log π).

    Source: Cui et al., arXiv 2505.22617, eq. 9; the largest are taken, where the paper draws from a band.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    """Selects this loss."""
    fraction: float = Field(default=2e-4, ge=0, le=1)
    """Share of the batch's tokens that are chosen; at least one if it is above 0, but none whose
    covariance is not above 0."""

    def formula_columns(self) -> frozenset[Column]:
        """π_old, and the tokens chosen."""
        return super().formula_columns() | {"selected"}

    def select(self, whole: LossInputs) -> Tensor:
        """The tokens with the largest covariance."""
        return largest_covariance(whole, self.fraction)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.selected_NP is not None
        chosen_N = inputs.selected_NP[:, 0]
        clipped = self.surrogate(inputs.log_ratio_N().exp(), inputs.advantages_N)
        assert clipped.clipped_N is not None
        return TokenLoss(tokens_N=clipped.tokens_N.masked_fill(chosen_N, 0.0), clipped_N=clipped.clipped_N | chosen_N)
