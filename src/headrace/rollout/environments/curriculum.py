"""A curriculum: it chooses the row of each new group by how often the rows were solved before.

    unseen ──first group──▶ hard   rate < low       ┐ rows move between them with their running solve rate
                            target low ≤ rate ≤ high │ a row whose latest group was solved always or never
                            easy   high < rate      ┘ rests for some epochs

A choice is a function of the seed, the number of the group, the rows chosen before, and the outcomes of groups that
were admitted under *older policy versions* than the version that is committed now. All other outcomes are kept until a
later version is committed. Therefore the durations of answers have no influence: a synchronous run, and any run with
the same interleaving, chooses the same rows, also after a crash.

Shape legend: R rows of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic
from pydantic import Field

from headrace.base.config import Section
from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from headrace.flow.ledger.base import GroupAttempt

_DRAWS = 0x435552
"""A constant in the seed that makes these random draws independent of all others."""
_UNSEEN, _HARD, _TARGET, _EASY = range(4)
"""The indices of the pools, in the order of the curriculum's weights."""
Bools = npt.NDArray[np.bool_]


class CurriculumConfig(Section):
    """Settings of a curriculum: the solve rates that separate the pools of rows, and the weight of each pool."""

    low: float = Field(default=0.2, ge=0, le=1)
    """A row with a lower solve rate is hard."""
    high: float = Field(default=0.8, ge=0, le=1)
    """A row with a higher solve rate is easy. Rows between ``low`` and ``high`` are in the target pool."""
    unseen: float = Field(default=1.0, gt=0)
    """The weight of a row that was never attempted."""
    hard: float = Field(default=0.25, ge=0)
    """The weight of a hard row."""
    target: float = Field(default=1.0, ge=0)
    """The weight of a row in the target pool."""
    easy: float = Field(default=0.25, ge=0)
    """The weight of an easy row."""
    threshold: float = 0.5
    """A reward above this value means that the task was solved."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """The weight of a row's earlier solve rate in its new solve rate after another group has attempted it; 0: only the
    latest group counts."""
    rest: float = Field(default=2.0, ge=0)
    """The number of epochs for which a row is not chosen after a group in which all episodes or no episode solved it.
    An epoch is as many groups as there are rows."""

    @pydantic.model_validator(mode="after")
    def _target_range_is_valid(self) -> Self:
        """Refuse a target range whose lower end is above its upper end."""
        if self.low > self.high:
            raise ConfigError(
                f"data.curriculum has low={self.low:g} above high={self.high:g}: no row could be of the target",
                remedy="set low <= high",
            )
        return self


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one group of episodes, all of which attempted the same row."""

    number: int
    """The number of the group."""
    row: int
    """The index of the row that the group attempted."""
    version: int
    """The policy version that was committed when the group was admitted."""
    solved: float
    """The fraction of the group's scored episodes that solved the task."""


class RowRecord(msgspec.Struct, frozen=True, array_like=True):
    """The saved state of one row that was chosen at least once."""

    row: int
    """The index of the row."""
    last: int
    """The number of the last group that the row was chosen for."""
    rate: float | None
    """The running solve rate; ``None`` if no outcome is known yet."""
    wakes: int
    """The number of the first group for which the row may be chosen again."""


