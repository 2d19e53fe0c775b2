"""GRPO's group-relative advantage, with its three free choices spelled out."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, centered, divided, total
from headrace.algo.advantages.outcomes import Floats, Outcomes

DDOF = {"ddof0": 0, "ddof1": 1}


class GrpoAdvantage(AdvantageSection):
    """(R − mean) / (std + ε) over the group; ``std = "none"`` leaves the difference alone.

    Source: Shao et al., arXiv 2402.03300, eq. 1; without std: Liu et al. (Dr. GRPO), arXiv 2503.20783, eq. 2.
    """

    kind: Literal["grpo"] = "grpo"
    """Selects this advantage."""
    std: Literal["none", "ddof0", "ddof1"] = "ddof1"
    """Divisor: none, or the group's standard deviation with denominator n − 0 or n − 1."""
    eps: float = Field(default=1e-6, ge=0)
    """ε: added to the standard deviation."""
    leave_one_out: bool = False
    """Subtract the mean of the other episodes instead; the standard deviation stays that of the whole group."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        difference_E = centered(outcomes)
        num_E = total(outcomes.counted_E.astype(np.float64), outcomes.groups_E)
        credit_E = difference_E
        if self.leave_one_out:
            credit_E = divided(difference_E * num_E, np.maximum(num_E - 1, 0))
        if self.std == "none":
            return credit_E
        squares_E = total(difference_E**2, outcomes.groups_E)
        std_E = np.sqrt(divided(squares_E, np.maximum(num_E - DDOF[self.std], 0)))
        return divided(credit_E, np.where(std_E > 0, std_E + self.eps, 0.0))
