"""Random lengths of fake completions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def lognormal_lengths(mean: float, cv: float, cap: int) -> Callable[[int], int]:
    """Return a function from a seed to a length: lognormal with this mean and coefficient of variation, from 1 to
    ``cap`` tokens.

    >>> length = lognormal_lengths(mean=100, cv=1.0, cap=1000)
    >>> length(7) == length(7)
    True
    """
    sigma = float(np.sqrt(np.log1p(cv**2)))
    mu = float(np.log(mean)) - sigma**2 / 2

    def length(seed: int) -> int:
        drawn = np.random.default_rng(seed).lognormal(mu, sigma)
        return int(np.clip(round(drawn), 1, cap))

    return length
