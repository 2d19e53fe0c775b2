"""ReMax: the greedy answer is the baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from headrace.algo.advantages.base import AdvantageSection, given
from headrace.algo.advantages.outcomes import Floats, Outcomes


class Remax(AdvantageSection):
    """R − R_greedy of the same task; needs ``greedy``. A group of one is defined.

    Source: Li et al., arXiv 2310.10505, eq. 6.
    """

    kind: Literal["remax"] = "remax"
    """Selects this advantage."""
    reads: ClassVar[frozenset[str]] = frozenset({"greedy"})

    @property
    def compares_siblings(self) -> bool:
        """The greedy answer is the baseline."""
        return False

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        greedy_E = given(outcomes.greedy_E, "greedy")
        return np.where(outcomes.counted_E & ~np.isnan(greedy_E), outcomes.values_E - np.nan_to_num(greedy_E), 0.0)
