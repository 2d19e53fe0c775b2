"""REINFORCE with a truncated importance ratio."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import Anchor, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss


class Reinforce(AnchoredLoss):
    """−sg(min(r, C))·A·log π, r = π/μ.

    Source: Williams (1992); truncation: Espeholt et al. (IMPALA), arXiv 1802.01561, section 4.
    """

    kind: Literal["reinforce"] = "reinforce"
    """Selects this loss."""
    anchor: Anchor = "mu"
    """Whether r is π/π_old (``"old"``) or π/μ (``"mu"``)."""
    ratio_cap: float = Field(default=2.0, gt=0)
    """C: no token weighs more than this."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        ratio_N = inputs.log_ratio_N(self.anchor).detach().exp()
        weights_N = ratio_N.clamp(max=self.ratio_cap)
        return TokenLoss(
            tokens_N=-weights_N * inputs.advantages_N * inputs.log_pi_N, clipped_N=ratio_N > self.ratio_cap
        )
