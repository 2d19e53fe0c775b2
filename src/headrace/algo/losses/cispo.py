"""CISPO: a clipped ratio as weight only, so that no token loses its gradient."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Anchor, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss, refuse_idle


class Cispo(AnchoredLoss):
    """−sg(min(r, 1+ε_h))·A·log π; two-sided: −sg(clip(r, 1−ε, 1+ε_h))·A·log π.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the wide bound: ScaleRL, arXiv 2510.13786.
    """

    kind: Literal["cispo"] = "cispo"
    """Selects this loss."""
    anchor: Anchor = "old"
    """Whether r is π/π_old (``"old"``) or π/μ (``"mu"``)."""
    clip_high: float = Field(default=4.0, ge=0)
    """ε_h: the weight is at most 1 + ``clip_high``."""
    two_sided: bool = False
    """Also keep the weight from falling below 1 − ``clip_low``."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε: used only with ``two_sided``."""

    @pydantic.model_validator(mode="after")
    def _lower_bound_acts(self) -> Cispo:
        if not self.two_sided:
            refuse_idle(self, "clip_low", "two_sided = true")
        return self

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        ratio_N = inputs.log_ratio_N(self.anchor).detach().exp()
        low = 1 - self.clip_low if self.two_sided else 0.0
        weights_N = ratio_N.clamp(low, 1 + self.clip_high)
        return TokenLoss(tokens_N=-weights_N * inputs.advantages_N * inputs.log_pi_N, clipped_N=weights_N != ratio_N)
