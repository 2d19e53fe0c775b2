"""What advantages are made from.

Shape legend: E episodes (or turns, where a formula says so), K parts of a reward, N tokens of the episodes one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PER_TOKEN = ("process", "entropies", "energies", "log_mu", "log_nu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Rewards and what else a formula may look at. Only ``rewards_E`` and ``groups_E`` are always there."""

    rewards_E: Floats
    """NaN for an episode that does not count."""
    groups_E: Ints
    """Any integers; equal ones share a baseline."""
    lengths_E: Ints | None = None
    """Tokens of each episode that carry loss; observations are not among them. They sum to N."""
    parts_EK: Floats | None = None
    """The rewards of a sum, apart."""
    greedy_E: Floats | None = None
    """Reward of the greedy answer to the same task; NaN for none."""
    agents_E: Ints | None = None
    """Which agent or role acted, from 0."""
    baselines: Floats | None = None
    """Running baseline of each agent before these episodes; the agents' integers index it."""
    episodes_E: Ints | None = None
    """Where a row is a turn: the episode it belongs to; turns are in order of time."""
    states_E: Ints | None = None
    """Where a row is a turn: the state it was taken in; equal integers are one state."""
    process_N: Floats | None = None
    """Process reward of each token."""
    entropies_N: Floats | None = None
    """Entropy of the policy at each token."""
    energies_N: Floats | None = None
    """‖∇ log π‖² of each token, or its proxy 1 − 2π + Σπ²."""
    log_mu_N: Floats | None = None
    """log-probability of each sampled token under what sampled it."""
    log_nu_N: Floats | None = None
    """log-probability of each sampled token under its teacher."""

    def __post_init__(self) -> None:
        rows = len(self.rewards_E)
        per_episode = {
            "groups": self.groups_E, "lengths": self.lengths_E, "reward parts": self.parts_EK, "greedy": self.greedy_E,
            "agents": self.agents_E, "episodes": self.episodes_E, "states": self.states_E,
        }  # fmt: skip
        tokens = 0 if self.lengths_E is None else int(self.lengths_E.sum())
        per_token = {
            "process": self.process_N, "entropies": self.entropies_N, "energies": self.energies_N,
            "log_mu": self.log_mu_N, "log_nu": self.log_nu_N,
        }  # fmt: skip
        for expected, what, columns in ((rows, "reward", per_episode), (tokens, "token", per_token)):
            for name, column in columns.items():
                if column is not None and len(column) != expected:
                    problem = f"{name} has {len(column)} entries, but there are {expected} {what}s"
                    raise DataError(problem, remedy=f"give one per {what}")
        if np.isinf(self.rewards_E).any():
            raise DataError(
                "a reward is infinite", remedy="return a finite number, or None for 'do not count this one'"
            )

    @property
    def counted_E(self) -> Bools:
        """Which episodes count."""
        return ~np.isnan(self.rewards_E)

    @property
    def values_E(self) -> Floats:
        """Rewards, 0 where they do not count."""
        return np.where(self.counted_E, self.rewards_E, 0.0)

    @property
    def owners_N(self) -> Ints:
        """The episode of each token."""
        assert self.lengths_E is not None
        return np.repeat(np.arange(len(self.rewards_E)), self.lengths_E)


def scores_of(rewards: Sequence[Any], groups: Sequence[Any] | None = None, **columns: Any) -> Scores:
    """Scores from plain lists: rewards as numbers or None, or as a list of parts for each episode; labels of any kind.

    ``columns`` are the fields of :class:`Scores` by their names without suffix; those per token are a list for each
    episode, and ``baselines`` maps an agent to a number. Raises :class:`DataError` for what is not a number, and for
    columns that do not agree in length.
    """
    parts = [row for row in rewards if isinstance(row, Sequence) and not isinstance(row, str)]
    table = [[None] * len(parts[0]) if row is None else row for row in rewards] if parts else None
    if table is not None and len({len(row) if isinstance(row, Sequence) else 1 for row in table}) > 1:
        raise DataError("episodes have different numbers of rewards", remedy="give every episode the same parts")
    parts_EK = None if table is None else np.array([_floats(row) for row in table])
    records: dict[str, Any] = {
        "rewards_E": _floats(rewards) if parts_EK is None else parts_EK.sum(axis=1),
        "parts_EK": parts_EK,
        "groups_E": np.zeros(len(rewards), np.int64) if groups is None else _labels(groups),
    }
    for name, values in columns.items():
        if name in PER_TOKEN:
            records[f"{name}_N"] = np.concatenate([_floats(row) for row in values]) if len(values) else np.zeros(0)
            records.setdefault("lengths_E", np.array([len(row) for row in values], np.int64))
        elif name == "lengths":
            records["lengths_E"] = np.asarray(values, np.int64)
        elif name in ("agents", "states", "episodes"):
            records[f"{name}_E"] = _labels(values)
        elif name == "greedy":
            records["greedy_E"] = _floats(values)
    if "baselines" in columns:
        agents = columns.get("agents", [0])
        records["baselines"] = _floats([columns["baselines"].get(agent, 0.0) for agent in np.unique(agents).tolist()])
    return Scores(**records)


def _labels(values: Sequence[Any]) -> Ints:
    return np.unique(np.asarray(values), return_inverse=True)[1].astype(np.int64)


def _floats(values: Sequence[float | None]) -> Floats:
    try:
        return np.array([np.nan if value is None else float(value) for value in values], np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{values!r} are not numbers: {error}", remedy="give numbers or None") from None
