"""The ledger in one SQLite file with a write-ahead log, so that a killed process loses no committed transaction.

The ledger is the durable record of every group of attempts at a task, every episode and every token of a run. A
*decided* episode is an episode of a group that was trained or dropped. The module also applies the migrations of the
schema, and copies the log into the database file in a thread.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import LedgerError
from headrace.base.store import COLUMNS_LOST
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, TokenChunk
from headrace.base.types.group import GroupState
from headrace.base.types.outline import LostGroup
from headrace.flow.ledger.base import Conservation, GroupAttempt, Lengths, Operation, ResumedGroup, ResumeState
from headrace.flow.ledger.books import UNFINISHED, Books
from headrace.flow.ledger.rows import checksum_rows, damage, insert, next_id, seal_all, seal_rows
from headrace.flow.ledger.turns import EPISODE_COLUMNS, decode_episode_row, join_parts
from headrace.flow.ledger.writing import Writing

T = TypeVar("T")

IN_MEMORY = ":memory:"
"""The value of ``path`` for a database in memory."""
UNNAMED = ""
"""The value of ``path`` for a temporary file, which no other process can open and which is deleted when it is
closed."""
CLOSE_S = 1.0
"""Greatest number of seconds that :meth:`SqliteLedger.close` waits for another thread that uses the database."""
COPY_BYTES = 4 << 20
"""The write-ahead log is copied into the database each time it has grown by about this many bytes."""
ADOPTED = "the rows of this ledger were given checksums as they were found"
"""The beginning of the note that is recorded when the rows of a ledger without checksums get their checksums."""
CHECKSUMS_SINCE = 7
"""The first version of the schema whose rows have checksums."""
_TRANSACTION_BYTES = 16 << 10
"""Approximate number of bytes that a transaction adds to the log beside its data."""


class SqliteLedger:
    """A ledger in an SQLite file, in memory (:data:`IN_MEMORY`), or in a temporary file (:data:`UNNAMED`). It is
    thread-safe: one thread may write while another thread queries it."""

    def __init__(self, path: Path | str, *, group_size: int, groups_per_step: int, checked: bool = False) -> None:
        """Open the ledger at ``path``, or create it. Raises :class:`~headrace.base.errors.LedgerError` if it cannot be
        used.

        ``group_size`` and ``groups_per_step`` are stored in a new ledger. A ledger with other sizes is refused, because
        its groups would have other sizes than the groups of this run. ``checked`` reads an existing file completely and
        compares every row with its checksum, so that damage is found when the run starts and not at a later step.
        """
        self._path = path
        self._lock = threading.RLock()
        """The lock that is held during a query or transaction, since the thread of a writer records while another
        thread runs queries."""
        self._uncopied_bytes = 0
        """The size of the transactions since the log was copied last, approximately."""
        self._copier: LogCopier | None = None
        """The thread that copies the log; ``None`` until it is needed."""
        with self._translated_errors("opened"):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                checksum_rows(self._db)
                if checked:
                    self._check_pages()
                self._db.execute("PRAGMA synchronous=OFF")  # the setup of a new file need not survive a power failure
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                if CHECKSUMS_SINCE <= schema_version(self._db) < len(steps()):
                    self._check_rows()  # the migration gives all rows new checksums, which would hide damage
                migrate(self._db, str(self._path), self._seal)
                if checked:
                    self._check_rows()
                self._check_sizes({"group_size": group_size, "groups_per_step": groups_per_step})
            except BaseException:
                self._db.close()
                raise
        self._books = Books(self._db, group_size)
        """The queries that count the ledger's contents."""

    @classmethod
    def open(cls, path: Path, *, checked: bool = False, in_use: bool = False) -> SqliteLedger:
        """Open the existing ledger at ``path`` with the sizes with which it was created, and return it.

        ``checked`` compares every row with its checksum. ``in_use`` says that a run in progress writes the ledger. Its
        schema is then not migrated, because a program of an older version would go on to write rows of its own format.
        Raises :class:`~headrace.base.errors.LedgerError` if there is no ledger, and if a ledger in use would have to be
        migrated."""
        if not path.is_file():
            raise LedgerError(f"no ledger at {path}", remedy="give the directory of a run")
        try:
            with closing(sqlite3.connect(path)) as db:
                meta = dict(db.execute("SELECT key, value FROM meta"))
                version = schema_version(db)
            group_size, groups_per_step = int(meta["group_size"]), int(meta["groups_per_step"])
        except (sqlite3.Error, KeyError, ValueError) as error:  # text that is not UTF-8 raises ValueError
            raise LedgerError(
                f"{path} is not a ledger: {error}", remedy="restore the file, or start a new run directory"
            ) from None
        if in_use and version < len(steps()):
            raise LedgerError(
                f"{path} has ledger format {version}, this program reads {len(steps())}, and a run of an older version "
                "of headrace that writes it is in progress",
                remedy="use the version of headrace that runs it, or wait until the run has ended",
            )
        return cls(path, group_size=group_size, groups_per_step=groups_per_step, checked=checked)

    def apply(self, *operations: Operation) -> None:
        """Record ``operations`` in one transaction. When the write-ahead log has grown by :data:`COPY_BYTES`, request a
        copy into the database file."""
        with self._translated_errors("written"):
            with self._transaction():
                writing = Writing(self._db)
                for operation in operations:
                    writing.add(operation)
                writing.finish()
            self._uncopied_bytes += writing.num_bytes + _TRANSACTION_BYTES
            if self._uncopied_bytes >= COPY_BYTES:
                self._request_copy()

    def roll_back(self, step: int) -> ResumeState:
        """Restore the state of the checkpoint of ``step``: groups that this step or a later step took become READY, and
        unfinished groups become SUBMITTED. Return the groups and counts with which the run continues."""
        with self._translated_errors("rolled back"), self._transaction():
            self._db.execute(
                "UPDATE groups SET state = ? WHERE step >= ? AND state != ?",
                (GroupState.READY, step, GroupState.DROPPED),
            )
            self._db.execute(f"UPDATE groups SET state = ? WHERE {UNFINISHED}", (GroupState.SUBMITTED,))
            # the checkpoint contains their steps
            self._db.execute("UPDATE groups SET state = ? WHERE state = ?", (GroupState.RELEASED, GroupState.TRAINED))
            for table in ("steps", "learned"):
                self._db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
            self._db.execute(seal_rows("groups"))
        with self._translated_errors("read"):
            rows = self._db.execute(
                "SELECT number, row, state, oldest_version, step FROM groups WHERE state IN (?, ?) ORDER BY number",
                (GroupState.SUBMITTED, GroupState.READY),
            ).fetchall()
            groups = self._books.groups()
            return ResumeState(
                num_submitted=groups.submitted,
                dropped=groups.dropped,
                num_released=groups.trained,
                groups=tuple(
                    ResumedGroup(
                        number=number, row=row, state=GroupState(state), oldest_version=oldest, step=taken_by,
                        episodes=tuple(self.episodes(number)), partial_turns=tuple(self._partial_turns(number)),
                    )
                    for number, row, state, oldest, taken_by in rows
                ),
                checksums={version: checksum for version, checksum in self.checksums().items() if version >= step},
            )  # fmt: skip

    def episodes(self, number: int) -> list[EpisodeGraph]:
        """Return the episodes of the group ``number`` that have ended, in the order of their positions."""
        with self._translated_errors("read"):
            rows = self._db.execute(
                f"SELECT position, {EPISODE_COLUMNS} FROM episodes JOIN bundles ON id = bundle WHERE group_number = ?"
                " ORDER BY position",
                (number,),
            )
            return [decode_episode_row(EpisodeKey(number, position), row) for position, *row in rows]

    def _partial_turns(self, number: int) -> list[TokenChunk]:
        """Return the recorded tokens of the unfinished turns of the group ``number``, one chunk for each turn."""
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
        """Return the counts of groups, episodes and tokens by outcome, all counted at the same moment."""
        return self._read_snapshot(self._books.conservation)

    def ages(self) -> dict[int, int]:
        """Return the number of trained tokens by age, in versions."""
        return self._read_snapshot(self._books.ages)

    def lengths(self) -> Lengths:
        """Return the lengths, in sampled tokens, of the decided episodes and of the trained ones."""
        return self._read_snapshot(self._books.lengths)

    def attempts(self, first: int) -> list[GroupAttempt]:
        """Return the groups from number ``first`` on, with the rewards of their episodes."""
        return self._read_snapshot(lambda: self._books.attempts(first))

    def steps(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the groups that each step trained, by step."""
        found: dict[int, tuple[int, ...]] = {}
        query = "SELECT step, number FROM steps JOIN groups USING (step) ORDER BY step, number"
        for step, number in self._fetch_all(query):
            found[step] = (*found.get(step, ()), number)
        return found

    def updates(self) -> dict[int, int]:
        """Return the number of updates of the weights that each step made with its batch, by step."""
        return dict(self._fetch_all("SELECT step, updates FROM steps ORDER BY step"))

    def lost(self) -> dict[int, tuple[LostGroup, ...]]:
        """Return the groups that carried no loss in their step because columns of them could not be read, by step;
        none for a step of an older version of Headrace, which recorded only that there were such groups."""
        with self._translated_errors("read"):
            rows = self._db.execute("SELECT step, dropped_tokens, lost FROM steps ORDER BY step")
            found = {
                step: (json.loads(dropped), msgspec.json.decode(lost, type=tuple[LostGroup, ...]))
                for step, dropped, lost in rows
            }
        return {step: lost for step, (dropped, lost) in found.items() if lost or COLUMNS_LOST in dropped}

    def checksums(self) -> dict[int, str]:
        """Return the checksum of the weights of every committed version, by version."""
        return dict(self._fetch_all("SELECT version, checksum FROM versions ORDER BY version"))

    def notes(self) -> list[tuple[str, str, float]]:
        """Return the kind, the detail and the Unix time in seconds of every note, oldest first."""
        return self._fetch_all("SELECT kind, detail, at_s FROM notes ORDER BY id")

    def persist(self) -> None:
        """Copy the write-ahead log into the database file and sync both to the disk, so that all operations survive a
        power failure."""
        with self._translated_errors("flushed"):
            self._db.execute("PRAGMA wal_checkpoint(FULL)")

    def close(self) -> None:
        """Close the database. If another thread still uses it after :data:`CLOSE_S` seconds, leave it open."""
        if self._lock.acquire(timeout=CLOSE_S):
            if self._copier is not None:
                self._copier.close()
            self._db.close()
            self._lock.release()
        # otherwise a thread hangs in a database call, and the end of the process closes the database

    def _request_copy(self) -> None:
        """Make a thread copy the write-ahead log into the database file, and return at once. A ledger without a file
        has no log."""
        self._uncopied_bytes = 0
        if isinstance(self._path, str):
            return
        if self._copier is None:
            self._db.execute("PRAGMA wal_autocheckpoint=0")
            self._copier = LogCopier(self._path)
        self._copier.request()

    def _read_snapshot(self, figure: Callable[[], T]) -> T:
        """Return the result of ``figure``, a function that runs several queries, in one read transaction: all queries
        see the same state of the ledger, even while another thread writes."""
        with self._translated_errors("read"), self._transaction("DEFERRED"):
            return figure()

    def _fetch_all(self, query: str) -> list[Any]:
        """Return all rows of ``query``."""
        with self._translated_errors("read"):
            return self._db.execute(query).fetchall()

    def _check_pages(self) -> None:
        """Raise :class:`~headrace.base.errors.LedgerError` if SQLite's integrity check finds damage in the structure of
        the database file."""
        try:
            problems = [words.replace("\n", ", ") for (words,) in self._db.execute("PRAGMA integrity_check(3)")]
        except sqlite3.OperationalError:
            raise  # not damage of the file: a full disk, for example
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the message of the check may quote damaged text
            problems = [str(error)]
        if problems != ["ok"]:
            raise self._damage_error(f"{'; '.join(problems)}", ", and its write-ahead log does not fix it")

    def _check_rows(self) -> None:
        """Raise :class:`~headrace.base.errors.LedgerError` if a row does not match its checksum."""
        problems = damage(self._db)
        if problems:
            raise self._damage_error(problems, "")

    def _damage_error(self, damage: str, why_not_mended: str) -> LedgerError:
        """Return the error to raise for a damaged ledger. ``damage`` is the description of the damage;
        ``why_not_mended`` is appended to the message, and may be empty."""
        return LedgerError(
            f"the ledger {self._path} is damaged ({damage}){why_not_mended}; {self._describe_last_step()}",
            remedy="restore it from a copy, or start a new run directory from the newest checkpoint (model.path)",
        )

    def _describe_last_step(self) -> str:
        """Return a clause for an error message that names the last step that can still be read."""
        try:
            (step,) = self._db.execute("SELECT max(step) FROM steps").fetchone()
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            return "not even its steps can be read"
        return "it holds no step" if step is None else f"the last step that can be read is {step}"

    def _seal(self, before: int) -> None:
        """Write the checksums of all existing rows, as the last part of a migration. ``before`` is the version of the
        schema before the migration; 0 for a new ledger. Existing rows of a ledger without checksums cannot be verified;
        a note records that."""
        if 0 < before < CHECKSUMS_SINCE:
            detail = f"{ADOPTED}: an older program wrote them, in format {before}"
            self._db.execute(insert("notes"), (next_id(self._db, "notes"), "checksums", detail, 0.0))
        seal_all(self._db)

    def _check_sizes(self, expected: dict[str, int]) -> None:
        """Store the sizes ``expected`` (``group_size``, ``groups_per_step``) in a new ledger. Raises
        :class:`~headrace.base.errors.LedgerError` if an existing ledger has other sizes."""
        pairs = [(key, str(value)) for key, value in expected.items()]
        self._db.executemany(insert("meta", otherwise="OR IGNORE"), pairs)
        for key, value in self._db.execute("SELECT key, value FROM meta").fetchall():
            if str(expected.get(key, value)) != value:
                raise LedgerError(
                    f"flow.{key}={expected[key]}, but the run at {self._path} was begun with {value}",
                    remedy=f"set flow.{key}={value} to resume it, or start a new run directory",
                )

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """Run the body in one transaction, which is rolled back if the body raises. ``kind`` is the kind of transaction
        in SQL: IMMEDIATE for writing, DEFERRED for reading."""
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _translated_errors(self, action: str) -> Iterator[None]:
        """Run the body while holding the lock, and convert each error of the database to a
        :class:`~headrace.base.errors.LedgerError` with the message that the ledger cannot be ``action`` (such as
        "opened")."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise LedgerError(
                f"the ledger {self._path} cannot be {action}: {error}",
                remedy="check that its disk has room (df -h) and the file is writable and whole, then resume the run",
            ) from error


