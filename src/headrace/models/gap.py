"""How far apart two ways of computing the same log-probabilities may be, and how far apart they are.

Rounding is all that may set an engine apart from the learner, or from transformers: of the number format in which
weights and activations are kept. What is more than that is a fault: another model, another weight, another rope, a term
of attention that is left out. Reads and computes without torch.

Shape legend: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float8": 0.25}
"""Largest mean |log μ − log π| in nats, at temperature 1, that comes of rounding to each format; docs/observing.md says
what was measured."""
REROUTED = 0.25
"""The same below float32 where a mixture of experts chooses them anew: rounding sends a token near a tie to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far apart two columns of log-probabilities are."""

    mean_abs: float
    """Mean |log μ − log π|; not a number where one of them is none."""
    kl: float
    """KL(μ‖π), estimator k3: mean of e^x − 1 − x with x = log π − log μ (Schulman, "Approximating KL divergence")."""
    worst: float
    """The largest |log μ − log π|."""
    at: int
    """The place of that token."""
    num_tokens: int

    @classmethod
    def between(cls, log_mu_N: npt.NDArray[np.floating], log_pi_N: npt.NDArray[np.floating]) -> Gap:
        """Compare two columns of at least one token.

        >>> gap = Gap.between(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]))
        >>> gap.mean_abs, gap.worst, gap.at
        (0.25, 0.5, 1)
        """
        difference_N = log_pi_N.astype(np.float64) - log_mu_N.astype(np.float64)
        x_N = np.clip(difference_N, -20, 20)
        apart_N = np.where(np.isnan(x_N), np.inf, np.abs(x_N))
        return cls(
            mean_abs=float(np.mean(np.abs(x_N))),
            kl=float(np.mean(np.expm1(x_N) - x_N)),
            worst=float(apart_N.max()),
            at=int(apart_N.argmax()),
            num_tokens=len(x_N),
        )

    def within(self, largest: float) -> bool:
        """Return whether the mean is at most ``largest``; what is no number is not."""
        return self.mean_abs <= largest


def largest_gap(*formats: str, rerouted: bool = False, temperature: float = 1.0) -> float:
    """Return the largest mean |log μ − log π| that rounding explains, where the two sides keep numbers in ``formats``.

    ``rerouted``: the model has experts, and each side chooses its own. The temperature divides logits, and their
    rounding with them.

    >>> largest_gap("float32"), largest_gap("float32", "bfloat16", temperature=0.5)
    (0.001, 0.2)
    """
    largest = max(ROUNDING[each] for each in formats)
    if rerouted and set(formats) != {"float32"}:
        largest = max(largest, REROUTED)
    return largest / min(1.0, temperature)
