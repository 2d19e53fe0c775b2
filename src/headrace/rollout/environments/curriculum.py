"""A curriculum: which row a group attempts depends on how often the rows were solved before.

    unseen ──first group──▶ hard   rate < low       ┐ rows move between them with their running solve rate
                            target low ≤ rate ≤ high │ a row whose latest group was solved always or never
                            easy   high < rate      ┘ rests for some epochs

A pick is a function of the seed, the number of the group, the rows picked before it, and the outcomes of the groups
that were admitted under *older versions* than the present one. What became known since then waits: so in a synchronous
run, and wherever the interleaving is the same, the same rows are picked however long each answer took, also over a
crash.

Shape legend: R rows of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic
from pydantic import Field

from headrace.base.config import Section
from headrace.base.errors import ConfigError

_DRAWS = 0x435552
"""Keeps its draws apart from others under the same seed."""
_UNSEEN, _HARD, _TARGET, _EASY = range(4)
Bools = npt.NDArray[np.bool_]


class CurriculumConfig(Section):
    """Pools of rows by how often they are solved, and how likely a row of each is to be attempted."""

    low: float = Field(default=0.2, ge=0, le=1)
    """A row with a lower solve rate is hard."""
    high: float = Field(default=0.8, ge=0, le=1)
    """A row with a higher solve rate is easy; those between are the target."""
    unseen: float = Field(default=1.0, gt=0)
    """Weight of a row that was never attempted."""
    hard: float = Field(default=0.25, ge=0)
    """Weight of a hard row."""
    target: float = Field(default=1.0, ge=0)
    """Weight of a row of the target."""
    easy: float = Field(default=0.25, ge=0)
    """Weight of an easy row."""
    threshold: float = 0.5
    """A reward above it solves the task."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """How much of a row's rate stays when another group has attempted it; 0: the latest group alone counts."""
    rest: float = Field(default=2.0, ge=0)
    """For how many epochs (groups, over rows) a row is left alone whose latest group was solved always or never."""

    @pydantic.model_validator(mode="after")
    def _has_a_band(self) -> Self:
        if self.low > self.high:
            raise ConfigError(
                f"data.curriculum has low={self.low:g} above high={self.high:g}: no row could be of the target",
                remedy="set low <= high",
            )
        return self


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one group came to."""

    number: int
    row: int
    version: int
    """Committed when it was admitted."""
    solved: float
    """Share of its scored episodes that solved the task."""


class RowRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a row that was picked."""

    row: int
    last: int
    """The last group that it was picked for."""
    rate: float | None
    """Running solve rate; ``None`` while no outcome counts."""
    wakes: int
    """From which group on it may be picked."""


