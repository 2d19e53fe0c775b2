"""What several attempts at each of several tasks say of a model, and how certain that is.

Every figure is a mean over the tasks of something that all attempts at a task say together, so its error is that of a
mean over tasks: attempts at the same task are not independent (Miller 2024, arXiv 2411.00640, "clustered" errors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

import msgspec

CERTAINTY = 0.95
"""How often an interval holds what it is meant to hold."""
_Z = NormalDist().inv_cdf((1 + CERTAINTY) / 2)


class IntervalEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and where it may really lie."""

    value: float
    """The mean over the tasks."""
    low: float | None
    """Lower end of the 95 % interval; ``None`` for a single task: it says nothing of others."""
    high: float | None
    """Upper end."""


def pass_at_k(num_attempts: int, num_passed: int, k: int) -> float:
    """How likely at least one of ``k`` attempts passes, without bias from those that were made: 1 − C(n−c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, equation 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 4, 4)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(num_attempts - num_passed, k) / math.comb(num_attempts, k)


def pass_hat_k(num_attempts: int, num_passed: int, k: int) -> float:
    """How likely all of ``k`` attempts pass: C(c, k) / C(n, k) (pass^k of Yao et al. 2024, arXiv 2406.12045).

    >>> pass_hat_k(4, 2, 1), pass_hat_k(4, 2, 2), pass_hat_k(4, 1, 2)
    (0.5, 0.16666666666666666, 0.0)
    """
    return math.comb(num_passed, k) / math.comb(num_attempts, k)


def mean_of(tasks: Sequence[float]) -> IntervalEstimate:
    """The mean over tasks, with an interval from how much they differ.

    >>> mean_of([1.0, 2.0, 3.0])
    IntervalEstimate(value=2.0, low=0.868..., high=3.131...)
    """
    value = fmean(tasks)
    if len(tasks) == 1:
        return IntervalEstimate(value=value, low=None, high=None)
    half = _Z * math.sqrt(variance(tasks) / len(tasks))
    return IntervalEstimate(value=value, low=value - half, high=value + half)


def share_of(tasks: Sequence[float]) -> IntervalEstimate:
    """The same for figures between 0 and 1: Wilson's interval (1927), which stays there, for as many tasks as the
    spread is worth (Korn and Graubard 1998). Where all tasks agree they are worth their number.

    >>> share_of([0.0] * 10)
    IntervalEstimate(value=0.0, low=0.0, high=0.277...)
    """
    value, count = fmean(tasks), float(len(tasks))
    if len(tasks) == 1:
        return IntervalEstimate(value=value, low=None, high=None)
    spread = variance(tasks) / count
    if spread > 0 and 0 < value < 1:
        count = value * (1 - value) / spread
    middle = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(value * (1 - value) / count + (_Z / (2 * count)) ** 2)
    low = 0.0 if value == 0 else max(0.0, middle - half)  # which it is there, but for rounding
    return IntervalEstimate(value=value, low=low, high=1.0 if value == 1 else min(1.0, middle + half))
