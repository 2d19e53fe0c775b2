"""A test whether episodes of some lengths are trained more often than others.

Episodes that are dropped because they are late are long. The lengths of the trained episodes are compared with those of
all episodes of groups that were trained or dropped: by quantiles, and by the two-sample Kolmogorov–Smirnov test with
its asymptotic distribution (Smirnov 1948). The trained episodes are part of all episodes, so these are not two samples;
the trained and the untrained ones are. With n trained of N, the distance between the trained and the untrained is the
distance between the trained and all, times N/(N − n).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from headrace.flow.ledger.base import Lengths

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class Survivors(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths, in sampled tokens, of all decided episodes (those of groups that were trained or dropped) and of the
    trained ones, and the result of the test."""

    num_submitted: int
    """Number of decided episodes."""
    num_trained: int
    """Number of trained episodes."""
    num_withdrawn: int
    """Number of episodes that were cancelled before they ended; they are in none of the other numbers."""
    quantiles: dict[str, tuple[float, float]]
    """Quantiles of the lengths: (all, trained), by the name of the quantile."""
    mean: tuple[float, float]
    """Mean lengths: (all, trained)."""
    ks: float
    """The largest distance between the two distributions, from 0 to 1."""
    p_value: float
    """The probability that the trained and the untrained episodes differ at least this much by chance if their lengths
    have one distribution."""

    @property
    def biased(self) -> bool:
        """Return whether the difference is significant, at the level of 1%."""
        return self.p_value < 0.01


def survivors(lengths: Lengths) -> Survivors | None:
    """Return the comparison of the lengths of trained episodes with those of all decided ones; ``None`` if nothing has
    been trained.

    >>> found = survivors(Lengths(submitted=tuple(range(200)), trained=tuple(range(100))))
    >>> round(found.ks, 2), found.biased
    (0.5, True)
    """
    submitted, trained = np.array(lengths.submitted), np.array(lengths.trained)
    if not len(trained):
        return None
    at = np.union1d(submitted, trained)
    below = [np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (submitted, trained)]
    distance = float(np.abs(below[0] - below[1]).max())
    untrained = len(submitted) - len(trained)
    return Survivors(
        num_submitted=len(submitted),
        num_trained=len(trained),
        num_withdrawn=lengths.num_withdrawn,
        quantiles={
            f"{q:g}": (float(np.quantile(submitted, q)), float(np.quantile(trained, q))) for q in QUANTILES
        },
        mean=(float(submitted.mean()), float(trained.mean())),
        ks=distance,
        p_value=_kolmogorov(distance * math.sqrt(len(submitted) * len(trained) / untrained)) if untrained else 1.0,
    )  # fmt: skip


def _kolmogorov(x: float) -> float:
    """Return the probability that a value of Kolmogorov's distribution is greater than ``x``: the p-value of the
    test."""
    if x < 0.2:  # the series converges slowly there, to 1
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))
