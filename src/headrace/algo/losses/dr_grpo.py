"""Dr. GRPO: GRPO without the two normalisations that favour short right and long wrong answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss


class DrGrpo(ClippedLoss):
    """−min(r·A, clip(r, 1−ε, 1+ε_h)·A), summed over tokens and divided by a constant; its advantage is R − mean.

    Set ``normalizer`` of the reduction to the longest answer allowed, in tokens: at its default of 1 the loss is a sum
    over tokens, and its gradient grows with the answers.

    Source: Liu et al., arXiv 2503.20783, section 3.2.
    """

    kind: Literal["dr_grpo"] = "dr_grpo"
    """Selects this loss."""
    reduction: ClassVar[str] = "constant"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        return self.surrogate(inputs.log_ratio_N().exp(), inputs.advantages_N)
