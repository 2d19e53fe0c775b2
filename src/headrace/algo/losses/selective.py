"""Losses that select tokens by statistics of the whole batch.

``select`` is called once with the whole batch. Each micro-batch then contains the selection in ``selected_NP``. A loss
returns one value per token, to be minimised. r = π/π_old (or π/μ), A is the advantage. N tokens, P formulas that
select.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, TokenLoss
from headrace.algo.losses.clipped import ClippedLoss
from headrace.algo.losses.section import AnchoredLoss, PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class M2po(AnchoredLoss):
    """M2PO's loss: it bounds the second moment of the log-ratio over the batch instead of each ratio.

    −keep·r·A, r = π/μ; the tokens with the largest (log r)² of the batch are dropped until the mean of the others is at
    most τ_M2.

    Tokens with equal values are kept or dropped together.

    Source: Zheng et al., arXiv 2510.01161, eq. 6 and algorithm 1.
    """

    kind: Literal["m2po"] = "m2po"
    """The name that selects this loss."""
    anchor: Anchor = "mu"
    """The policy in the denominator of r: π_old (``"old"``) or μ (``"mu"``)."""
    threshold: float = Field(default=0.04, ge=0)
    """τ_M2, the largest mean of (log r)² over the tokens that are kept."""

    def formula_columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: the column of the anchor, and the selected tokens."""
        return super().formula_columns() | {"selected"}

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the tokens that are kept: as many as possible with the smallest (log r)², such
        that the mean of their (log r)² is at most ``threshold``."""
        square_N = whole.log_ratio_N(self.anchor).square()
        ranked = square_N[whole.mask_N].sort().values
        means = ranked.cumsum(0) / ranked.new_ones(len(ranked)).cumsum(0)
        # tokens of equal value are kept together: only the last of them can be the limit
        last_of_run = ranked.new_ones(len(ranked), dtype=whole.mask_N.dtype)
        last_of_run[:-1] = ranked[1:] > ranked[:-1]
        allowed = ranked[last_of_run & (means <= self.threshold)]
        return square_N <= allowed[-1] if len(allowed) else whole.mask_N.new_zeros(len(square_N))

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −r·A for the tokens that :meth:`select` has kept, 0 for the others."""
        assert inputs.selected_NP is not None
        keep_N = inputs.selected_NP[:, 0]
        tokens_N = -inputs.log_ratio_N(self.anchor).exp() * inputs.advantages_N
        return TokenLoss(tokens_N=tokens_N.masked_fill(~keep_N, 0.0), clipped_N=~keep_N)


def largest_covariance(whole: LossInputs, fraction: float) -> Tensor:
    """Return the mask of the ``fraction`` of the tokens of the batch ``whole`` (at least one token) with the largest
    covariance (A − mean A)·(log π − mean log π). Tokens whose covariance is not above 0, up to rounding, are not
    included.

    Tokens with equal values are selected together, so that the result does not depend on the order of tokens. Source:
    Cui et al., arXiv 2505.22617, eq. 7.
    """
    advantages, log_pi = whole.advantages_N[whole.mask_N], whole.log_pi_N[whole.mask_N]
    count = len(log_pi)
    if not count or not fraction:
        return whole.mask_N.new_zeros(len(whole.mask_N))
    covariance_N = (whole.advantages_N - advantages.mean()) * (whole.log_pi_N - log_pi.mean())
    least = covariance_N[whole.mask_N].topk(max(1, int(fraction * count))).values[-1]
    rounding = 1e-6 * advantages.abs().max() * log_pi.abs().max()
    return (covariance_N >= least) & (covariance_N > rounding)


class ClipCov(ClippedLoss):
    """Clip-Cov: no gradient for the few tokens that would decrease the entropy most.

    The clipped surrogate; 0 for the fraction of the batch with the largest (A − mean A)·(log π − mean log π).

    Source: Cui et al., arXiv 2505.22617, eq. 9. This loss selects the largest values; the paper samples from a range.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    """The name that selects this loss."""
    fraction: float = Field(default=2e-4, ge=0, le=1)
    """The fraction of the batch's tokens that is selected: at least one token if it is above 0, but no token whose
    covariance is not above 0."""

    def formula_columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: log π_old, and the selected tokens."""
        return super().formula_columns() | {"selected"}

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the tokens with the largest covariance of advantage and log π, which receive no
        gradient."""
        return largest_covariance(whole, self.fraction)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: the clipped surrogate, but 0 for the tokens that :meth:`select` has
        selected."""
        assert inputs.selected_NP is not None
        chosen_N = inputs.selected_NP[:, 0]
        clipped = self.surrogate(inputs.log_ratio_N().exp(), inputs.advantages_N)
        assert clipped.clipped_N is not None
        return TokenLoss(tokens_N=clipped.tokens_N.masked_fill(chosen_N, 0.0), clipped_N=clipped.clipped_N | chosen_N)


class KlCov(PolicyLoss):
    """KL-Cov: a penalty on the distance to π_old for the few tokens that would decrease the entropy most.

    −r·A, plus β·|log r| for the fraction of tokens with the largest (A − mean A)·(log π − mean log π) of the batch.

    Source: Cui et al., arXiv 2505.22617, eq. 11; r = π/π_old.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    """The name that selects this loss."""
    fraction: float = Field(default=2e-4, ge=0, le=1)
    """The fraction of the batch's tokens that is selected: at least one token if it is above 0, but no token whose
    covariance is not above 0."""
    beta: float = Field(default=1.0, ge=0)
    """β, the weight of the penalty."""

    def formula_columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: log π_old, and the selected tokens."""
        return super().formula_columns() | {"selected"}

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the tokens with the largest covariance of advantage and log π, to which the
        penalty applies."""
        return largest_covariance(whole, self.fraction)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −r·A, plus β·|log r| for the tokens that :meth:`select` has selected."""
        assert inputs.selected_NP is not None
        log_r_N = inputs.log_ratio_N()
        penalty_N = self.beta * log_r_N.abs().masked_fill(~inputs.selected_NP[:, 0], 0.0)
        return TokenLoss(tokens_N=penalty_N - log_r_N.exp() * inputs.advantages_N)
