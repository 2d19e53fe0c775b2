"""PRPO: process rewards by segment, moved to where the outcome says that the answer belongs."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, divided, given, joint, total, without_rounding
from headrace.algo.advantages.grpo import GrpoAdvantage
from headrace.algo.advantages.outcomes import Floats, Ints, Outcomes


class Prpo(AdvantageSection):
    """A_outcome + ω·(p − mean of p over the episode)/(std of p over the group + ε); std of p with denominator n.

    p is the mean process reward of a token's segment; segments begin at the K tokens of highest entropy that are at
    least m apart. So the mean over an episode's tokens is its outcome advantage (R − mean)/(std + ε), with
    n − 1 in that std. Needs ``process`` and ``entropies``. Source: Ding et al., arXiv 2601.07182.
    """

    kind: Literal["prpo"] = "prpo"
    """Selects this advantage."""
    spikes: int = Field(default=8, ge=0)
    """K: how many entropy spikes may split an answer."""
    gap: int = Field(default=16, ge=1)
    """m: tokens that two spikes are apart at least."""
    weight: float = Field(default=1.0, ge=0)
    """ω: weight of the process credit."""
    eps: float = Field(default=1e-6, ge=0)
    """ε: added to standard deviations."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"process", "entropies"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every token."""
        process_N, entropies_N = given(outcomes.process_N, "process"), given(outcomes.entropies_N, "entropies")
        owners_N, lengths_E = outcomes.owners_N, given(outcomes.lengths_E, "lengths")
        segments_N = owners_N.copy()
        for end, length in zip(np.cumsum(lengths_E), lengths_E, strict=True):
            segments_N[end - length : end] = self._segments(entropies_N[end - length : end])
        keys_N = joint(owners_N, segments_N)
        ones_N = np.ones(len(owners_N))
        p_N = total(process_N, keys_N) / total(ones_N, keys_N)
        shift_N = without_rounding(p_N - total(p_N, owners_N) / total(ones_N, owners_N), p_N)
        groups_N = outcomes.groups_E[owners_N]
        spread_N = without_rounding(p_N - total(p_N, groups_N) / total(ones_N, groups_N), p_N)
        std_N = np.sqrt(total(spread_N**2, groups_N) / total(ones_N, groups_N))
        outcome_E = GrpoAdvantage(std="ddof1", eps=self.eps)(outcomes)
        credit_N = outcome_E[owners_N] + self.weight * divided(shift_N, np.where(std_N > 0, std_N + self.eps, 0.0))
        return credit_N * outcomes.counted_E[owners_N]

    def _segments(self, entropies_T: Floats) -> Ints:
        """The number of each token's segment within its episode."""
        spikes: list[int] = []
        for place in np.argsort(-entropies_T, kind="stable").tolist():
            if len(spikes) == self.spikes:
                break
            if all(abs(place - other) >= self.gap for other in spikes):
                spikes.append(place)
        starts_T = np.zeros(len(entropies_T), np.int64)
        starts_T[spikes] = 1
        return np.cumsum(starts_T)
