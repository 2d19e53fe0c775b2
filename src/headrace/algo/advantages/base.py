"""The interface of an advantage formula, and functions that several formulas use, with NumPy only. An advantage formula
computes one number per episode, or per token, from the rewards of a group or a batch.

An episode whose reward is None (NaN here) does not count: no baseline includes it, and its advantage is 0. In a group
with a single counted episode, a formula that compares the episodes of a group returns 0 and never the reward itself.
Groups may have different sizes; each is normalised separately. If no reward of a batch counts, all advantages are 0.
Formulas with another baseline (the batch, a running mean, a greedy answer, a teacher) document their result for a group
of one episode.

Shape legend: E episodes (or turns, where a formula says so), K components of a reward, N tokens of all episodes,
concatenated.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeVar

import numpy as np

from headrace.algo.advantages.outcomes import Bools, Floats, Ints, Outcomes
from headrace.base.config import Section
from headrace.base.errors import DataError

A = TypeVar("A", Floats, Ints)
Scope = Literal["group", "batch"]
"""The data that a formula needs in one call: one group, or the whole batch."""


class Advantage(Protocol):
    """The interface of a formula that computes advantages from rewards."""

    scope: ClassVar[Scope]
    """The data that the formula needs in one call: ``"group"``, one group; ``"batch"``, the whole batch."""
    per_token: ClassVar[bool]
    """Whether the result has one number per token (N) instead of one per episode (E)."""
    reads: ClassVar[frozenset[str]]
    """The columns that the formula reads beyond rewards and groups, by their names in
    :func:`~headrace.algo.advantages.outcomes.make_outcomes`."""
    stateful: ClassVar[bool]
    """Whether the formula needs results of earlier batches. A run does not store them, and refuses such a formula."""
    by_critic: ClassVar[bool]
    """Whether the formula needs a critic's values. In a run, the learner computes such an advantage, and the controller
    sends the rewards to it."""
    by_turn: ClassVar[bool]
    """Whether a row is a turn instead of an episode. In a run, each turn then receives the advantage of its own
    reward."""
    by_teacher: ClassVar[bool]
    """Whether the formula adds a teacher's scores of each token. In a run, the learner computes this part, since it has
    the scores."""

    @property
    def compares_siblings(self) -> bool:
        """Whether episodes are compared with other episodes of their group. If so, an episode alone in its group has
        advantage 0."""
        ...

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode (E), or of every token (N) if ``per_token`` is set."""
        ...


class AdvantageSection(Section):
    """The base class of the settings of an advantage. Its class attributes, whose meaning is that of
    :class:`Advantage`, describe the usual formula: it needs one group per call and returns one number per episode."""

    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset()
    stateful: ClassVar[bool] = False
    by_critic: ClassVar[bool] = False
    by_teacher: ClassVar[bool] = False
    by_turn: ClassVar[bool] = False

    @property
    def compares_siblings(self) -> bool:
        """Whether episodes are compared with other episodes of their group, as for most advantages."""
        return True


def require(column: A | None, name: str) -> A:
    """Return ``column``, which a formula requires. Raises :class:`DataError`, which contains the column's ``name``, if
    the column is missing (``None``)."""
    if column is None:
        raise DataError(f"this advantage needs {name!r}, which is missing", remedy=f"give {name}, or choose another")
    return column


def total(values_E: Floats, owners_E: Ints) -> Floats:
    """Return, for every row, the sum of ``values_E`` over all rows with the same owner, such as a group or an episode.

    >>> total(np.array([1.0, 2.0, 4.0]), np.array([7, 7, 9])).tolist()
    [3.0, 3.0, 4.0]
    """
    _, index = np.unique(owners_E, return_inverse=True)
    sums: Floats = np.bincount(index, values_E).astype(np.float64)
    return sums[index]


def joint(first: Ints, second: Ints) -> Ints:
    """Combine two integer labels per row into one: two rows have equal labels in the result if and only if their labels
    in ``first`` are equal and their labels in ``second`` are equal."""
    pairs = np.stack([first, second], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def centered(outcomes: Outcomes, weights_E: Floats | None = None) -> Floats:
    """Return each counted reward of ``outcomes`` minus the weighted mean of the counted rewards of its group.
    ``weights_E`` are the weights; ``None``: equal weights. The result is 0 for rewards that do not count, and exactly 0
    if all rewards of a group are the same."""
    weights_E = outcomes.counted_E.astype(np.float64) if weights_E is None else weights_E * outcomes.counted_E
    mass_E = total(weights_E, outcomes.groups_E)
    mean_E = total(weights_E * outcomes.values_E, outcomes.groups_E) / np.where(mass_E > 0, mass_E, 1.0)
    return remove_rounding((outcomes.values_E - mean_E) * outcomes.counted_E, mean_E)


def leave_one_out(values_E: Floats, counted_E: Bools, owners_E: Ints) -> Floats:
    """Return each counted value minus the mean of the other counted values with the same owner, such as a group; 0 if
    there is no other value, and for values that do not count."""
    num_E = total(counted_E.astype(np.float64), owners_E)
    mean_E = divide_or_zero(total(values_E * counted_E, owners_E), num_E)
    difference_E = remove_rounding((values_E - mean_E) * counted_E, mean_E)
    return divide_or_zero(difference_E * num_E, np.maximum(num_E - 1, 0))


def moments(values_E: Floats, weights_E: Floats) -> tuple[float, float]:
    """Return the weighted mean and the weighted standard deviation of the values. The denominator of both is the sum of
    the weights. A deviation that is only a rounding error becomes 0."""
    mass = float(weights_E.sum()) or 1.0
    mean = float((weights_E * values_E).sum()) / mass
    difference_E = remove_rounding(values_E - mean, np.full(len(values_E), mean))
    return mean, float(np.sqrt((weights_E * difference_E**2).sum() / mass))


def remove_rounding(differences: Floats, scale: Floats) -> Floats:
    """Return the differences, with 0 for those that are only rounding errors of numbers of size ``scale`` (at most
    1e-12 times ``scale``). A division by a standard deviation near 0 would amplify them."""
    return np.where(np.abs(differences) <= 1e-12 * np.abs(scale), 0.0, differences)


def divide_or_zero(dividends: Floats, divisors: Floats) -> Floats:
    """Return ``dividends / divisors``, and 0 where ``divisors`` is 0."""
    return np.divide(dividends, divisors, out=np.zeros_like(dividends), where=divisors != 0)
