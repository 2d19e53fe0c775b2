"""A statistical test of whether episodes of some lengths are trained more often than episodes of other lengths.

Long episodes end late, so a run that drops late episodes trains on shorter ones than it samples. The lengths of the
trained episodes are compared with the lengths of all decided episodes (episodes of groups that were trained or
dropped): by quantiles, and by the two-sample Kolmogorov–Smirnov test with its asymptotic distribution (Smirnov 1948).
The two samples of the test are the trained and the untrained episodes, because the trained episodes are a part of all
decided episodes. If n of N episodes are trained, the distance between the distributions of trained and untrained
lengths is N/(N − n) times the distance between trained and all lengths.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from headrace.flow.ledger.base import Lengths

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""The quantiles of the lengths that :func:`survivors` computes."""


class Survivors(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of the lengths, in sampled tokens, of all decided episodes (episodes of groups that were trained
    or dropped) and of the trained episodes, with the result of the test."""

    num_submitted: int
    """Number of decided episodes."""
    num_trained: int
    """Number of trained episodes."""
    num_withdrawn: int
    """Number of episodes that were cancelled before they ended. The other numbers do not include them."""
    quantiles: dict[str, tuple[float, float]]
    """Quantiles of the lengths: (all, trained), by the name of the quantile."""
    mean: tuple[float, float]
    """Mean lengths: (all, trained)."""
    ks: float
    """The largest distance between the distributions of all and of trained lengths, from 0 to 1."""
    p_value: float
    """The probability that the trained and the untrained episodes differ at least this much by chance if their lengths
    have one distribution."""

    @property
    def biased(self) -> bool:
        """Return whether the lengths of trained and untrained episodes differ significantly, at the level of 1%."""
        return self.p_value < 0.01


def survivors(lengths: Lengths) -> Survivors | None:
    """Return the comparison of the lengths of trained episodes with the lengths of all decided episodes; ``None`` if no
    episode has been trained.

    >>> found = survivors(Lengths(submitted=tuple(range(200)), trained=tuple(range(100))))
    >>> round(found.ks, 2), found.biased
    (0.5, True)
    """
    submitted, trained = np.array(lengths.submitted), np.array(lengths.trained)
    if not len(trained):
        return None
    points = np.union1d(submitted, trained)
    cdfs = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (submitted, trained)]
    distance = float(np.abs(cdfs[0] - cdfs[1]).max())
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
    """Return the probability that a value of the Kolmogorov distribution is greater than ``x``, which is the p-value of
    the test."""
    if x < 0.2:  # the series converges slowly there, to 1
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))
