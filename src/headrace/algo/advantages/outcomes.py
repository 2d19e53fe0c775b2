"""The inputs of advantage formulas: rewards, and the columns that some formulas need. A *column* is an array with one
entry for each episode or each token.

Shape legend: E episodes (or turns, where a formula says so), K components of a reward, N tokens of all episodes,
concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headrace.base.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@runtime_checkable
class _Array(Protocol):
    """The method that arrays of NumPy and torch have in common."""

    def tolist(self) -> Any:
        """Return the array as plain Python values."""
        ...


# the columns with one value per token, which the user passes as one list per episode
PER_TOKEN = ("process", "entropies", "segments", "energies", "log_mu", "log_nu", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The inputs of an advantage formula. Only ``rewards_E`` and ``groups_E`` are always present."""

    rewards_E: Floats
    """The reward of each episode; NaN for an episode that does not count."""
    groups_E: Ints
    """The group of each episode: episodes with equal integers share a baseline."""
    lengths_E: Ints | None = None
    """The number of tokens of each episode that carry loss, without observations; the sum is N."""
    parts_EK: Floats | None = None
    """The components of each reward, if the reward is a sum of components."""
    greedy_E: Floats | None = None
    """The reward of the greedy answer to the same task; NaN if there is no greedy answer."""
    agents_E: Ints | None = None
    """The agent or role of each episode, numbered from 0."""
    baselines: Floats | None = None
    """The running baseline of each agent before these episodes; the index is the agent's number."""
    episodes_E: Ints | None = None
    """The episode of each row, if a row is a turn. Turns are in order of time."""
    states_E: Ints | None = None
    """The state in which each turn was taken, if a row is a turn; equal integers denote the same state."""
    process_N: Floats | None = None
    """The process reward of each token."""
    entropies_N: Floats | None = None
    """The entropy of the policy at each token."""
    segments_N: Ints | None = None
    """The segment of each token; equal integers in one episode denote the same segment."""
    energies_N: Floats | None = None
    """The squared gradient norm ‖∇ log π‖² of each token, or its proxy 1 − 2π + Σπ²."""
    log_mu_N: Floats | None = None
    """The log-probability of each token under the distribution that sampled it."""
    log_nu_N: Floats | None = None
    """The log-probability of each token under its teacher."""
    values_N: Floats | None = None
    """A critic's value of the text before each token."""

    def __post_init__(self) -> None:
        """Check the columns. Raises :class:`~headrace.base.errors.DataError` if the length of a column is not the
        number of rewards or of tokens, if a length is negative, or if a reward is infinite."""
        rows = len(self.rewards_E)
        per_episode = {
            "groups": self.groups_E, "lengths": self.lengths_E, "reward parts": self.parts_EK, "greedy": self.greedy_E,
            "agents": self.agents_E, "episodes": self.episodes_E, "states": self.states_E,
        }  # fmt: skip
        tokens = 0 if self.lengths_E is None else int(self.lengths_E.sum())
        per_token = {
            "process": self.process_N, "entropies": self.entropies_N, "segments": self.segments_N,
            "energies": self.energies_N, "log_mu": self.log_mu_N, "log_nu": self.log_nu_N, "values": self.values_N,
        }  # fmt: skip
        for expected, what, columns in ((rows, "reward", per_episode), (tokens, "token", per_token)):
            for name, column in columns.items():
                if column is not None and len(column) != expected:
                    problem = f"{name} has {len(column)} entries, but there are {expected} {what}s"
                    raise DataError(problem, remedy=f"give one per {what}")
        if self.lengths_E is not None and (self.lengths_E < 0).any():
            raise DataError("an episode has fewer than 0 tokens", remedy="give lengths >= 0")
        if np.isinf(self.rewards_E).any():
            raise DataError(
                "a reward is infinite", remedy="return a finite number, or None for 'do not count this one'"
            )

    @property
    def counted_E(self) -> Bools:
        """Return whether each episode counts: its reward is not NaN."""
        return ~np.isnan(self.rewards_E)

    @property
    def values_E(self) -> Floats:
        """Return the rewards, with 0 for episodes that do not count."""
        return np.where(self.counted_E, self.rewards_E, 0.0)

    @property
    def owners_N(self) -> Ints:
        """Return the index of the episode (the row) of each token. Requires ``lengths_E``."""
        assert self.lengths_E is not None
        return np.repeat(np.arange(len(self.rewards_E)), self.lengths_E)


