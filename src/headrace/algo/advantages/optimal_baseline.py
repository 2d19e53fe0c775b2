"""The optimal token baseline: at each position, the mean weighted by how much gradient has flowed so far."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from headrace.algo.advantages.base import AdvantageSection, divided, given, joint, total, without_rounding
from headrace.algo.advantages.outcomes import Floats, Outcomes


class OptimalBaseline(AdvantageSection):
    """R_i − B_t, B_t = Σ_j W_{j,t}·R_j / Σ_j W_{j,t} over the group's answers that reach t.

    W_{j,t} = Σ_{s≤t} ‖∇ log π_s‖²: needs ``energies``, the squared norm of each token or its proxy 1 − 2π + Σπ². An
    answer that is alone at t has credit 0 there.
    Source: "Optimal token baseline", arXiv 2602.07078; Greensmith et al. (2004) for the optimal baseline.
    """

    kind: Literal["optimal_baseline"] = "optimal_baseline"
    """Selects this advantage."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"energies"})

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every token."""
        energies_N = given(outcomes.energies_N, "energies")
        lengths_E = given(outcomes.lengths_E, "lengths")
        starts_N = np.repeat(np.cumsum(lengths_E) - lengths_E, lengths_E)
        owners_N = outcomes.owners_N
        sums_N = np.cumsum(energies_N)
        weights_N = sums_N - (sums_N - energies_N)[starts_N] if len(sums_N) else sums_N
        weights_N = weights_N * outcomes.counted_E[owners_N]
        places_N = np.arange(len(owners_N)) - starts_N
        keys_N = joint(outcomes.groups_E[owners_N], places_N)
        values_N = outcomes.values_E[owners_N]
        mass_N = total(weights_N, keys_N)
        baseline_N = np.where(mass_N > 0, divided(total(weights_N * values_N, keys_N), mass_N), values_N)
        return without_rounding((values_N - baseline_N) * outcomes.counted_E[owners_N], values_N)
