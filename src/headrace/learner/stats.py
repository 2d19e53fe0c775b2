"""What one step says of itself, in numbers.

Shape legend: L tokens that carried loss, over the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.tokens import FloatColumn, IntColumn

Ages = npt.NDArray[np.int64]


class TokenStats(msgspec.Struct, frozen=True, kw_only=True):
    """Columns over the tokens that carried loss."""

    log_pi_L: FloatColumn
    log_mu_L: FloatColumn
    ages_L: Ages
    """Version of the learner − version of the token."""
    places_L: IntColumn
    """Where each lies among the tokens of the batch."""

    @classmethod
    def concat(cls, parts: Sequence[TokenStats]) -> TokenStats:
        """The tokens of the parts, one after the other; at least one part."""
        return cls(
            log_pi_L=np.concatenate([part.log_pi_L for part in parts]),
            log_mu_L=np.concatenate([part.log_mu_L for part in parts]),
            ages_L=np.concatenate([part.ages_L for part in parts]),
            places_L=np.concatenate([part.places_L for part in parts]),
        )

    @classmethod
    def none(cls) -> TokenStats:
        """Of no token."""
        nothing = np.zeros(0, np.float32)
        return cls(log_pi_L=nothing, log_mu_L=nothing, ages_L=np.zeros(0, np.int64), places_L=np.zeros(0, np.int32))

    def log_pi_of(self, num_tokens: int) -> FloatColumn:
        """log π for each of the batch's ``num_tokens``; NaN for those that carried no loss."""
        log_pi_N = np.full(num_tokens, np.nan, np.float32)
        log_pi_N[self.places_L] = self.log_pi_L
        return log_pi_N


def step_metrics(stats: TokenStats) -> dict[str, float]:
    """Ages, and how far log π and log μ are apart: at most over all tokens, and on average over those of age
    0, where nothing but the mismatch of engine and learner sets them apart (staleness comes on top for the others).

    ``mismatch_kl`` estimates KL(μ‖π) as the mean of eˣ − 1 − x with x = log(π/μ), clamped to ±20 (Schulman 2020,
    "k3"); ``mismatch_abs`` is the mean of |x|. Both are missing where no token is of age 0.

    >>> log_pi, log_mu = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -4.0], np.float32)
    >>> stats = TokenStats(log_pi_L=log_pi, log_mu_L=log_mu, ages_L=np.array([0, 3]), places_L=np.array([0, 1]))
    >>> {name: round(value, 4) for name, value in step_metrics(stats).items()}
    {'age_mean': 1.5, 'age_max': 3.0, 'log_ratio_abs_max': 2.0, 'mismatch_kl': 0.1487, 'mismatch_abs': 0.5}
    """
    log_ratio = stats.log_pi_L.astype(np.float64) - stats.log_mu_L
    metrics = {
        "age_mean": float(stats.ages_L.mean()),
        "age_max": float(stats.ages_L.max()),
        "log_ratio_abs_max": float(np.abs(log_ratio).max()),
    }
    fresh = log_ratio[stats.ages_L == 0]
    if len(fresh):
        clamped = fresh.clip(-20, 20)
        metrics["mismatch_kl"] = float((np.expm1(clamped) - clamped).mean())
        metrics["mismatch_abs"] = float(np.abs(fresh).mean())
    return metrics
