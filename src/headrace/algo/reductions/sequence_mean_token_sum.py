"""The mean over sequences of each one's token sum."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import BatchLayout, Shares
from headrace.algo.reductions.counting import tokens_by
from headrace.config import Section


class SequenceMeanTokenSum(Section):
    """1/S Σ_sequences Σ_tokens x. The samples of one rollout are one sequence.

    Source: Liu et al., arXiv 2503.20783, eq. 2.
    """

    kind: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"
    """Selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """The weight of every token and the mass of them all."""
        _, num_episodes = tokens_by(layout.episodes_S, layout)
        return Shares(weights_N=layout.mask_N.float(), mass=num_episodes)
