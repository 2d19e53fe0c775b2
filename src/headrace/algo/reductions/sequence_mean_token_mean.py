"""The mean over sequences of each one's token mean."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import BatchLayout, Shares
from headrace.algo.reductions.counting import tokens_by
from headrace.config import Section


class SequenceMeanTokenMean(Section):
    """1/S Σ_sequences (Σ_tokens x / tokens of the sequence). The samples of one rollout are one sequence.

    Source: Shao et al., arXiv 2402.03300, eq. 3.
    """

    kind: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"
    """Selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """The weight of every token and the mass of them all."""
        tokens_N, num_episodes = tokens_by(layout.episodes_S, layout)
        return Shares(weights_N=layout.mask_N.float() / tokens_N, mass=num_episodes)