class CurriculumState(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot keeps of a curriculum."""

    rows: tuple[RowRecord, ...] = ()
    waiting: tuple[GroupOutcome, ...] = ()
    """Outcomes that no pick has looked at yet."""
    next_number: int = 0
    """The first group that no row was picked for."""
    open: tuple[int, ...] = ()
    """Groups before that whose outcome is not known."""

    @property
    def first_unknown(self) -> int:
        """Of the groups before this one all is known."""
        return min(self.open, default=self.next_number)


class Attempted(Protocol):
    """What is remembered of a group."""

    @property
    def number(self) -> int:
        """Its own."""
        ...

    @property
    def row(self) -> int:
        """The one it attempts."""
        ...

    @property
    def oldest_version(self) -> int:
        """Committed when it was admitted."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it has an outcome, or was dropped without."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """Of its episodes that have one."""
        ...


class Curriculum:
    """Picks rows. ``epochs`` bounds how many groups are made, in passes over the dataset; ``None``: no bound."""

    def __init__(
        self, config: CurriculumConfig, *, num_rows: int, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        self._config = config
        self._seed = seed
        self._limit = None if epochs is None else epochs * num_rows
        self.num_rest = round(config.rest * num_rows)
        """For how many groups a row may be left alone."""
        self._weights = np.array([config.unseen, config.hard, config.target, config.easy])
        order_R = np.random.default_rng([seed, 0]).permutation(num_rows) if shuffle else np.arange(num_rows)
        self._last_R = np.empty(num_rows, np.int64)
        self._last_R[order_R] = np.arange(num_rows) - num_rows  # unseen rows: negative, in the order of their turn
        self._rate_R = np.full(num_rows, np.nan)
        self._pool_R = np.full(num_rows, _UNSEEN)
        self._wakes_R = np.zeros(num_rows, np.int64)
        self._waiting: list[GroupOutcome] = []
        self._next_number = 0
        self._open: set[int] = set()

    def pick(self, number: int, version: int) -> int | None:
        """The row that group ``number`` attempts, under the committed ``version``; ``None`` after the last epoch.

        Groups are asked for in the order of their numbers. Takes time proportional to the rows: 1 ms for 100,000.
        """
        if self._limit is not None and number >= self._limit:
            return None
        self._look(version)
        row = self._oldest(self._candidates_R(number))
        self._note_pick(number, row)
        return row

    def observe(self, number: int, row: int, version: int, rewards: Sequence[float]) -> None:
        """Group ``number``, admitted under ``version``, has ended with these rewards; with none it was dropped."""
        if number not in self._open:
            return
        self._open.discard(number)
        if rewards and row < len(self._last_R):
            solved = sum(reward > self._config.threshold for reward in rewards) / len(rewards)
            self._waiting.append(GroupOutcome(number=number, row=row, version=version, solved=solved))

    def pools(self) -> dict[str, int]:
        """How many rows are in each pool."""
        counts = np.bincount(self._pool_R, minlength=4).tolist()
        return dict(zip(("unseen", "hard", "target", "easy"), counts, strict=True))

    def state(self) -> CurriculumState:
        """Everything that it knows."""
        seen = np.flatnonzero(self._last_R >= 0).tolist()
        rates = [None if np.isnan(rate) else rate for rate in self._rate_R[seen].tolist()]
        columns = zip(seen, self._last_R[seen].tolist(), rates, self._wakes_R[seen].tolist(), strict=True)
        return CurriculumState(
            rows=tuple(RowRecord(*values) for values in columns),
            waiting=tuple(self._waiting),
            next_number=self._next_number,
            open=tuple(sorted(self._open)),
        )

    def restore(self, state: CurriculumState, since: Iterable[Attempted]) -> None:
        """Go on from ``state``; ``since`` is what became of the groups from ``state.first_unknown`` on."""
        num_rows = len(self._last_R)
        for record in state.rows:
            if record.row < num_rows:
                self._last_R[record.row], self._wakes_R[record.row] = record.last, record.wakes
                self._set_rate(record.row, record.rate)
        self._waiting = [outcome for outcome in state.waiting if outcome.row < num_rows]
        self._next_number, self._open = state.next_number, set(state.open)
        for group in since:
            if group.number >= self._next_number:
                self._note_pick(group.number, group.row)
            if group.closed:
                self.observe(group.number, group.row, group.oldest_version, group.rewards)

    def _note_pick(self, number: int, row: int) -> None:
        if row < len(self._last_R):
            self._last_R[row] = number
        self._open.add(number)
        self._next_number = number + 1

    def _look(self, version: int) -> None:
        """Take in what groups of older versions came to, in the order of their numbers."""
        seen = sorted((o for o in self._waiting if o.version < version), key=lambda outcome: outcome.number)
        if not seen:
            return
        self._waiting = [outcome for outcome in self._waiting if outcome.version >= version]
        for outcome in seen:
            before = float(self._rate_R[outcome.row])
            kept = 0.0 if np.isnan(before) else self._config.memory
            self._set_rate(outcome.row, kept * (0.0 if kept == 0.0 else before) + (1 - kept) * outcome.solved)
            if outcome.solved in (0.0, 1.0):
                self._wakes_R[outcome.row] = outcome.number + self.num_rest

    def _set_rate(self, row: int, rate: float | None) -> None:
        if rate is None:
            return
        self._rate_R[row] = rate
        above = _EASY if rate > self._config.high else _TARGET
        self._pool_R[row] = _HARD if rate < self._config.low else above

    def _candidates_R(self, number: int) -> Bools:
        """The rows of a pool that is drawn by the weight of its rows; where all rest, those that wake first."""
        free_R = self._wakes_R <= number
        weights = np.bincount(self._pool_R[free_R], minlength=4) * self._weights
        if weights.sum() > 0:
            rng = np.random.default_rng([self._seed, _DRAWS, number])
            candidates_R: Bools = free_R & (self._pool_R == rng.choice(4, p=weights / weights.sum()))
            return candidates_R
        wanted_R = self._weights[self._pool_R] > 0
        wanted_R = wanted_R if wanted_R.any() else np.ones(len(wanted_R), bool)
        soonest_R: Bools = wanted_R & (self._wakes_R == self._wakes_R[wanted_R].min())
        return soonest_R

    def _oldest(self, candidates_R: Bools) -> int:
        """Of these, the row that was picked the longest ago."""
        indices = np.flatnonzero(candidates_R)
        return int(indices[np.argmin(self._last_R[indices])])
