"""Token sums over a constant, so that no length changes a token's weight."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import BatchLayout, Shares
from headrace.algo.reductions.counting import tokens_by
from headrace.config import Section


class Constant(Section):
    """1/S Σ_sequences (Σ_tokens x / L) with a constant L. The samples of one rollout are one sequence.

    Source: Liu et al. (Dr. GRPO), arXiv 2503.20783, appendix A, where L is the generation budget.
    """

    kind: Literal["constant"] = "constant"
    """Selects this reduction."""
    normalizer: float = Field(default=1.0, gt=0)
    """L: the constant; the longest answer allowed, in tokens, gives losses of the usual size."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """The weight of every token and the mass of them all."""
        _, num_episodes = tokens_by(layout.episodes_S, layout)
        return Shares(weights_N=layout.mask_N.float() / self.normalizer, mass=num_episodes)
