"""What one step says of itself, in numbers.

Shape legend: L tokens that carried loss, over the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.types.tokens import FloatColumn

Ages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Columns over the tokens that carried loss."""

    log_pi_L: FloatColumn
    log_mu_L: FloatColumn
    entropy_L: FloatColumn
    """Of the learner's distribution that each token is scored under, in nats."""
    ages_L: Ages
    """Version of the learner − version of the token."""


def step_metrics(stats: TokenStats) -> dict[str, float]:
    """Entropy, ages, log(π/μ) over all tokens, and over those of age 0 alone: there it is nothing but the mismatch of
    engine and learner, while staleness comes on top for the others.

    ``mismatch_kl`` estimates KL(μ‖π) as the mean of eˣ − 1 − x with x = log(π/μ) (Schulman 2020, "k3"); ``ess`` is the
    effective sample size (Σw)²/(LΣw²) of the weights w = π/μ, in (0, 1]. The two mismatch metrics are missing where no
    token is of age 0.

    >>> column = np.array([-1.0, -2.0], np.float32)
    >>> stats = TokenStats(log_pi_L=column, log_mu_L=column, entropy_L=-column, ages_L=np.array([0, 1]))
    >>> metrics = step_metrics(stats)
    >>> metrics["ess"], metrics["mismatch_kl"], metrics["age_mean"], metrics["entropy"]
    (1.0, 0.0, 0.5, 1.5)
    """
    log_ratio = stats.log_pi_L.astype(np.float64) - stats.log_mu_L
    weights = np.exp(np.clip(log_ratio, -20, 20))
    metrics = {
        "entropy": float(stats.entropy_L.mean(dtype=np.float64)),
        "log_ratio_mean": float(log_ratio.mean()),
        "log_ratio_abs_max": float(np.abs(log_ratio).max()),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "age_mean": float(stats.ages_L.mean()),
        "age_max": float(stats.ages_L.max()),
    }
    fresh = stats.ages_L == 0
    if fresh.any():
        metrics["mismatch_kl"] = float((weights[fresh] - 1 - np.log(weights[fresh])).mean())
        metrics["mismatch_abs"] = float(np.abs(log_ratio[fresh]).mean())
    return metrics
