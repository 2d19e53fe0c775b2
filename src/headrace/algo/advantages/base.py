"""What an advantage is: rewards in, one number per episode (or per token) out. NumPy only: it runs in the controller.

An episode whose reward is None (NaN here) is not counted: it takes no part in any baseline and its advantage is 0. A
group with a single counted episode has nothing to compare it with: what is compared within groups is 0 there, never the
raw reward. Groups may be of unequal size: each is normalised by itself. A batch in which no reward counts has
advantages 0 throughout. Formulas with a baseline of their own (the batch, a running mean, a greedy answer, a teacher)
say what they do with a group of one.

Shape legend: E episodes (or turns, where a formula says so), K parts of a reward, N tokens of the episodes one after
the other.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, TypeVar

import numpy as np

from headrace.algo.advantages.outcomes import Bools, Floats, Ints, Outcomes
from headrace.base.config import Section
from headrace.base.errors import DataError

A = TypeVar("A", Floats, Ints)
Scope = Literal["group", "batch"]


class Advantage(Protocol):
    """How rewards become credit."""

    scope: ClassVar[Scope]
    """``"group"``: each group can be computed by itself; ``"batch"``: the whole batch is needed at once."""
    per_token: ClassVar[bool]
    """Whether the result is one number per token (N) rather than per episode (E)."""
    reads: ClassVar[frozenset[str]]
    """What it looks at beyond rewards and groups, as
    :func:`~headrace.algo.advantages.outcomes.outcomes_of` names it."""
    stateful: ClassVar[bool]
    """Whether it has to be told what earlier batches came to: without that, a run cannot use it."""
    by_critic: ClassVar[bool]
    """Whether it is made from a critic's values: in a run the learner makes it, and is handed rewards."""
    by_turn: ClassVar[bool]
    """Whether a row is a turn: in a run, what turns earned is credited to them."""
    by_teacher: ClassVar[bool]
    """Whether it credits what a teacher thinks of each token: in a run the learner adds that, which has the teacher."""

    @property
    def compares_siblings(self) -> bool:
        """Whether episodes are compared with others of their group: a group of one has no credit then."""
        ...

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode, or of every token."""
        ...


class AdvantageSection(Section):
    """An advantage that looks at one group at a time and credits whole episodes."""

    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset()
    stateful: ClassVar[bool] = False
    by_critic: ClassVar[bool] = False
    by_teacher: ClassVar[bool] = False
    by_turn: ClassVar[bool] = False

    @property
    def compares_siblings(self) -> bool:
        """Most do."""
        return True


def given(column: A | None, name: str) -> A:
    """The column, or a :class:`DataError` that names it."""
    if column is None:
        raise DataError(f"this advantage needs {name!r}, which is missing", remedy=f"give {name}, or choose another")
    return column


def total(values_E: Floats, owners_E: Ints) -> Floats:
    """For every row, the sum over the rows with the same owner.

    >>> total(np.array([1.0, 2.0, 4.0]), np.array([7, 7, 9])).tolist()
    [3.0, 3.0, 4.0]
    """
    _, index = np.unique(owners_E, return_inverse=True)
    sums: Floats = np.bincount(index, values_E).astype(np.float64)
    return sums[index]


def joint(first: Ints, second: Ints) -> Ints:
    """One label per row for each pair of labels."""
    pairs = np.stack([first, second], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def centered(outcomes: Outcomes, weights_E: Floats | None = None) -> Floats:
    """Reward less the (weighted) mean of its group; exactly 0 where a group's rewards are all the same."""
    weights_E = outcomes.counted_E.astype(np.float64) if weights_E is None else weights_E * outcomes.counted_E
    mass_E = total(weights_E, outcomes.groups_E)
    mean_E = total(weights_E * outcomes.values_E, outcomes.groups_E) / np.where(mass_E > 0, mass_E, 1.0)
    return without_rounding((outcomes.values_E - mean_E) * outcomes.counted_E, mean_E)


def leave_one_out(values_E: Floats, counted_E: Bools, owners_E: Ints) -> Floats:
    """Each counted value less the mean of the other counted ones with the same owner; 0 where there is no other."""
    num_E = total(counted_E.astype(np.float64), owners_E)
    mean_E = divided(total(values_E * counted_E, owners_E), num_E)
    difference_E = without_rounding((values_E - mean_E) * counted_E, mean_E)
    return divided(difference_E * num_E, np.maximum(num_E - 1, 0))


def moments(values_E: Floats, weights_E: Floats) -> tuple[float, float]:
    """Weighted mean and standard deviation (0 where it is only rounding)."""
    mass = float(weights_E.sum()) or 1.0
    mean = float((weights_E * values_E).sum()) / mass
    difference_E = without_rounding(values_E - mean, np.full(len(values_E), mean))
    return mean, float(np.sqrt((weights_E * difference_E**2).sum() / mass))


def without_rounding(differences: Floats, scale: Floats) -> Floats:
    """Differences that are only rounding, set to 0, so that no small ε can blow them up."""
    return np.where(np.abs(differences) <= 1e-12 * np.abs(scale), 0.0, differences)


def divided(values: Floats, by: Floats) -> Floats:
    """``values / by``, 0 where ``by`` is 0."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)