class CurriculumState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a curriculum, as a snapshot of the run contains it."""

    rows: tuple[RowRecord, ...] = ()
    """The rows that were chosen before."""
    waiting: tuple[GroupOutcome, ...] = ()
    """Outcomes that are not used yet, because no later version was committed since their groups were admitted."""
    next_number: int = 0
    """The number of the next group, which is the first group without a chosen row."""
    open: tuple[int, ...] = ()
    """The numbers of earlier groups that have no outcome yet and were not dropped."""

    @property
    def first_unknown(self) -> int:
        """The number of the first group without a known outcome. :meth:`Curriculum.restore` needs the groups from this
        number on."""
        return min(self.open, default=self.next_number)


class Curriculum:
    """The chooser of rows: the run calls :meth:`pick` for each new group. ``epochs`` limits the number of groups, in
    passes over the dataset; ``None`` means no limit. ``shuffle`` says whether unseen rows are chosen in random
    order."""

    def __init__(
        self, config: CurriculumConfig, *, num_rows: int, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        """Create a curriculum with ``num_rows`` unseen rows. Unseen rows are chosen in an order derived from ``seed``,
        or in dataset order without ``shuffle``."""
        self._config = config
        self._seed = seed
        self._num_groups = None if epochs is None else epochs * num_rows
        """The number of groups of the run; ``None`` if it is not limited."""
        self.num_rest = round(config.rest * num_rows)
        """The number of groups for which a row may rest."""
        self._weights = np.array([config.unseen, config.hard, config.target, config.easy])
        """The weight of a row in each pool, by the index of the pool."""
        order_R = np.random.default_rng([seed, 0]).permutation(num_rows) if shuffle else np.arange(num_rows)
        self._last_R = np.empty(num_rows, np.int64)
        """The number of the last group that attempted each row. Unseen rows have negative numbers, in the order in
        which they are to be chosen."""
        self._last_R[order_R] = np.arange(num_rows) - num_rows
        self._rate_R = np.full(num_rows, np.nan)
        """The running solve rate of each row; NaN for unseen rows."""
        self._pool_R = np.full(num_rows, _UNSEEN)
        """The index of the pool of each row."""
        self._wakes_R = np.zeros(num_rows, np.int64)
        """The number of the first group for which each row may be chosen again."""
        self._waiting: list[GroupOutcome] = []
        """Outcomes that are not used yet, because no later version was committed since their groups were admitted."""
        self._next_number = 0
        """The number of the next group."""
        self._open: set[int] = set()
        """The numbers of groups that have no outcome yet and were not dropped."""

    def pick(self, number: int, version: int) -> int | None:
        """Return the index of the row that group ``number`` attempts, given the committed ``version``; ``None`` after
        the last epoch.

        Call this method in the order of the group numbers. A call takes time proportional to the number of rows: 1 ms
        for 100,000 rows.
        """
        if self._num_groups is not None and number >= self._num_groups:
            return None
        self._use_outcomes(version)
        row = self._oldest(self._candidates_R(number))
        self._record_pick(number, row)
        return row

    def observe(self, number: int, row: int, version: int, rewards: Sequence[float]) -> None:
        """Record the rewards of group ``number``, which attempted ``row`` and was admitted under ``version``. Empty
        ``rewards`` mean that the group was dropped."""
        if number not in self._open:
            return
        self._open.discard(number)
        if rewards and row < len(self._last_R):
            solved = sum(reward > self._config.threshold for reward in rewards) / len(rewards)
            self._waiting.append(GroupOutcome(number=number, row=row, version=version, solved=solved))

    def pools(self) -> dict[str, int]:
        """Return the number of rows in each pool, by the pool's name: unseen, hard, target, easy."""
        counts = np.bincount(self._pool_R, minlength=4).tolist()
        return dict(zip(("unseen", "hard", "target", "easy"), counts, strict=True))

    def state(self) -> CurriculumState:
        """Return the current state, for a snapshot."""
        rows = np.flatnonzero(self._last_R >= 0).tolist()
        rates = [None if np.isnan(rate) else rate for rate in self._rate_R[rows].tolist()]
        columns = zip(rows, self._last_R[rows].tolist(), rates, self._wakes_R[rows].tolist(), strict=True)
        return CurriculumState(
            rows=tuple(RowRecord(*values) for values in columns),
            waiting=tuple(self._waiting),
            next_number=self._next_number,
            open=tuple(sorted(self._open)),
        )

    def restore(self, state: CurriculumState, since: Iterable[GroupAttempt]) -> None:
        """Set the state to ``state``, taken from a snapshot, and apply the groups ``since``: all groups from
        ``state.first_unknown`` on, in the order of their numbers."""
        num_rows = len(self._last_R)
        for record in state.rows:
            if record.row < num_rows:
                self._last_R[record.row], self._wakes_R[record.row] = record.last, record.wakes
                self._set_rate(record.row, record.rate)
        self._waiting = [outcome for outcome in state.waiting if outcome.row < num_rows]
        self._next_number, self._open = state.next_number, set(state.open)
        for group in since:
            if group.number >= self._next_number:
                self._record_pick(group.number, group.row)
            if group.closed:
                self.observe(group.number, group.row, group.oldest_version, group.rewards)

    def _record_pick(self, number: int, row: int) -> None:
        """Record that group ``number`` attempts ``row`` and has no outcome yet."""
        if row < len(self._last_R):
            self._last_R[row] = number
        self._open.add(number)
        self._next_number = number + 1

    def _use_outcomes(self, version: int) -> None:
        """Update solve rates, pools and resting rows with the outcomes of groups that were admitted under versions
        before ``version``, in the order of the groups' numbers. All other outcomes are kept for later."""
        usable = [outcome for outcome in self._waiting if outcome.version < version]
        usable.sort(key=lambda outcome: outcome.number)
        if not usable:
            return
        self._waiting = [outcome for outcome in self._waiting if outcome.version >= version]
        for outcome in usable:
            before = float(self._rate_R[outcome.row])
            memory = 0.0 if np.isnan(before) else self._config.memory
            self._set_rate(outcome.row, memory * (0.0 if memory == 0.0 else before) + (1 - memory) * outcome.solved)
            if outcome.solved in (0.0, 1.0):
                self._wakes_R[outcome.row] = outcome.number + self.num_rest

    def _set_rate(self, row: int, rate: float | None) -> None:
        """Set the running solve rate of a row, and move the row into the pool for that rate. If ``rate`` is ``None``,
        no outcome of the row is known, and it stays unseen."""
        if rate is None:
            return
        self._rate_R[row] = rate
        if rate < self._config.low:
            self._pool_R[row] = _HARD
        elif rate > self._config.high:
            self._pool_R[row] = _EASY
        else:
            self._pool_R[row] = _TARGET

    def _candidates_R(self, number: int) -> Bools:
        """Return the rows from which the row of group ``number`` is chosen, as a mask ``[R]`` of bool. One pool is
        drawn at random, with a probability proportional to the total weight of its rows that do not rest; its rows that
        do not rest are the candidates. If all rows with a weight rest, the candidates are the rows whose rest ends
        first."""
        free_R = self._wakes_R <= number
        # the weight of a pool grows with its number of rows, so that each row has the weight of the settings
        weights = np.bincount(self._pool_R[free_R], minlength=4) * self._weights
        if weights.sum() > 0:
            rng = np.random.default_rng([self._seed, _DRAWS, number])
            candidates_R: Bools = free_R & (self._pool_R == rng.choice(4, p=weights / weights.sum()))
            return candidates_R
        # all rows with a weight rest: rows of weight 0 are chosen only if there are no others
        eligible_R = self._weights[self._pool_R] > 0
        eligible_R = eligible_R if eligible_R.any() else np.ones(len(eligible_R), bool)
        soonest_R: Bools = eligible_R & (self._wakes_R == self._wakes_R[eligible_R].min())
        return soonest_R

    def _oldest(self, candidates_R: Bools) -> int:
        """Return the candidate that was chosen the longest time ago. Unseen rows come before all others."""
        indices = np.flatnonzero(candidates_R)
        return int(indices[np.argmin(self._last_R[indices])])
