"""PRPO: process rewards by segment, moved to where the outcome says that the answer belongs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, divided, given, joint, total, without_rounding
from headrace.algo.advantages.grpo import GrpoAdvantage
from headrace.algo.advantages.outcomes import Floats, Ints, Outcomes


class Prpo(AdvantageSection):
    """A_outcome + ω·(p − mean of p over the episode)/(std of p over the group + ε); std of p with denominator n.

    p is the mean process reward of a token's segment; segments begin at the K tokens of highest entropy that are at
    least m apart. So the mean over an episode's tokens is its outcome advantage (R − mean)/(std + ε), with
    n − 1 in that std. Needs ``process``, and ``entropies`` or ``segments``. In a run every segment of a turn is graded
    by the components of ``env.rewards`` with ``by_turn``, which do not count in R; the engine records the entropies.
    Source: Ding et al., arXiv 2601.07182.
    """

    kind: Literal["prpo"] = "prpo"
    """Selects this advantage."""
    spikes: int = Field(default=8, ge=0)
    """K: how many entropy spikes may split an answer; in a run, each turn of it."""
    gap: int = Field(default=16, ge=1)
    """m: tokens that two spikes are apart at least."""
    weight: float = Field(default=1.0, ge=0)
    """ω: weight of the process credit."""
    eps: float = Field(default=1e-6, ge=0)
    """ε: added to standard deviations."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"process", "entropies", "segments"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every token."""
        process_N, owners_N = given(outcomes.process_N, "process"), outcomes.owners_N
        segments_N = self._segments(outcomes) if outcomes.segments_N is None else outcomes.segments_N
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

    def starts(self, entropies_T: npt.NDArray[np.floating[Any]]) -> list[int]:
        """Where the segments of one answer begin, the first one aside."""
        return [place for place in spikes(entropies_T, most=self.spikes, gap=self.gap) if place > 0]

    def _segments(self, outcomes: Outcomes) -> Ints:
        """The number of each token's segment within its episode."""
        entropies_N, lengths_E = given(outcomes.entropies_N, "entropies"), given(outcomes.lengths_E, "lengths")
        begins_N = np.zeros(len(entropies_N), np.int64)
        for end, length in zip(np.cumsum(lengths_E), lengths_E, strict=True):
            begins_N[end - length :][self.starts(entropies_N[end - length : end])] = 1
        return np.cumsum(begins_N)


def spikes(entropies_T: npt.NDArray[np.floating[Any]], *, most: int, gap: int) -> list[int]:
    """The places of the highest entropies, at least ``gap`` apart, in their order; of equal ones the first.

    >>> spikes(np.array([0.1, 2.0, 1.9, 0.3, 1.5]), most=2, gap=2)
    [1, 4]
    """
    found: list[int] = []
    for place in np.argsort(-entropies_T, kind="stable").tolist():
        if len(found) == most:
            break
        if all(abs(place - other) >= gap for other in found):
            found.append(place)
    return sorted(found)
