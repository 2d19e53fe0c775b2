"""The ledger in one SQLite file (write-ahead log: a killed process loses no transaction it had made)."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import LedgerError
from headrace.flow.ledger.base import (
    CommitVersion,
    Conservation,
    EndEpisode,
    EndStep,
    Fates,
    Move,
    Note,
    Operation,
    Recalled,
    RecalledGroup,
    Submit,
)
from headrace.flow.ledger.turns import decode_turns, encode_turns
from headrace.types.episode import Episode, EpisodeKey, EpisodeStatus
from headrace.types.group import GroupState

SCHEMA_VERSION = 1
CLOSE_S = 1.0
"""How long the end waits for whoever is at it."""

_IN_FLIGHT = tuple(state.value for state in GroupState if state.in_flight)
_TRAINED = (GroupState.TRAINED.value, GroupState.RELEASED.value)
_UNFINISHED = (GroupState.ADMITTED.value, GroupState.RUNNING.value, GroupState.SCORED.value)


class SqliteLedger:
    """A ledger at ``path`` (``":memory:"`` for one that ends with the process).

    ``group_size`` and ``groups_per_step`` are written down with a new ledger; one that was begun with others is
    refused, because its groups could not be told from this run's.
    """

    def __init__(self, path: Path | str, *, group_size: int, groups_per_step: int) -> None:
        self._path = path
        self._group_size = group_size
        self._one_at_a_time = threading.RLock()  # a writer's thread records while another counts
        self._write: dict[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Move: self._move,
            EndEpisode: self._end_episode,
            EndStep: self._end_step,
            CommitVersion: self._commit_version,
            Note: self._note,
        }
        with self._explained("opened"):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._prepare({"group_size": str(group_size), "groups_per_step": str(groups_per_step)})
            except BaseException:
                self._db.close()
                raise

    @classmethod
    def open(cls, path: Path) -> SqliteLedger:
        """An existing ledger, for reading or resuming. :class:`~headrace.errors.LedgerError` if there is none."""
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}", remedy="give the directory of a run")
        try:
            with closing(sqlite3.connect(path)) as db:
                meta = dict(db.execute("SELECT key, value FROM meta"))
            return cls(path, group_size=int(meta["group_size"]), groups_per_step=int(meta["groups_per_step"]))
        except (sqlite3.Error, KeyError, ValueError) as error:
            raise LedgerError(
                f"{path} is not a ledger: {error}", remedy="restore the file, or start a new run directory"
            ) from None

    def apply(self, operation: Operation) -> None:
        with self._explained("written"), self._transaction():
            self._write[type(operation)](operation)

    def _submit(self, op: Submit) -> None:
        self._db.executemany(
            "INSERT INTO groups (number, row, state, submitted_s, moved_s) VALUES (?, ?, ?, ?, ?)",
            [(n, row, GroupState.SUBMITTED, op.at_s, op.at_s) for n, row in zip(op.numbers, op.rows, strict=True)],
        )  # fmt: skip

    def _move(self, op: Move) -> None:
        self._db.executemany(
            "UPDATE groups SET state = ?, reason = ?, oldest_version = coalesce(?, oldest_version),"
            " step = coalesce(?, step), moved_s = ? WHERE number = ?",
            [(op.state, op.reason, op.oldest_version, op.step, op.at_s, number) for number in op.numbers],
        )

    def _end_episode(self, op: EndEpisode) -> None:
        episode = op.episode
        oldest, newest = episode.versions() or (None, None)
        self._db.execute(
            "INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                episode.key.group,
                episode.key.place,
                episode.status,
                episode.cause,
                episode.reward,
                episode.num_sampled,
                oldest,
                newest,
                encode_turns(episode.turns),
                op.at_s,
            ),
        )

    def _end_step(self, op: EndStep) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
            (op.step, op.trained_tokens, json.dumps(op.dropped_tokens), json.dumps(op.ages), op.at_s),
        )
        self._move(Move(numbers=op.numbers, state=GroupState.TRAINED, at_s=op.at_s))

    def _commit_version(self, op: CommitVersion) -> None:
        self._db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", (op.version, op.checksum, op.at_s))
        self._move(Move(numbers=op.numbers, state=GroupState.RELEASED, at_s=op.at_s))

    def _note(self, op: Note) -> None:
        self._db.execute("INSERT INTO notes (kind, detail, at_s) VALUES (?, ?, ?)", (op.kind, op.detail, op.at_s))

    def recall(self, step: int) -> Recalled:
        with self._explained("rolled back"), self._transaction():
            self._db.execute(
                "UPDATE groups SET state = ? WHERE step >= ? AND state != ?",
                (GroupState.READY, step, GroupState.DROPPED),
            )
            self._db.execute(
                f"UPDATE groups SET state = ? WHERE state IN ({_marks(_UNFINISHED)})",
                (GroupState.SUBMITTED, *_UNFINISHED),
            )
            self._db.execute(
                "UPDATE groups SET state = ? WHERE state = ?", (GroupState.RELEASED, GroupState.TRAINED)
            )  # its step is in the checkpoint
            self._db.execute("DELETE FROM steps WHERE step >= ?", (step,))
        with self._explained("read"):
            rows = self._db.execute(
                "SELECT number, row, state, oldest_version, step FROM groups WHERE state IN (?, ?) ORDER BY number",
                (GroupState.SUBMITTED, GroupState.READY),
            ).fetchall()
            return Recalled(
                num_submitted=self._count("SELECT count(*) FROM groups"),
                dropped=self._tally("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"),
                num_released=self._count("SELECT count(*) FROM groups WHERE state = 'released'"),
                groups=tuple(
                    RecalledGroup(
                        number=number, row=row, state=GroupState(state), oldest_version=oldest, step=taken,
                        episodes=tuple(self.episodes(number)),
                    )
                    for number, row, state, oldest, taken in rows
                ),
                checksums=dict(
                    self._db.execute("SELECT version, checksum FROM versions WHERE version >= ?", (step,)).fetchall()
                ),
            )  # fmt: skip

    def episodes(self, number: int) -> list[Episode]:
        """The episodes of one group that have ended, in order."""
        rows = self._db.execute(
            "SELECT position, status, cause, reward, turns FROM episodes WHERE group_number = ? ORDER BY position",
            (number,),
        )
        return [
            Episode(
                key=EpisodeKey(number, position),
                turns=decode_turns(turns),
                status=EpisodeStatus(status),
                reward=reward,
                cause=cause,
            )
            for position, status, cause, reward, turns in rows
        ]

    def conservation(self) -> Conservation:
        with self._explained("read"), self._transaction("DEFERRED"):  # one moment, whoever writes meanwhile
            return Conservation(groups=self._groups(), episodes=self._episodes(), tokens=self._tokens())

    def ages(self) -> dict[int, int]:
        """Tokens trained at each age."""
        total: dict[int, int] = {}
        with self._explained("read"):
            rows = self._db.execute("SELECT ages FROM steps").fetchall()
        for (ages,) in rows:
            for age, tokens in json.loads(ages).items():
                total[int(age)] = total.get(int(age), 0) + tokens
        return dict(sorted(total.items()))

    def notes(self) -> list[tuple[str, str, float]]:
        """Kind, detail and time of every note, oldest first."""
        with self._explained("read"):
            return self._db.execute("SELECT kind, detail, at_s FROM notes ORDER BY id").fetchall()

    def _groups(self) -> Fates:
        return Fates(
            submitted=self._count("SELECT count(*) FROM groups"),
            trained=self._count(f"SELECT count(*) FROM groups WHERE state IN ({_marks(_TRAINED)})", _TRAINED),
            dropped=self._tally("SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"),
            in_flight=self._count(f"SELECT count(*) FROM groups WHERE state IN ({_marks(_IN_FLIGHT)})", _IN_FLIGHT),
        )

    def _episodes(self) -> Fates:
        """Ended ones are counted by their rows; the others of a group stand or fall with it."""
        joined = "FROM episodes JOIN groups ON number = group_number"
        size = self._group_size
        failed = self._tally(f"SELECT {_REASON}, count(*) {joined} WHERE status = 'failed' GROUP BY 1")
        fallen = self._tally(
            f"SELECT reason, count(*) * {size} - (SELECT count(*) {joined} WHERE status = 'failed'"
            " AND state = 'dropped' AND reason = g.reason) FROM groups g WHERE state = 'dropped' GROUP BY reason"
        )
        in_flight = f"state IN ({_marks(_IN_FLIGHT)})"
        return Fates(
            submitted=size * self._count("SELECT count(*) FROM groups"),
            trained=self._count(
                f"SELECT count(*) {joined} WHERE status = 'scored' AND state IN ({_marks(_TRAINED)})", _TRAINED
            ),
            dropped=_add(failed, fallen),
            in_flight=size * self._count(f"SELECT count(*) FROM groups WHERE {in_flight}", _IN_FLIGHT)
            - self._count(f"SELECT count(*) {joined} WHERE status = 'failed' AND {in_flight}", _IN_FLIGHT),
        )

    def _tokens(self) -> Fates:
        """Tokens of episodes that have ended; those of running sequences are the engine's until then."""
        joined = "FROM episodes JOIN groups ON number = group_number"
        failed = self._tally(f"SELECT {_REASON}, sum(sampled_tokens) {joined} WHERE status = 'failed' GROUP BY 1")
        fallen = self._tally(
            f"SELECT reason, sum(sampled_tokens) {joined} WHERE status = 'scored' AND state = 'dropped' GROUP BY reason"
        )
        unusable: dict[str, int] = {}
        for (dropped,) in self._db.execute("SELECT dropped_tokens FROM steps"):
            unusable = _add(unusable, json.loads(dropped))
        return Fates(
            submitted=self._count("SELECT coalesce(sum(sampled_tokens), 0) FROM episodes"),
            trained=self._count("SELECT coalesce(sum(trained_tokens), 0) FROM steps"),
            dropped=_add(failed, fallen, unusable),
            in_flight=self._count(
                f"SELECT coalesce(sum(sampled_tokens), 0) {joined} WHERE status = 'scored'"
                f" AND state IN ({_marks(_IN_FLIGHT)})",
                _IN_FLIGHT,
            ),
        )

    def persist(self) -> None:
        with self._explained("flushed"):
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def close(self) -> None:
        if self._one_at_a_time.acquire(timeout=CLOSE_S):
            self._db.close()
            self._one_at_a_time.release()
        # else a thread of a writer hangs in it: the end of the process closes it

    def _count(self, query: str, values: tuple[str, ...] = ()) -> int:
        return int(self._db.execute(query, values).fetchone()[0])

    def _tally(self, query: str) -> dict[str, int]:
        return {reason: count for reason, count in self._db.execute(query) if count}

    def _prepare(self, expected: dict[str, str]) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found == 0:
            schema = files(__package__).joinpath("schema.sql").read_text(encoding="utf-8")
            meta = "".join(f"INSERT INTO meta VALUES ('{key}', '{value}');" for key, value in expected.items())
            self._db.executescript(f"BEGIN; {schema} {meta} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            return
        if found != SCHEMA_VERSION:
            raise LedgerError(
                f"{self._path} has ledger format {found}, this program writes {SCHEMA_VERSION}",
                remedy="use the version of headrace that wrote it, or start a new run directory",
            )
        for key, value in self._db.execute("SELECT key, value FROM meta").fetchall():
            if expected.get(key, value) != value:
                raise LedgerError(
                    f"flow.{key}={expected[key]}, but the run at {self._path} was begun with {value}",
                    remedy=f"set flow.{key}={value} to resume it, or start a new run directory",
                )

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled back already
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            with self._one_at_a_time:
                yield
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise LedgerError(
                f"the ledger {self._path} cannot be {action}: {error}",
                remedy="check that its disk has room (df -h) and the file is writable and whole, then resume the run",
            ) from error


_REASON = "CASE WHEN instr(cause, ':') > 0 THEN substr(cause, 1, instr(cause, ':') - 1) ELSE cause END"


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join("?" * len(values))


def _add(*tallies: dict[str, int]) -> dict[str, int]:
    total: dict[str, int] = {}
    for tally in tallies:
        for reason, count in tally.items():
            total[reason] = total.get(reason, 0) + count
    return total
