"""M2PO: bounds the second moment of the log-ratio over the batch, not each ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss

if TYPE_CHECKING:
    from torch import Tensor


class M2po(AnchoredLoss):
    """−keep·r·A, r = π/μ; the largest (log r)² of the batch are dropped until the mean of the rest is at most τ_M2.

    Equal values are kept or dropped together.

    Source: Zheng et al., arXiv 2510.01161, eq. 6 and algorithm 1.
    """

    kind: Literal["m2po"] = "m2po"
    """Selects this loss."""
    anchor: Anchor = "mu"
    """Whether r is π/π_old (``"old"``) or π/μ (``"mu"``)."""
    threshold: float = Field(default=0.04, ge=0)
    """τ_M2: the mean of (log r)² that the kept tokens may have."""

    def formula_columns(self) -> frozenset[Column]:
        """Its anchor, and the tokens kept."""
        return super().formula_columns() | {"selected"}

    def select(self, whole: LossInputs) -> Tensor:
        """The tokens that are kept."""
        square_N = whole.log_ratio_N(self.anchor).square()
        ranked = square_N[whole.mask_N].sort().values
        means = ranked.cumsum(0) / ranked.new_ones(len(ranked)).cumsum(0)
        last_of_run = ranked.new_ones(len(ranked), dtype=whole.mask_N.dtype)
        last_of_run[:-1] = ranked[1:] > ranked[:-1]
        allowed = ranked[last_of_run & (means <= self.threshold)]
        return square_N <= allowed[-1] if len(allowed) else whole.mask_N.new_zeros(len(square_N))

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.selected_NP is not None
        keep_N = inputs.selected_NP[:, 0]
        tokens_N = -inputs.log_ratio_N(self.anchor).exp() * inputs.advantages_N
        return TokenLoss(tokens_N=tokens_N.masked_fill(~keep_N, 0.0), clipped_N=~keep_N)