def steps() -> list[str]:
    """Return the SQL scripts of the migrations of the ledger's schema, oldest first. The version of a schema is the
    number of migrations that were applied to it."""
    scripts = sorted(
        (entry.name, entry.read_text(encoding="utf-8"))
        for entry in files("headrace.flow.ledger.migrations").iterdir()
        if entry.name.endswith(".sql")
    )
    assert [int(name[:4]) for name, _ in scripts] == list(range(1, len(scripts) + 1)), f"a gap in {scripts}"
    return [script for _, script in scripts]


def schema_version(db: sqlite3.Connection) -> int:
    """Return the version of the schema of ``db``, which is the number of migrations that were applied to it; 0 for a
    new database."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection, path: str, finish: Callable[[int], None]) -> None:
    """Apply the migrations that the schema of ``db`` lacks, each in one transaction. ``path`` is the path of the
    database, for error messages.

    ``finish`` is called at the end of the last of these transactions, with the version of the schema before the
    migration. It is not called if no migration is missing.

    Raises :class:`~headrace.base.errors.LedgerError` for a database that a newer program wrote.
    """
    scripts, version = steps(), schema_version(db)
    if version > len(scripts):
        raise LedgerError(
            f"{path} has ledger format {version}, this program writes {len(scripts)}",
            remedy="use the version of headrace that wrote it, or start a new run directory",
        )
    for number, script in enumerate(scripts[version:], version + 1):
        try:
            db.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number};")
            if number == len(scripts):
                finish(version)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


COPIER_CLOSE_S = 10.0
"""Greatest number of seconds that :meth:`LogCopier.close` waits for a running copy. Data that is not copied stays in
the log."""


class LogCopier:
    """A thread that copies the write-ahead log of a ledger into its database file on request, while other threads
    record operations."""

    def __init__(self, path: Path) -> None:
        """Start the thread for the database file ``path``."""
        self._path = path
        self._requested = threading.Event()
        """The event that is set when a copy is requested, or the thread should end."""
        self._closing = False
        """Whether the thread should end."""
        self._error: sqlite3.Error | None = None
        """The error of the last copy that failed; ``None`` if there is none."""
        self._thread = threading.Thread(target=self._run, name="ledger-upkeep", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Request a copy and return at once. Raises the ``sqlite3.Error`` of an earlier copy that failed."""
        if self._error is not None:
            raise self._error
        self._requested.set()

    def close(self) -> None:
        """Stop the thread. Wait for a running copy for at most :data:`COPIER_CLOSE_S` seconds."""
        self._closing = True
        self._requested.set()
        self._thread.join(COPIER_CLOSE_S)

    def _run(self) -> None:
        """Copy the log at each request: the body of the thread. An error ends the thread, and the next :meth:`request`
        raises this error."""
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as db:
                self._copy_on_request(db)
        except sqlite3.Error as error:
            self._error = error

    def _copy_on_request(self, db: sqlite3.Connection) -> None:
        """Copy the write-ahead log into the database file at each request, until the copier is closed."""
        while True:
            self._requested.wait()
            self._requested.clear()
            if self._closing:
                return
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
