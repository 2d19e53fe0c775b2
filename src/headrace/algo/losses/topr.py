"""TOPR: full credit for what was good, tapered blame for what π no longer says."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import Anchor, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss


class Topr(AnchoredLoss):
    """−A·log π where A > 0; −sg(min(Π r over the sequence, 1))·A·log π elsewhere, r = π/μ.

    Source: Le Roux et al., arXiv 2503.14286, eq. 8.
    """

    kind: Literal["topr"] = "topr"
    """Selects this loss."""
    anchor: Anchor = "mu"
    """Whether r is π/π_old (``"old"``) or π/μ (``"mu"``)."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        log_w_S = inputs.sum_S(inputs.log_ratio_N(self.anchor).detach())
        taper_N = log_w_S.clamp(-20.0, 0.0).exp()[inputs.samples_N]
        weights_N = taper_N.masked_fill(inputs.advantages_N > 0, 1.0)
        return TokenLoss(tokens_N=-weights_N * inputs.advantages_N * inputs.log_pi_N)
