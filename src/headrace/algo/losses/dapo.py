"""DAPO: GRPO with a higher upper clip, every token of the batch weighing the same."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss


class Dapo(ClippedLoss):
    """−min(r·A, clip(r, 1−ε, 1+ε_h)·A) with ε_h > ε, averaged over the tokens of the batch.

    Source: Yu et al., arXiv 2503.14476, eq. 8 and 10.
    """

    kind: Literal["dapo"] = "dapo"
    """Selects this loss."""
    clip_high: float = Field(default=0.28, ge=0)
    """ε_h: the ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        return self.surrogate(inputs.log_ratio_N().exp(), inputs.advantages_N)
