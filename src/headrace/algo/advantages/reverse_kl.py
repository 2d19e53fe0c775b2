"""On-policy distillation: what the teacher thinks of each sampled token."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, centered, given
from headrace.algo.advantages.outcomes import Floats, Outcomes


class ReverseKl(AdvantageSection):
    """β·(log ν − log μ) per token, + ω·(R − mean) of the group; ν is the teacher that the episode's key chose.

    The teacher's part looks at no reward: it is there for a group of one and for a reward that does not count, where
    the reward's part is 0. The expectation over samples of μ is −KL(μ‖ν). Needs ``log_nu`` and ``log_mu``.
    Source: Agarwal et al. (GKD), arXiv 2306.13649; Lu (2025), "On-policy distillation".
    """

    kind: Literal["reverse_kl"] = "reverse_kl"
    """Selects this advantage."""
    beta: float = Field(default=1.0, ge=0)
    """β: weight of the teacher."""
    weight: float = Field(default=0.0, ge=0)
    """ω: weight of the reward; 0 leaves rewards out altogether."""
    per_token: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"log_mu", "log_nu"})
    by_teacher: ClassVar[bool] = True

    @property
    def compares_siblings(self) -> bool:
        """Only where rewards count."""
        return self.weight > 0

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every token."""
        credit_N = self.of_tokens(given(outcomes.log_nu_N, "log_nu") - given(outcomes.log_mu_N, "log_mu"))
        return credit_N + self.of_rewards(outcomes)[outcomes.owners_N] if self.weight else credit_N

    def of_tokens(self, gap_N: Floats) -> Floats:
        """The teacher's part, from log ν − log μ of every token."""
        return self.beta * np.nan_to_num(np.clip(gap_N, -20.0, 20.0))

    def of_rewards(self, outcomes: Outcomes) -> Floats:
        """The reward's part, of every episode."""
        return self.weight * centered(outcomes)
