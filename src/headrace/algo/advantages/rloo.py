"""RLOO: the others of the group are the baseline."""

from __future__ import annotations

from typing import Literal

from headrace.algo.advantages.base import AdvantageSection, leave_one_out
from headrace.algo.advantages.scores import Floats, Scores


class Rloo(AdvantageSection):
    """R − mean of the other rewards of the group.

    Source: Kool et al. (2019); Ahmadian et al., arXiv 2402.14740, eq. 8.
    """

    kind: Literal["rloo"] = "rloo"
    """Selects this advantage."""

    def __call__(self, scores: Scores) -> Floats:
        """The credit of every episode."""
        return leave_one_out(scores.values_E, scores.counted_E, scores.groups_E)
