"""What an advantage is: rewards in, one number per episode (or per token) out. NumPy only: it runs in the controller.

An episode whose reward is None (NaN here) is not counted: it takes no part in any baseline and its advantage is 0. A
group with a single counted episode has nothing to compare it with: its advantage is 0, never the raw reward. Groups may
be of unequal size: each is normalised by itself. A batch in which no reward counts has advantages 0 throughout.

Shape legend: E episodes (or turns, where a formula says so), K parts of a reward, N tokens of the episodes one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from headrace.config import Section
from headrace.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Scope = Literal["group", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What advantages are made from. Only ``rewards_E`` and ``groups_E`` are always there."""

    rewards_E: Floats
    """NaN for an episode that does not count."""
    groups_E: Ints
    """Any integers; equal ones share a baseline."""
    lengths_E: Ints | None = None
    """Tokens of each episode that carry loss; observations are not among them. They sum to N."""
    parts_EK: Floats | None = None
    """The rewards of a sum, apart."""
    greedy_E: Floats | None = None
    """Reward of the greedy answer to the same task."""
    agents_E: Ints | None = None
    """Which agent or role acted."""
    baselines: Floats | None = None
    """Running baseline of each agent before these episodes; the agents' integers index it."""
    episodes_E: Ints | None = None
    """Where a row is a turn: the episode it belongs to, in order of time."""
    states_E: Ints | None = None
    """Where a row is a turn: the state it was taken in; equal integers are one state."""
    process_N: Floats | None = None
    """Process reward of each token."""
    entropies_N: Floats | None = None
    """Entropy of the policy at each token."""
    energies_N: Floats | None = None
    """‖∇ log π‖² of each token, or its proxy 1 − 2π + Σπ²."""
    log_mu_N: Floats | None = None
    log_nu_N: Floats | None = None
    """log-probability of each sampled token under its teacher."""

    COLUMNS: ClassVar[frozenset[str]] = frozenset({
        "lengths", "greedy", "agents", "baselines", "episodes", "states", "process", "entropies", "energies", "log_mu", "log_nu",
    })  # fmt: skip
    """What :func:`scores_of` takes beyond rewards and groups."""

    def __post_init__(self) -> None:
        num_episodes = len(self.rewards_E)
        for name in ("groups_E", "lengths_E", "parts_EK", "greedy_E", "agents_E", "episodes_E", "states_E"):
            column = getattr(self, name)
            if column is not None and len(column) != num_episodes:
                raise DataError(
                    f"{name} has {len(column)} rows, but there are {num_episodes} rewards", remedy="give one per reward"
                )
        if np.isinf(self.rewards_E).any():
            raise DataError(
                "a reward is infinite", remedy="return a finite number, or None for 'do not count this one'"
            )

    @property
    def counted_E(self) -> npt.NDArray[np.bool_]:
        """Which episodes count."""
        return ~np.isnan(self.rewards_E)

    @property
    def values_E(self) -> Floats:
        """Rewards, 0 where they do not count."""
        return np.where(self.counted_E, self.rewards_E, 0.0)

    @property
    def owners_N(self) -> Ints:
        """The episode of each token."""
        return np.repeat(np.arange(len(self.rewards_E)), given(self.lengths_E, "lengths"))


class Advantage(Protocol):
    """How rewards become credit."""

    scope: ClassVar[Scope]
    """``"group"``: each group can be computed by itself; ``"batch"``: the whole batch is needed at once."""
    per_token: ClassVar[bool]
    """Whether the result is one number per token (N) rather than per episode (E)."""

    def __call__(self, scores: Scores) -> Floats:
        """The credit of every episode, or of every token."""
        ...


class AdvantageSection(Section):
    """An advantage that looks at one group at a time and credits whole episodes."""

    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = False


def given(column: npt.NDArray[np.generic] | None, name: str) -> npt.NDArray[np.generic]:  # type: ignore[type-var]
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
    sums: Floats = np.bincount(index, values_E)
    return sums[index]


def centered(scores: Scores, weights_E: Floats | None = None) -> Floats:
    """Reward less the (weighted) mean of its group; exactly 0 where a group's rewards are all the same."""
    weights_E = scores.counted_E.astype(np.float64) if weights_E is None else weights_E * scores.counted_E
    mass_E = total(weights_E, scores.groups_E)
    mean_E = total(weights_E * scores.values_E, scores.groups_E) / np.where(mass_E > 0, mass_E, 1.0)
    return without_rounding((scores.values_E - mean_E) * scores.counted_E, mean_E)


def without_rounding(differences: Floats, scale: Floats) -> Floats:
    """Differences that are only rounding, set to 0, so that no small ε can blow them up."""
    return np.where(np.abs(differences) <= 1e-12 * np.abs(scale), 0.0, differences)


def divided(values: Floats, by: Floats) -> Floats:
    """``values / by``, 0 where ``by`` is 0."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def scores_of(rewards: Sequence[Any], groups: Sequence[Any] | None = None, **columns: Any) -> Scores:
    """Scores from plain lists: rewards as numbers or None, or as a list of parts for each episode; labels of any kind.

    Per-token columns are a list of lists; ``baselines`` maps an agent to a number. Raises :class:`DataError` for what is
    not a number, and for columns that do not agree in length.
    """
    parts = [row for row in rewards if isinstance(row, Sequence)]
    num_parts = len(parts[0]) if parts else 0
    table = [[None] * num_parts if row is None else row for row in rewards] if parts else None
    parts_EK = None if table is None else np.array([_floats(row) for row in table])
    records: dict[str, Any] = {
        "rewards_E": _floats(rewards) if parts_EK is None else parts_EK.sum(axis=1),
        "parts_EK": parts_EK,
        "groups_E": np.zeros(len(rewards), np.int64) if groups is None else _labels(groups),
    }
    for name, values in columns.items():
        if name in ("process", "entropies", "energies", "log_mu", "log_nu"):
            records[f"{name}_N"] = np.concatenate([_floats(row) for row in values])
            records.setdefault("lengths_E", np.array([len(row) for row in values], np.int64))
        elif name in ("lengths", "episodes"):
            records[f"{name}_E"] = np.asarray(values, np.int64)
        elif name in ("agents", "states"):
            records[f"{name}_E"] = _labels(values)
        elif name == "greedy":
            records["greedy_E"] = _floats(values)
    if "baselines" in columns:
        agents = columns.get("agents", [0] * len(rewards))
        records["baselines"] = _floats([columns["baselines"].get(agent, 0.0) for agent in np.unique(agents).tolist()])
    return Scores(**records)


def _labels(values: Sequence[Any]) -> Ints:
    return np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)


def _floats(values: Sequence[float | None]) -> Floats:
    try:
        return np.array([np.nan if value is None else float(value) for value in values], np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"rewards {values!r} are not numbers: {error}", remedy="give numbers or None") from None
