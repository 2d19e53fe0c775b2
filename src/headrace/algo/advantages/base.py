"""The contract of an advantage: rewards in, one number per episode (or per token) out. It needs NumPy only.

An episode whose reward is None (NaN here) is not counted: it is in no baseline, and its advantage is 0. A group with a
single counted episode has nothing to compare it with: an advantage that compares within groups is 0 there, never the
raw reward. Groups may have different sizes; each is normalised by itself. If no reward of a batch counts, all
advantages are 0. Formulas with another baseline (the batch, a running mean, a greedy answer, a teacher) document what
they do with a group of one.

Shape legend: E episodes (or turns, where a formula says so), K components of a reward, N tokens of the episodes one
after the other.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeVar

import numpy as np

from headrace.algo.advantages.outcomes import Bools, Floats, Ints, Outcomes
from headrace.base.config import Section
from headrace.base.errors import DataError

A = TypeVar("A", Floats, Ints)
Scope = Literal["group", "batch"]
"""The data that a formula needs at once: one group, or the whole batch."""


class Advantage(Protocol):
    """A formula that turns rewards into advantages."""

    scope: ClassVar[Scope]
    """The data that the formula needs at once: ``"group"``, one group; ``"batch"``, the whole batch."""
    per_token: ClassVar[bool]
    """Whether the result is one number per token (N) instead of per episode (E)."""
    reads: ClassVar[frozenset[str]]
    """The columns that the formula reads beyond rewards and groups, by their names in
    :func:`~headrace.algo.advantages.outcomes.outcomes_of`."""
    stateful: ClassVar[bool]
    """Whether the formula needs results of earlier batches. A run does not provide them and cannot use the formula."""
    by_critic: ClassVar[bool]
    """Whether the formula needs a critic's values. In a run the learner computes it, and the controller sends
    rewards."""
    by_turn: ClassVar[bool]
    """Whether a row is a turn instead of an episode: in a run, each turn gets the advantage of its own reward."""
    by_teacher: ClassVar[bool]
    """Whether the formula adds a teacher's scores of each token. In a run the learner, which has the teacher, adds
    them."""

    @property
    def compares_siblings(self) -> bool:
        """Return whether episodes are compared with others of their group. If so, an episode alone in its group has
        advantage 0."""
        ...

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the advantage of every episode (E), or of every token (N) if ``per_token`` is set."""
        ...


class AdvantageSection(Section):
    """The base class of the advantages: the settings of one, with the properties of the usual formula, which needs one
    group at a time and gives one number per episode. Their meaning is that of :class:`Advantage`."""

    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset()
    stateful: ClassVar[bool] = False
    by_critic: ClassVar[bool] = False
    by_teacher: ClassVar[bool] = False
    by_turn: ClassVar[bool] = False

    @property
    def compares_siblings(self) -> bool:
        """``True``: most advantages compare episodes of a group with each other."""
        return True


def given(column: A | None, name: str) -> A:
    """Return ``column``, which a formula needs. Raises :class:`DataError` with the column's ``name`` if it is missing
    (``None``)."""
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
    """Return one integer label per row from two: rows get equal labels if both their labels in ``first`` and in
    ``second`` are equal."""
    pairs = np.stack([first, second], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def centered(outcomes: Outcomes, weights_E: Floats | None = None) -> Floats:
    """Return each counted reward minus the mean of its group's counted rewards, weighted by ``weights_E`` (unset: all
    weigh the same). It is 0 for rewards that do not count, and exactly 0 if all rewards of a group are the same."""
    weights_E = outcomes.counted_E.astype(np.float64) if weights_E is None else weights_E * outcomes.counted_E
    mass_E = total(weights_E, outcomes.groups_E)
    mean_E = total(weights_E * outcomes.values_E, outcomes.groups_E) / np.where(mass_E > 0, mass_E, 1.0)
    return without_rounding((outcomes.values_E - mean_E) * outcomes.counted_E, mean_E)


def leave_one_out(values_E: Floats, counted_E: Bools, owners_E: Ints) -> Floats:
    """Return each value that counts minus the mean of the other counted values with the same owner (a group, for
    example); 0 if there is no other, and for values that do not count."""
    num_E = total(counted_E.astype(np.float64), owners_E)
    mean_E = divided(total(values_E * counted_E, owners_E), num_E)
    difference_E = without_rounding((values_E - mean_E) * counted_E, mean_E)
    return divided(difference_E * num_E, np.maximum(num_E - 1, 0))


def moments(values_E: Floats, weights_E: Floats) -> tuple[float, float]:
    """Return the weighted mean and the weighted standard deviation of the values, with the sum of the weights as the
    denominator of both; a deviation that is only rounding is 0."""
    mass = float(weights_E.sum()) or 1.0
    mean = float((weights_E * values_E).sum()) / mass
    difference_E = without_rounding(values_E - mean, np.full(len(values_E), mean))
    return mean, float(np.sqrt((weights_E * difference_E**2).sum() / mass))


def without_rounding(differences: Floats, scale: Floats) -> Floats:
    """Return the differences, with those set to 0 that are only the rounding of numbers of size ``scale`` (below 1e-12
    of it). A division by a standard deviation near 0 would magnify them."""
    return np.where(np.abs(differences) <= 1e-12 * np.abs(scale), 0.0, differences)


def divided(values: Floats, by: Floats) -> Floats:
    """Return ``values / by``, and 0 where ``by`` is 0."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)
