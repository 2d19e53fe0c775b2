"""MaxRL: the rarer a success, the more it counts."""

from __future__ import annotations

from typing import Literal

import numpy as np

from headrace.algo.advantages.base import AdvantageSection, centered, divided
from headrace.algo.advantages.outcomes import Floats, Outcomes


class Maxrl(AdvantageSection):
    """(R − mean) / mean over the group; 0 for a group whose mean is not above 0. Rewards are meant to be 0 or positive.

    Source: MaxRL, arXiv 2602.02710: the gradient of log success probability to first order.
    """

    kind: Literal["maxrl"] = "maxrl"
    """Selects this advantage."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        difference_E = centered(outcomes)
        mean_E = outcomes.values_E - difference_E
        return divided(difference_E, np.where(outcomes.counted_E & (mean_E > 0), mean_E, 0.0))
