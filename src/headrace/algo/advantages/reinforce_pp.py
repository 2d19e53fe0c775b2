"""REINFORCE++: one baseline for the whole batch, not one per prompt."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, Scope, centered, divided, moments, total
from headrace.algo.advantages.outcomes import Floats, Outcomes


class ReinforcePp(AdvantageSection):
    """(R − mean)/(std + ε) over the tokens of the batch that carry loss: an episode weighs by its length; std with
    denominator n. A group of one is credited like any other, as the batch is the baseline.

    With ``group_baseline``, R less its group's mean takes the place of R; a group of one has nothing to compare with
    then, is left out of mean and std, and has credit 0. Observation tokens carry no loss and are not counted; without
    lengths every episode weighs the same.
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

    @property
    def compares_siblings(self) -> bool:
        """Only with ``group_baseline``."""
        return self.group_baseline

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        credit_E, counted_E = outcomes.values_E, outcomes.counted_E
        if self.group_baseline:
            counted_E = counted_E & (total(counted_E.astype(np.float64), outcomes.groups_E) > 1)
            credit_E = centered(outcomes)
        lengths_E = np.ones(len(credit_E)) if outcomes.lengths_E is None else outcomes.lengths_E.astype(np.float64)
        mean, std = moments(credit_E, counted_E * lengths_E)
        difference_E = (credit_E - mean) * counted_E
        return divided(difference_E, np.full(len(credit_E), std + self.eps if std > 0 else 0.0)) + 0.0
