"""The damping of the learning rate, for batches of old tokens: by their effective sample size, or by their age.

``ess``: the effective sample size (ESS) of the batch under the trained policy.

    ρ = ESS/B = (Σ w)² / (B·Σ w²),  w = π/μ         rate = schedule · min(1, ρ/``reference``)^``power``

Old tokens make the distribution of the ratios w heavy-tailed: few samples dominate the gradient, and its variance grows
as 1/ρ. The default power, a square root, is the usual scaling of AdamW's rate for a batch that is smaller by the factor
ρ. μ is the distribution that sampled each token. w is not truncated, independent of the loss and the corrections.

Source: VCPO, arXiv 2602.17616, eq. 5, where ``reference`` is the ρ of a batch of age 0. Here it is 1 by default, since
the ratios of such a batch are 1.

``age``: the mean age S of the batch's tokens with loss, in versions.

    S = mean(version of the learner − version of the token)         rate = schedule · min(1, ``reference``/S)^``power``

The bias of a step from rollouts of age S at the rate η is O(S·η) (arXiv 2607.01083). With the default power of 1, the
product S·η never exceeds ``reference`` times the rate of the schedule. The formula of the factor is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from headrace.base.config import Section

_METRICS = {"sequences": "ess_sequences", "tokens": "ess"}


class EssDamping(Section):
    """The settings of a learning rate that depends on the effective sample size of the batch."""

    kind: Literal["ess"] = "ess"
    """Selects this damping."""
    of: Literal["sequences", "tokens"] = "sequences"
    """Whether w is the ratio of a whole sequence, as in the paper, or of a single token. Ratios of long sequences are
    far from 1 for small differences of their tokens."""
    power: float = Field(default=0.5, gt=0)
    """The power of ρ by which the rate is multiplied."""
    reference: float = Field(default=1.0, gt=0, le=1)
    """The ρ that leaves the rate as it is, and so does every larger one."""

    def factor(self, metrics: Mapping[str, float]) -> float:
        """Return the factor, at most 1, by which the learning rate is multiplied for a batch with these metrics; 1 if
        they do not contain the effective sample size, because no ratios π/μ were computed.

        >>> EssDamping().factor({"ess_sequences": 0.25}), EssDamping(reference=0.5).factor({"ess_sequences": 0.6})
        (0.5, 1.0)
        """
        ess_ratio = metrics.get(_METRICS[self.of])
        return 1.0 if ess_ratio is None else math.pow(min(1.0, ess_ratio / self.reference), self.power)


class AgeDamping(Section):
    """The settings of a learning rate that depends on the mean age of the batch's tokens."""

    kind: Literal["age"] = "age"
    """Selects this damping."""
    power: float = Field(default=1.0, gt=0)
    """The power of ``reference`` / mean age by which the rate is multiplied. 1 bounds the product of age and rate."""
    reference: float = Field(default=4.0, gt=0)
    """The mean age in versions that leaves the rate as it is, and so does every smaller one."""

    def factor(self, metrics: Mapping[str, float]) -> float:
        """Return the factor, at most 1, by which the learning rate is multiplied for a batch with these metrics.

        >>> AgeDamping().factor({"age_mean": 8.0}), AgeDamping(power=0.5).factor({"age_mean": 8.0})
        (0.5, 0.707...)
        """
        age = metrics["age_mean"]
        return 1.0 if age <= self.reference else math.pow(self.reference / age, self.power)


DampingConfig = Annotated[EssDamping | AgeDamping, Field(discriminator="kind")]
"""The settings of a damping of the learning rate."""
