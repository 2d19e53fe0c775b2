"""REINFORCE++: one baseline for the whole batch, not one per prompt."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, Scope, centered, divided, moments
from headrace.algo.advantages.scores import Floats, Scores


class ReinforcePp(AdvantageSection):
    """(R − mean)/(std + ε) over the tokens of the batch that carry loss: an episode weighs by its length.

    Observation tokens carry none and are not counted; without lengths every episode weighs the same.
    Source: Hu et al., arXiv 2501.03262, eq. 8 and 9.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    """Selects this advantage."""
    group_baseline: bool = False
    """Subtract the group's mean first (REINFORCE++-baseline)."""
    eps: float = Field(default=1e-8, ge=0)
    """ε: added to the standard deviation."""
    scope: ClassVar[Scope] = "batch"
    reads: ClassVar[frozenset[str]] = frozenset({"lengths"})

    def __call__(self, scores: Scores) -> Floats:
        """The credit of every episode."""
        credit_E = centered(scores) if self.group_baseline else scores.values_E
        lengths_E = np.ones(len(credit_E)) if scores.lengths_E is None else scores.lengths_E.astype(np.float64)
        mean, std = moments(credit_E, scores.counted_E * lengths_E)
        difference_E = (credit_E - mean) * scores.counted_E
        return divided(difference_E, np.full(len(credit_E), std + self.eps if std > 0 else 0.0))
