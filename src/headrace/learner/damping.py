"""The damping of the learning rate, for batches whose effective sample size (ESS) under the trained policy is small.

    ρ = ESS/B = (Σ w)² / (B·Σ w²),  w = π/μ         rate = schedule · min(1, ρ/``reference``)^``power``

Old tokens make the distribution of the ratios w heavy-tailed: few samples dominate the gradient, and its variance grows
as 1/ρ. The default power, a square root, is the usual scaling of AdamW's rate for a batch that is smaller by the factor
ρ. μ is the distribution that sampled each token. w is not truncated, independent of the loss and the corrections.

Source: VCPO, arXiv 2602.17616, eq. 5, where ``reference`` is the ρ of a batch of age 0. Here it is 1 by default, since
the ratios of such a batch are 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

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
