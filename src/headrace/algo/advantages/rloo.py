"""RLOO: the others of the group are the baseline."""

from __future__ import annotations

from typing import Literal

from headrace.algo.advantages.base import AdvantageSection, leave_one_out
from headrace.algo.advantages.outcomes import Floats, Outcomes


class Rloo(AdvantageSection):
    """R − mean of the other rewards of the group.

    Source: Kool et al. (2019); Ahmadian et al., arXiv 2402.14740, eq. 8.
    """

    kind: Literal["rloo"] = "rloo"
    """Selects this advantage."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        return leave_one_out(outcomes.values_E, outcomes.counted_E, outcomes.groups_E)
