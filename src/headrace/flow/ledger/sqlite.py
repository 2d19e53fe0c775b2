"""The ledger in one SQLite file (write-ahead log: a killed process loses no transaction it had made)."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import LedgerError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, TurnPart
from headrace.base.types.group import GroupState
from headrace.flow.ledger.base import Conservation, GroupAttempt, Lengths, Operation, Recalled, RecalledGroup
from headrace.flow.ledger.books import UNFINISHED, Books
from headrace.flow.ledger.migrate import migrate
from headrace.flow.ledger.rows import checksum_rows, damage, insert, next_id, seal_all, seal_rows
from headrace.flow.ledger.turns import decode_turns, join_parts
from headrace.flow.ledger.upkeep import LogCopier
from headrace.flow.ledger.writing import Writing

T = TypeVar("T")

IN_MEMORY = ":memory:"
UNNAMED = ""
"""The path of a file that nobody else sees and that is gone when it is closed."""
CLOSE_S = 1.0
"""How long the end waits for whoever is at it."""
COPY_BYTES = 4 << 20
"""The log is copied into the database each time it has grown by about this much."""
ADOPTED = "the rows of this ledger were given checksums as they were found"
"""What a ledger notes that an older program has begun."""
_TRANSACTION_BYTES = 16 << 10
"""About what the log grows by with each transaction, beside what it holds."""


class SqliteLedger:
    """A ledger at ``path`` (:data:`IN_MEMORY` or :data:`UNNAMED` for one that ends with the process).

    ``group_size`` and ``groups_per_step`` are written down with a new ledger; one that was begun with others is
    refused, because its groups could not be told from this run's. ``checked`` reads an existing file from end to end
    before it is used, and compares every row with its checksum: damage is found now and not at the step that comes upon
    it, or never.
    """

    def __init__(self, path: Path | str, *, group_size: int, groups_per_step: int, checked: bool = False) -> None:
        self._path = path
        self._one_at_a_time = threading.RLock()  # a writer's thread records while another counts
        self._uncopied_bytes = 0
        self._copier: LogCopier | None = None
        with self._explained("opened"):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                checksum_rows(self._db)
                if checked:
                    self._check_pages()
                self._db.execute("PRAGMA synchronous=OFF")  # a new file has nothing to lose yet
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                migrate(self._db, str(self._path), self._seal)
                if checked:
                    self._check_rows()
                self._prepare({"group_size": group_size, "groups_per_step": groups_per_step})
            except BaseException:
                self._db.close()
                raise
        self._books = Books(self._db, group_size)

    @classmethod
    def open(cls, path: Path, *, checked: bool = False) -> SqliteLedger:
        """An existing ledger, for reading or resuming. :class:`~headrace.base.errors.LedgerError` if there is none."""
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}", remedy="give the directory of a run")
        try:
            with closing(sqlite3.connect(path)) as db:
                meta = dict(db.execute("SELECT key, value FROM meta"))
            group_size, groups_per_step = int(meta["group_size"]), int(meta["groups_per_step"])
        except (sqlite3.Error, KeyError, ValueError) as error:  # a text of it that is no UTF-8 is a ValueError
            raise LedgerError(
                f"{path} is not a ledger: {error}", remedy="restore the file, or start a new run directory"
            ) from None
        return cls(path, group_size=group_size, groups_per_step=groups_per_step, checked=checked)

    def apply(self, *operations: Operation) -> None:
        with self._explained("written"):
            with self._transaction():
                writing = Writing(self._db)
                for operation in operations:
                    writing.add(operation)
                writing.finish()
            self._uncopied_bytes += writing.num_bytes + _TRANSACTION_BYTES
            if self._uncopied_bytes >= COPY_BYTES:
                self._copy_log()

    def recall(self, step: int) -> Recalled:
        with self._explained("rolled back"), self._transaction():
            self._db.execute(
                "UPDATE groups SET state = ? WHERE step >= ? AND state != ?",
                (GroupState.READY, step, GroupState.DROPPED),
            )
            self._db.execute(f"UPDATE groups SET state = ? WHERE {UNFINISHED}", (GroupState.SUBMITTED,))
            self._db.execute(
                "UPDATE groups SET state = ? WHERE state = ?", (GroupState.RELEASED, GroupState.TRAINED)
            )  # its step is in the checkpoint
            for table in ("steps", "learned"):
                self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
            self._db.execute(seal_rows("groups"))
        with self._explained("read"):
            rows = self._db.execute(
                "SELECT number, row, state, oldest_version, step FROM groups WHERE state IN (?, ?) ORDER BY number",
                (GroupState.SUBMITTED, GroupState.READY),
            ).fetchall()
            groups = self._books.groups()
            return Recalled(
                num_submitted=groups.submitted,
                dropped=groups.dropped,
                num_released=groups.trained,
                groups=tuple(
                    RecalledGroup(
                        number=number, row=row, state=GroupState(state), oldest_version=oldest, step=taken,
                        episodes=tuple(self.episodes(number)), begun=tuple(self._begun(number)),
                    )
                    for number, row, state, oldest, taken in rows
                ),
                checksums={version: checksum for version, checksum in self.checksums().items() if version >= step},
            )  # fmt: skip

    def episodes(self, number: int) -> list[EpisodeGraph]:
        with self._explained("read"):
            rows = self._db.execute(
                "SELECT position, status, cause, reward, reward_parts, agent_rewards, turns, entry"
                " FROM episodes JOIN bundles ON id = bundle WHERE group_number = ? ORDER BY position",
                (number,),
            )
            return [
                EpisodeGraph(
                    key=EpisodeKey(number, position),
                    turns=decode_turns(turns, entry),
                    status=EpisodeStatus(status),
                    reward=reward,
                    parts=json.loads(parts),
                    agent_rewards=json.loads(agents),
                    cause=cause,
                )
                for position, status, cause, reward, parts, agents, turns, entry in rows
            ]

    def _begun(self, number: int) -> list[TurnPart]:
        rows = self._db.execute(
            "SELECT position, turn, prompt, tokens FROM parts WHERE group_number = ? ORDER BY position, turn, id",
            (number,),
        )
        spans: dict[tuple[int, int, str], list[bytes]] = {}
        for position, turn, prompt, tokens in rows:
            spans.setdefault((position, turn, prompt), []).append(tokens)
        return [
            join_parts(EpisodeKey(number, position), turn, prompt, blobs)
            for (position, turn, prompt), blobs in spans.items()
        ]

    def conservation(self) -> Conservation:
        return self._read(self._books.conservation)

    def ages(self) -> dict[int, int]:
        return self._read(self._books.ages)

    def lengths(self) -> Lengths:
        return self._read(self._books.lengths)

    def attempts(self, first: int) -> list[GroupAttempt]:
        return self._read(lambda: self._books.attempts(first))

    def steps(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        query = "SELECT step, number FROM steps JOIN groups USING (step) ORDER BY step, number"
        for step, number in self._rows(query):
            found[step] = (*found.get(step, ()), number)
        return found

    def checksums(self) -> dict[int, str]:
        return dict(self._rows("SELECT version, checksum FROM versions ORDER BY version"))

    def notes(self) -> list[tuple[str, str, float]]:
        return self._rows("SELECT kind, detail, at_s FROM notes ORDER BY id")

    def persist(self) -> None:
        with self._explained("flushed"):
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def close(self) -> None:
        if self._one_at_a_time.acquire(timeout=CLOSE_S):
            if self._copier is not None:
                self._copier.close()
            self._db.close()
            self._one_at_a_time.release()
        # else a thread of a writer hangs in it: the end of the process closes it

    def _copy_log(self) -> None:
        self._uncopied_bytes = 0
        if isinstance(self._path, str):
            return  # there is no log
        if self._copier is None:
            self._db.execute("PRAGMA wal_autocheckpoint=0")
            self._copier = LogCopier(self._path)
        self._copier.tell()

    def _read(self, figure: Callable[[], T]) -> T:
        with self._explained("read"), self._transaction("DEFERRED"):  # one moment, whoever writes meanwhile
            return figure()

    def _rows(self, query: str) -> list[Any]:
        with self._explained("read"):
            return self._db.execute(query).fetchall()

    def _check_pages(self) -> None:
        try:
            found = [words.replace("\n", ", ") for (words,) in self._db.execute("PRAGMA integrity_check(3)")]
        except sqlite3.OperationalError:
            raise  # a full disk, say: nothing is known of the file
        except sqlite3.DatabaseError as error:
            found = [str(error)]
        if found != ["ok"]:
            raise self._damaged(f"{'; '.join(found)}", ", and its write-ahead log does not mend it")

    def _check_rows(self) -> None:
        found = damage(self._db)
        if found:
            raise self._damaged(found, "")

    def _damaged(self, found: str, why_not_mended: str) -> LedgerError:
        return LedgerError(
            f"the ledger {self._path} is damaged ({found}){why_not_mended}; {self._last_step()}",
            remedy="restore it from a copy, or start a new run directory from the newest checkpoint (model.path)",
        )

    def _last_step(self) -> str:
        try:
            (step,) = self._db.execute("SELECT max(step) FROM steps").fetchone()
        except sqlite3.DatabaseError:
            return "not even its steps can be read"
        return "it holds no step" if step is None else f"the last step that can be read is {step}"

    def _seal(self, before: int) -> None:
        """Give what is there its checksums, as the last part of a migration from format ``before``."""
        if before:
            detail = f"{ADOPTED}: an older program wrote them, in format {before}"
            self._db.execute(insert("notes"), (next_id(self._db, "notes"), "checksums", detail, 0.0))
        seal_all(self._db)

    def _prepare(self, expected: dict[str, int]) -> None:
        stated = [(key, str(value)) for key, value in expected.items()]
        self._db.executemany(insert("meta", otherwise="OR IGNORE"), stated)
        for key, value in self._db.execute("SELECT key, value FROM meta").fetchall():
            if str(expected.get(key, value)) != value:
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
