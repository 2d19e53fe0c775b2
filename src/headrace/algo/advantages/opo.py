"""OPO: the baseline of least variance, if a gradient's norm grows with its length."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from headrace.algo.advantages.base import AdvantageSection, centered, given
from headrace.algo.advantages.outcomes import Floats, Outcomes


class Opo(AdvantageSection):
    """R − Σ(length·R)/Σ(length) over the group. Needs ``lengths``.

    Source: Hao et al., arXiv 2505.23585, eq. 7.
    """

    kind: Literal["opo"] = "opo"
    """Selects this advantage."""
    reads: ClassVar[frozenset[str]] = frozenset({"lengths"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        return centered(outcomes, given(outcomes.lengths_E, "lengths").astype(np.float64))
