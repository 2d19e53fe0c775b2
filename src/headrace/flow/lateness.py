"""How long a learner that wants a batch would have to wait for it, by the durations that were seen.

Groups run at once, each for a time of its own, and a batch is complete when enough of them are ready:

    cohort of groups that started together    ▒▒▒▒▒▒▒▒▒│▒▒▒▒▒▒ ?           each is late with S(elapsed + x) / S(elapsed)
    groups that would be started at a delay            │   ▒▒▒▒▒▒▒ ?       each is late with S(x − delay)
                                                      now        want      x after now

S is the share of durations that were longer. The number of late groups is the sum of independent choices
(Poisson-binomial); the batch is late if more of them are late than there are to spare, or one that is due is. The
expected wait is the area under that chance where the learner wants the batch already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
"""Times or durations."""

POINTS = 25
"""Number of times at which the chance of a late batch is computed."""


class Cohort(NamedTuple):
    """Groups that started together, or that would be started together."""

    age_s: float
    """Seconds since they started; negative if they would be started later."""
    size: int
    """Number of groups."""
    due: bool = False
    """Whether the batch has to wait for each of them, because none may be trained later."""


def expected_wait_s(want_s: Seconds, took_s: Seconds, cohorts: Sequence[Cohort], needed: int) -> float:
    """Return the expected wait for a batch of which ``needed`` groups are not ready.

    ``want_s`` are the times from now at which the learner may want it, and ``took_s`` the durations that groups had,
    infinite for those that were dropped; both ascend. Beyond the longest duration no wait is counted. The wait is
    infinite if there are too few groups.

    >>> took_s = np.array([1.0, 1.0, 2.0, 2.0])
    >>> round(expected_wait_s(np.array([1.0]), took_s, [Cohort(0.0, 1)], 1), 2)
    0.46
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
        return 0.0  # each will have had the time of the longest
    after_s = np.linspace(first_s, max(last_s, longest_s - newest_s), POINTS)
    late = _chance_of_late(after_s, took_s, cohorts, spare)
    late *= np.searchsorted(want_s, after_s, side="right") / len(want_s)
    return float((late.sum() - (late[0] + late[-1]) / 2) * (after_s[1] - after_s[0]))


def _chance_of_late(after_s: Seconds, took_s: Seconds, cohorts: Sequence[Cohort], spare: int) -> Seconds:
    """Return for each of the times the chance that more than ``spare`` groups, or one that is due, are not ready."""
    chances = np.zeros((spare + 1, len(after_s)))  # row k: exactly k groups are late, none of them due
    chances[0] = 1.0
    for cohort in cohorts:
        late = _late(after_s, took_s, cohort.age_s)
        if cohort.due or not spare:
            chances *= (1.0 - late) ** cohort.size
            continue
        for _ in range(cohort.size):
            moved = chances[:-1] * late
            chances *= 1.0 - late
            chances[1:] += moved
    chance: Seconds = np.clip(1.0 - chances.sum(0), 0.0, 1.0)
    return chance


def _late(after_s: Seconds, took_s: Seconds, age_s: float) -> Seconds:
    """Return the chance that a group is not ready at each of the times. One that has taken longer than all others did
    is late at any time: nothing is known of it."""
    longer = len(took_s) - np.searchsorted(took_s, age_s + after_s, side="right")
    still = len(took_s) - int(np.searchsorted(took_s, max(0.0, age_s), side="right"))
    if still <= 0:
        return np.ones(len(after_s))
    late: Seconds = np.where(age_s + after_s <= 0.0, 1.0, longer / still)
    return late