def make_outcomes(rewards: Sequence[Any], groups: Sequence[Any] | None = None, **columns: Any) -> Outcomes:
    """Return the outcomes for plain lists: ``rewards``, and ``groups``, the label of each episode's group (``None``:
    all are in one group). Each reward is a number, ``None``, or a list of components; labels may have any hashable
    type.

    ``columns`` are fields of :class:`Outcomes` by their names without suffix. A column per token is one list per
    episode, and ``baselines`` maps an agent to a number. Raises :class:`DataError` for a value that is not a number,
    and for columns of different lengths.
    """
    rewards = to_list(rewards, "rewards")
    parts = [row for row in rewards if isinstance(row, Sequence) and not isinstance(row, str)]
    table = [[None] * len(parts[0]) if row is None else row for row in rewards] if parts else None
    if table is not None and len({len(row) if isinstance(row, Sequence) else 1 for row in table}) > 1:
        raise DataError("episodes have different numbers of rewards", remedy="give every episode the same parts")
    parts_EK = None if table is None else np.array([_floats(row) for row in table])
    records: dict[str, Any] = {
        "rewards_E": _floats(rewards) if parts_EK is None else parts_EK.sum(axis=1),
        "parts_EK": parts_EK,
        "groups_E": np.zeros(len(rewards), np.int64) if groups is None else labels(to_list(groups, "groups")),
    }
    baselines = columns.pop("baselines", None)
    for name, column in columns.items():
        values = to_list(column, name)
        if name in PER_TOKEN:
            floats = [_floats(to_list(row, name)) for row in values]
            column_N = np.concatenate([np.zeros(0), *floats])
            records[f"{name}_N"] = labels(column_N.tolist()) if name == "segments" else column_N
            records.setdefault("lengths_E", np.array([len(row) for row in floats], np.int64))
        elif name == "lengths":
            records["lengths_E"] = _whole_numbers(values)
        elif name in ("agents", "states", "episodes"):
            records[f"{name}_E"] = labels(values)
        elif name == "greedy":
            records["greedy_E"] = _floats(values)
    if baselines is not None:
        agents = dict.fromkeys(to_list(columns.get("agents", [0]), "agents"))
        records["baselines"] = _floats([baselines.get(agent, 0.0) for agent in agents])
    return Outcomes(**records)


def to_list(values: Any, name: str) -> list[Any]:
    """Return ``values``, a list, an array, a tensor or any other iterable, as a list of plain Python values. Raises
    :class:`~headrace.base.errors.DataError`, which contains the column's ``name``, for anything else, including text
    and mappings."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise DataError(f"{name} is {values!r}, which is not a list", remedy=f"give {name} as a list")
    listed = values.tolist() if isinstance(values, _Array) else list(values)
    return [value.tolist() if isinstance(value, _Array) else value for value in listed]


def labels(values: Sequence[Any]) -> Ints:
    """Return an integer for every label in ``values``. Equal labels have equal integers, numbered from 0 in order of
    first occurrence.

    >>> labels(["b", None, "b"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[Any, int] = {}
    try:
        return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)
    except TypeError as error:
        raise DataError(f"labels cannot be compared: {error}", remedy="use numbers or text as labels") from None


def _whole_numbers(values: Sequence[Any]) -> Ints:
    """Return the lengths of episodes, in tokens, as an array of integers. Raises
    :class:`~headrace.base.errors.DataError` if they are not whole numbers."""
    numbers = _floats(values)
    if not np.array_equal(numbers, np.round(numbers)):
        raise DataError(f"lengths {values!r} are not whole numbers", remedy="give how many tokens each episode has")
    return numbers.astype(np.int64)


def _floats(values: Sequence[float | None]) -> Floats:
    """Return numbers as an array, with NaN for ``None``. Raises :class:`~headrace.base.errors.DataError` for a value
    that is not a number."""
    try:
        if any(isinstance(value, str) for value in values):
            raise TypeError("text is not a number")
        return np.array([np.nan if value is None else float(value) for value in values], np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{values!r} are not numbers: {error}", remedy="give numbers or None") from None
