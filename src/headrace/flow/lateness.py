"""An estimate, from the durations of earlier groups, of how long the learner would have to wait for a batch. Pacing
uses it to decide when groups start.

A group is *late* at a time if it is not ready at that time. Groups run concurrently, each for a different time, and a
batch is complete when enough groups are ready:

    cohort of groups that started together    ▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒ ?           each is late with S(elapsed + x) / S(elapsed)
    groups that would be started at a delay            │   ▒▒▒▒▒▒▒ ?       each is late with S(x − delay)
                                                      now        want      x after now

S(t) is the share of earlier durations that were longer than t. The number of late groups is a sum of independent
choices: it has a Poisson-binomial distribution, which is approximated for many groups. The batch is late if more groups
are late than can be spared, or if a group that is due is late. The expected wait is the integral of this probability
over the times at which the learner wants the batch.

Shape legend: C cohorts, P times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
"""An array of times or durations, in seconds."""

POINTS = 25
"""Number of times at which the probability of a late batch is computed."""
EXACT = 24
"""Greatest number of groups for which the distribution is computed exactly; above it an approximation is used. The
controller's event loop calls this module, and must not be blocked for milliseconds."""


class Cohort(NamedTuple):
    """Groups that started at the same time and still run, or that would be started at the same time."""

    age_s: float
    """Seconds since the groups started; negative if they would be started that much later."""
    size: int
    """Number of groups."""
    due: bool = False
    """Whether the batch has to wait for each of these groups, because none of them may be trained later."""


def expected_wait_s(want_s: Seconds, took_s: Seconds, cohorts: Sequence[Cohort], needed: int) -> float:
    """Return the expected wait of the learner, in seconds, for a batch that needs ``needed`` more groups to become
    ready; ``cohorts`` are the groups that may become ready for it.

    ``want_s`` are the times, in seconds from now, at which the learner may want the batch, each equally likely.
    ``took_s`` are the durations of earlier groups in seconds, infinite for groups that were dropped. Both are sorted in
    ascending order. No wait beyond the longest duration is counted. The result is infinite if there are too few groups,
    and 0 if none is needed.

    >>> took_s = np.array([1.0, 1.0, 2.0, 2.0])
    >>> round(expected_wait_s(np.array([1.0]), took_s, [Cohort(0.0, 1)], 1), 2)
    0.49
    >>> expected_wait_s(np.array([1.0]), took_s, [Cohort(0.0, 1)], 2)
    inf
    """
    if needed <= 0:
        return 0.0
    spare = sum(cohort.size for cohort in cohorts) - needed
    if spare < 0:
        return math.inf
    finite = int(np.searchsorted(took_s, math.inf))
    longest_s = float(took_s[finite - 1]) if finite else 0.0
    newest_s, oldest_s = min(cohort.age_s for cohort in cohorts), max(cohort.age_s for cohort in cohorts)
    first_s, last_s = float(want_s[0]), float(want_s[-1])
    if finite == len(took_s) and oldest_s < longest_s <= newest_s + first_s:
        return 0.0  # at the first want, each group has run for the longest duration
    after_s = np.linspace(first_s, max(last_s, longest_s - newest_s), POINTS)
    late_chances = _chance_of_late(after_s, took_s, cohorts, spare)
    # weighted with the probability that the learner wants the batch at that time
    late_chances *= np.searchsorted(want_s, after_s, side="right") / len(want_s)
    # the integral by the trapezoidal rule
    return float((late_chances.sum() - (late_chances[0] + late_chances[-1]) / 2) * (after_s[1] - after_s[0]))


def _chance_of_late(after_s: Seconds, took_s: Seconds, cohorts: Sequence[Cohort], spare: int) -> Seconds:
    """Return, for each of the times ``after_s`` (seconds from now), the probability that the batch is not complete:
    more than ``spare`` groups, or a group that is due, are not ready. ``took_s`` are the ascending durations of earlier
    groups."""
    size_C = np.array([cohort.size for cohort in cohorts])
    # without spare groups, the batch has to wait for every group
    due_C = np.array([cohort.due for cohort in cohorts]) | (not spare)
    late_CP = _late_chances(after_s, took_s, np.array([cohort.age_s for cohort in cohorts]))
    # all groups that are due are ready
    in_time: Seconds = np.prod((1.0 - late_CP[due_C]) ** size_C[due_C, None], axis=0)
    late_CP, size_C = late_CP[~due_C], size_C[~due_C]
    # and at most `spare` of the other groups are late
    if len(size_C):
        in_time *= (_exact_in_time if size_C.sum() <= EXACT else _approximate_in_time)(late_CP, size_C, spare)
    return np.clip(1.0 - in_time, 0.0, 1.0)


def _exact_in_time(late_CP: Seconds, size_C: npt.NDArray[np.int64], spare: int) -> Seconds:
    """Return, for each of P times, the exact probability that at most ``spare`` groups are late. ``late_CP`` is the
    probability that a group of each cohort is late, and ``size_C`` the number of groups in each cohort."""
    chances = np.zeros((spare + 1, late_CP.shape[1]))  # row k: exactly k groups are late
    chances[0] = 1.0
    for late_P in np.repeat(late_CP, size_C, axis=0):
        # each group moves probability from "k are late" to "k + 1 are late"
        one_more_late = chances[:-1] * late_P
        chances *= 1.0 - late_P
        chances[1:] += one_more_late
    in_time: Seconds = chances.sum(0)
    return in_time


def _approximate_in_time(late_CP: Seconds, size_C: npt.NDArray[np.int64], spare: int) -> Seconds:
    """Return, for each of P times, an approximation of the probability that at most ``spare`` groups are late, computed
    in a time that does not grow with their number. ``late_CP`` is the probability that a group of each cohort is late,
    and ``size_C`` the number of groups in each cohort. The approximation is the normal distribution with corrections
    for skewness and for continuity (Volkova 1996, equation 12)."""
    each_CP = late_CP * (1.0 - late_CP)
    deviation_P = np.sqrt(np.maximum(size_C @ each_CP, 1e-12))
    skewness_P = size_C @ (each_CP * (1.0 - 2.0 * late_CP)) / deviation_P**3
    x_P = (spare + 0.5 - size_C @ late_CP) / deviation_P
    below_P = np.array([0.5 + 0.5 * math.erf(x / math.sqrt(2)) for x in x_P.tolist()])
    density_P = np.exp(-0.5 * np.minimum(x_P**2, 700.0)) / math.sqrt(2 * math.pi)
    chance_P: Seconds = np.clip(below_P + skewness_P * (1.0 - x_P**2) * density_P / 6.0, 0.0, 1.0)
    return chance_P


def _late_chances(after_s: Seconds, took_s: Seconds, age_C: Seconds) -> Seconds:
    """Return the probability that a group of each cohort is not ready at each of the times ``after_s`` (seconds from
    now), given that it is not ready now. ``age_C`` is how long each cohort has run, in seconds. A group that has run
    longer than all earlier durations ``took_s`` counts as late at any time, since no earlier group was like it."""
    end_CP = age_C[:, None] + after_s
    longer_CP = len(took_s) - np.searchsorted(took_s, end_CP, side="right")
    still_C = len(took_s) - np.searchsorted(took_s, np.maximum(age_C, 0.0), side="right")
    late_CP: Seconds = longer_CP / np.maximum(still_C, 1)[:, None]
    late_CP[(end_CP <= 0.0) | (still_C <= 0)[:, None]] = 1.0
    return late_CP
