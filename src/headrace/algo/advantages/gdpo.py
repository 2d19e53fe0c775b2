"""GDPO: each reward of a sum is normalised by itself, so that none drowns another."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, Scope, divided, moments
from headrace.algo.advantages.grpo import GrpoAdvantage
from headrace.algo.advantages.outcomes import Floats, Outcomes
from headrace.errors import DataError


class Gdpo(AdvantageSection):
    """Σ_k w_k·(R_k − mean_k)/(std_k + ε) over the group, n − 1 in the denominator, then whitened over the batch:
    mean 0, standard deviation 1 with n in the denominator.

    Source: Liu et al., arXiv 2601.05242, eq. 4–7. A single reward is one part.
    """

    kind: Literal["gdpo"] = "gdpo"
    """Selects this advantage."""
    weights: tuple[float, ...] | None = None
    """w: weight of each reward, in the order in which they are given; unset: all 1."""
    eps: float = Field(default=1e-6, ge=0)
    """ε: added to every standard deviation."""
    scope: ClassVar[Scope] = "batch"

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        parts_EK = outcomes.rewards_E[:, None] if outcomes.parts_EK is None else outcomes.parts_EK
        weights = self.weights or (1.0,) * parts_EK.shape[1]
        if len(weights) != parts_EK.shape[1]:
            raise DataError(
                f"gdpo has {len(weights)} weights for {parts_EK.shape[1]} rewards", remedy="give one weight per reward"
            )
        single = GrpoAdvantage(std="ddof1", eps=self.eps)
        counted_KE = np.where(outcomes.counted_E, parts_EK.T, np.nan)
        columns = [single(replace(outcomes, rewards_E=column_E, parts_EK=None)) for column_E in counted_KE]
        summed_E = sum((w * column_E for w, column_E in zip(weights, columns, strict=True)), np.zeros(len(parts_EK)))
        mean, std = moments(summed_E, outcomes.counted_E.astype(np.float64))
        return divided(
            (summed_E - mean) * outcomes.counted_E, np.full(len(summed_E), std + self.eps if std > 0 else 0.0)
        )
