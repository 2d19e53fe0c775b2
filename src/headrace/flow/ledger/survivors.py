"""Whether some lengths survive until training more often than others.

What is thrown away for being late is long. The lengths of the episodes that were trained are held against those of all
whose fate is decided: by quantiles, and by the two-sample Kolmogorov–Smirnov test with its asymptotic distribution
(Smirnov 1948). The trained ones are among the others, so they are not two samples; the trained and the untrained ones
are. Of n trained among N, the distance from the trained to the untrained is that to all, over (N − n)/N.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from headrace.flow.ledger.base import Lengths

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class Survivors(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in sampled tokens, of episodes whose fate is decided and of those that were trained."""

    num_submitted: int
    num_trained: int
    num_withdrawn: int
    """Those that were withdrawn before they had ended are in none of the figures."""
    quantiles: dict[str, tuple[float, float]]
    """Submitted and trained, by quantile."""
    mean: tuple[float, float]
    """Submitted and trained."""
    ks: float
    """The largest distance between the two distributions, from 0 to 1."""
    p_value: float
    """How often the trained and the untrained would be that far apart by chance, had they one distribution."""

    @property
    def biased(self) -> bool:
        """Whether chance is no explanation."""
        return self.p_value < 0.01


def survivors(lengths: Lengths) -> Survivors | None:
    """The comparison; ``None`` where nothing has been trained.

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
    """P(K > x) of Kolmogorov's distribution."""
    if x < 0.2:  # the series converges slowly there, to 1
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))
