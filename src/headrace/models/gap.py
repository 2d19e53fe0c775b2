"""The gap between two computations of the same log-probabilities, and the largest gap that rounding can cause.

Engine, learner and transformers may differ only by rounding, which depends on the number formats of weights and
activations. A larger difference is an error: another model, another weight, another rotary embedding, a missing term of
attention. This module does not import torch.

Shape legend: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float8": 0.25}
"""The largest mean |log μ − log π| in nats, at temperature 1, that rounding to each format causes. docs/observing.md
contains the measurements."""
REROUTED = 0.25
"""The limit of the gap in formats below float32 for a mixture of experts in which both sides route independently: there
rounding sends a token with nearly equal router scores to other experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The difference between two columns of log-probabilities for the same tokens."""

    mean_abs: float
    """The mean |log μ − log π|; NaN if any difference is NaN."""
    kl: float
    """KL(μ‖π), estimator k3: mean of e^x − 1 − x with x = log π − log μ (Schulman, "Approximating KL divergence")."""
    worst: float
    """The largest |log μ − log π|."""
    worst_index: int
    """The index of the token with the largest difference."""
    num_tokens: int
    """The number of tokens that were compared."""

    @classmethod
    def between(cls, log_mu_N: npt.NDArray[np.floating], log_pi_N: npt.NDArray[np.floating]) -> Gap:
        """Return the gap between two columns of at least one token.

        >>> gap = Gap.between(np.array([-1.0, -2.0]), np.array([-1.0, -2.5]))
        >>> gap.mean_abs, gap.worst, gap.worst_index
        (0.25, 0.5, 1)
        """
        difference_N = log_pi_N.astype(np.float64) - log_mu_N.astype(np.float64)
        x_N = np.clip(difference_N, -20, 20)
        absolute_N = np.where(np.isnan(x_N), np.inf, np.abs(x_N))  # a NaN counts as the largest difference
        return cls(
            mean_abs=float(np.mean(np.abs(x_N))),
            kl=float(np.mean(np.expm1(x_N) - x_N)),
            worst=float(absolute_N.max()),
            worst_index=int(absolute_N.argmax()),
            num_tokens=len(x_N),
        )

    def within(self, largest: float) -> bool:
        """Return whether the mean difference is at most ``largest``, in nats; false if it is NaN."""
        return self.mean_abs <= largest


def largest_gap(*formats: str, rerouted: bool = False, temperature: float = 1.0) -> float:
    """Return the largest mean |log μ − log π| that rounding can cause if the two sides compute in ``formats``.

    With ``rerouted``, the model has experts and each side chooses them independently. The temperature divides logits
    and their rounding errors.

    >>> largest_gap("float32"), largest_gap("float32", "bfloat16", temperature=0.5)
    (0.001, 0.2)
    """
    largest = max(ROUNDING[each] for each in formats)
    if rerouted and set(formats) != {"float32"}:
        largest = max(largest, REROUTED)
    return largest / min(1.0, temperature)
