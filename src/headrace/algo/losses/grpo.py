"""GRPO: PPO's clipped surrogate with the group as its critic."""

from __future__ import annotations

from typing import ClassVar, Literal

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.clipping import ClippedLoss


class Grpo(ClippedLoss):
    """−min(r·A, clip(r, 1−ε, 1+ε_h)·A), r = π/π_old per token; where A < 0 and a dual clip c is set, at most −c·A.

    Source: Schulman et al., arXiv 1707.06347, eq. 7; Shao et al., arXiv 2402.03300, eq. 3; dual clip: Ye et al.,
    arXiv 1912.09729, eq. 5; two-sided cap: INTELLECT-2, arXiv 2505.07291, eq. 2.
    """

    kind: Literal["grpo"] = "grpo"
    """Selects this loss."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        return self.surrogate(inputs.log_ratio_N().exp(), inputs.advantages_N)
