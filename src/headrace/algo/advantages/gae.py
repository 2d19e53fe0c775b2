"""GAE: each token against what a critic expected before it was sampled."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, Scope, divided, given, moments
from headrace.algo.advantages.outcomes import Bools, Floats, Outcomes
from headrace.algo.returns import gae


class Estimate(NamedTuple):
    """What a critic's values come to; 0 for the tokens of an episode that does not count."""

    advantages_N: Floats
    returns_N: Floats
    """Advantage + value: what the critic learns."""
    outcomes_N: Floats
    """γ^k·R, k tokens before the last: what was really earned from here on."""


class GaeAdvantage(AdvantageSection):
    """A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t over the tokens of an episode that carry loss; r is R at
    the last of them, else 0; V_t is a critic's value of what stands before the token, 0 after the last.

    With ``normalize``, (A − mean)/(std + ε) over the tokens of the batch; std with denominator n. The group is no
    baseline: a group of one is credited like any other. Needs ``values``; in a run they are those of the learner's
    critic (``[learner.critic]``).
    Source: Schulman et al., arXiv 1506.02438, eq. 16.
    """

    kind: Literal["gae"] = "gae"
    """Selects this advantage."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """γ: what a reward one token later is worth."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 trusts rewards alone, less trusts the critic's values between: less variance, more bias."""
    normalize: bool = True
    """Whether advantages are brought to mean 0 and deviation 1 over the tokens of the batch."""
    eps: float = Field(default=1e-8, ge=0)
    """ε: added to the standard deviation."""
    scope: ClassVar[Scope] = "batch"
    per_token: ClassVar[bool] = True
    by_critic: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"lengths", "values"})

    @property
    def compares_siblings(self) -> bool:
        """The critic is the baseline."""
        return False

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every token."""
        return self.scaled(self.estimate(outcomes).advantages_N, outcomes.counted_E[outcomes.owners_N])

    def estimate(self, outcomes: Outcomes) -> Estimate:
        """Advantages before they are normalised, each episode by itself, and what the critic learns from it."""
        values_N, lengths_E = given(outcomes.values_N, "values"), given(outcomes.lengths_E, "lengths")
        places_T = np.arange(lengths_E.max(initial=0))
        inside_ET = (places_T < lengths_E[:, None]) & outcomes.counted_E[:, None]
        counted_N = outcomes.counted_E[outcomes.owners_N]
        rewards_ET = (places_T == lengths_E[:, None] - 1) * outcomes.values_E[:, None]
        values_ET = np.zeros(inside_ET.shape)
        values_ET[inside_ET] = values_N[counted_N]
        columns = [
            *gae(rewards_ET, values_ET, inside_ET, self.gamma, self.lam),
            gae(rewards_ET, np.zeros(inside_ET.shape), inside_ET, self.gamma, 1.0).returns,
        ]
        flat = np.zeros((3, len(values_N)))
        flat[:, counted_N] = [column.numpy()[inside_ET] for column in columns]
        return Estimate(*flat)

    def scaled(self, advantages_N: Floats, counted_N: Bools) -> Floats:
        """As ``normalize`` says, over all tokens of a batch that count; 0 for the others."""
        if not self.normalize:
            return advantages_N * counted_N
        mean, std = moments(advantages_N, counted_N.astype(np.float64))
        scale_N = np.full(len(advantages_N), std + self.eps if std > 0 else 0.0)
        return divided((advantages_N - mean) * counted_N, scale_N) + 0.0
