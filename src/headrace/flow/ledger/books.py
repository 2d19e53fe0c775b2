"""Queries that count groups, episodes and tokens in the SQLite database of a ledger. The module only reads, and
computes every number by a query of its own.

The table ``groups`` has a row for each group of attempts at a task, ``episodes`` a row for each episode that has ended,
and ``parts`` the recorded tokens of turns that are still running.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from typing import TypeVar

from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.flow.ledger.base import Conservation, GroupAttempt, Lengths, UnitCounts

K = TypeVar("K", str, int)


def _listed(values: tuple[str, ...]) -> str:
    """Return the names as a list in SQL, such as ``('trained', 'released')``."""
    return f"({', '.join(map(repr, values))})"


IN_FLIGHT = f"state IN {_listed(tuple(state.value for state in GroupState if state.in_flight))}"
TRAINED = f"state IN {_listed((GroupState.TRAINED.value, GroupState.RELEASED.value))}"
UNTRAINED = f"status IN {_listed(tuple(status.value for status in EpisodeStatus if status.untrained))}"
UNFINISHED = f"state IN {_listed((GroupState.ADMITTED.value, GroupState.RUNNING.value, GroupState.SCORED.value))}"
_UNCLOSED = f"({UNFINISHED} OR state = 'submitted')"
_REASON = "CASE WHEN instr(cause, ':') > 0 THEN substr(cause, 1, instr(cause, ':') - 1) ELSE cause END"
_EPISODES = "FROM episodes JOIN groups ON number = group_number"
_PARTS = "FROM parts JOIN groups ON number = group_number"
LATE = "late"
"""The reason under which the recorded tokens of an episode are counted if its group was trained without it."""


class Books:
    """The queries that count the contents of a ledger's SQLite database. Methods raise ``sqlite3.Error``."""

    def __init__(self, db: sqlite3.Connection, group_size: int) -> None:
        """Use the connection ``db``. Each group of the ledger has ``group_size`` episodes."""
        self._db = db
        self._group_size = group_size

    def conservation(self) -> Conservation:
        """Return the counts of groups, episodes and tokens by outcome."""
        return Conservation(groups=self.groups(), episodes=self.episodes(), tokens=self.tokens())

    def groups(self) -> UnitCounts:
        """Return the number of groups by outcome."""
        return UnitCounts(
            submitted=self.count("SELECT count(*) FROM groups"),
            trained=self.count(f"SELECT count(*) FROM groups WHERE {TRAINED}"),
            dropped=self.tally("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"),
            in_flight=self.count(f"SELECT count(*) FROM groups WHERE {IN_FLIGHT}"),
        )

    def episodes(self) -> UnitCounts:
        """Return the number of episodes by outcome. Episodes that have ended are counted by their rows. Every other
        episode of a group has the outcome of the group."""
        size = self._group_size
        failed = self.tally(f"SELECT {_REASON}, count(*) {_EPISODES} WHERE {UNTRAINED} GROUP BY 1")
        in_dropped_groups = self.tally(
            f"SELECT reason, count(*) * {size} - (SELECT count(*) {_EPISODES} WHERE {UNTRAINED}"
            " AND state = 'dropped' AND reason = g.reason) FROM groups g WHERE state = 'dropped' GROUP BY reason"
        )
        return UnitCounts(
            submitted=size * self.count("SELECT count(*) FROM groups"),
            trained=self.count(f"SELECT count(*) {_EPISODES} WHERE status = 'scored' AND {TRAINED}"),
            dropped=_add(failed, in_dropped_groups),
            in_flight=size * self.count(f"SELECT count(*) FROM groups WHERE {IN_FLIGHT}")
            - self.count(f"SELECT count(*) {_EPISODES} WHERE {UNTRAINED} AND {IN_FLIGHT}"),
        )

    def tokens(self) -> UnitCounts:
        """Return the number of recorded sampled tokens by outcome, including tokens of running turns."""
        total, parts = "SELECT coalesce(sum(sampled_tokens), 0)", "sum(sampled_tokens)"
        lost = self.tally("SELECT reason, tokens FROM lost_tokens")
        unusable = [json.loads(dropped) for (dropped,) in self._db.execute("SELECT dropped_tokens FROM steps")]
        return UnitCounts(
            submitted=self.count(f"{total} FROM episodes") + self.count(f"{total} FROM parts") + sum(lost.values()),
            trained=self.count("SELECT coalesce(sum(trained_tokens), 0) FROM steps"),
            dropped=_add(
                self.tally(f"SELECT {_REASON}, sum(sampled_tokens) {_EPISODES} WHERE {UNTRAINED} GROUP BY 1"),
                self.tally(
                    f"SELECT reason, sum(sampled_tokens) {_EPISODES} WHERE status = 'scored' AND state = 'dropped'"
                    " GROUP BY reason"
                ),
                self.tally(f"SELECT reason, {parts} {_PARTS} WHERE state = 'dropped' GROUP BY reason"),
                self.tally(f"SELECT '{LATE}', {parts} {_PARTS} WHERE {TRAINED}"),
                lost,
                *unusable,
            ),
            in_flight=self.count(f"{total} {_EPISODES} WHERE status = 'scored' AND {IN_FLIGHT}")
            + self.count(f"{total} {_PARTS} WHERE {IN_FLIGHT}"),
        )

    def ages(self) -> dict[int, int]:
        """Return the number of trained tokens by age in versions, in ascending order of age."""
        steps = [json.loads(ages) for (ages,) in self._db.execute("SELECT ages FROM steps")]
        return dict(sorted(_add(*({int(age): tokens for age, tokens in ages.items()} for ages in steps)).items()))

    def lengths(self) -> Lengths:
        """Return the lengths, in sampled tokens, of all episodes of groups that were trained or dropped, and the
        lengths of the trained episodes.

        Groups in flight are left out: their short episodes end first, which would distort the comparison. Cancelled
        episodes are left out, because their full length is unknown.
        """
        withdrawn = f"status = '{EpisodeStatus.LEFT_OUT.value}' AND reward IS NULL"
        ended_query = f"SELECT sampled_tokens {_EPISODES} WHERE NOT ({IN_FLIGHT} OR ({withdrawn})) ORDER BY 1"
        trained_query = f"SELECT sampled_tokens {_EPISODES} WHERE status = 'scored' AND {TRAINED} ORDER BY 1"
        return Lengths(
            submitted=self._column(ended_query),
            trained=self._column(trained_query),
            num_withdrawn=self.count(f"SELECT count(*) {_EPISODES} WHERE {withdrawn}"),
        )

    def attempts(self, first: int) -> list[GroupAttempt]:
        """Return the groups from number ``first`` on, in order, with the rewards of their episodes."""
        rewards: dict[int, list[float]] = {}
        rewards_query = (
            "SELECT group_number, reward FROM episodes WHERE group_number >= ? AND reward IS NOT NULL ORDER BY"
        )
        for number, reward in self._db.execute(f"{rewards_query} group_number, position", (first,)):
            rewards.setdefault(number, []).append(reward)
        groups = f"SELECT number, row, oldest_version, NOT {_UNCLOSED} FROM groups WHERE number >= ? ORDER BY number"
        return [
            GroupAttempt(
                number=number,
                row=row,
                oldest_version=version,
                closed=bool(closed),
                rewards=tuple(rewards.get(number, ())),
            )
            for number, row, version, closed in self._db.execute(groups, (first,))
        ]

    def count(self, query: str) -> int:
        """Return the single number that ``query`` selects."""
        return int(self._db.execute(query).fetchone()[0])

    def tally(self, query: str) -> dict[str, int]:
        """Return the counts by reason that ``query`` selects as pairs (reason, count), without counts of 0."""
        return {reason: count for reason, count in self._db.execute(query) if count}

    def _column(self, query: str) -> tuple[int, ...]:
        """Return all numbers that ``query`` selects, in a single column."""
        return tuple(length for (length,) in self._db.execute(query))


def _add(*tallies: dict[K, int]) -> dict[K, int]:
    """Return the sums of several dictionaries of counts, key by key."""
    total: Counter[K] = Counter()
    for tally in tallies:
        total.update(tally)
    return dict(total)
