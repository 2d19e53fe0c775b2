"""The durable record of a server: what it has acknowledged, and what became of it.

A request of a model is written before it is acknowledged, and its result in the transaction that ends it. So after a
kill, at whichever moment, the state of a model is its last copy on the disk and the requests after it, computed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, created_s REAL NOT NULL, finished INTEGER NOT NULL DEFAULT 0, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, number INTEGER NOT NULL, created_s REAL NOT NULL,
    used_s REAL NOT NULL, spec TEXT, copy TEXT, copied_seq INTEGER NOT NULL DEFAULT -1);
CREATE TABLE IF NOT EXISTS requests (
    model TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, created_s REAL NOT NULL,
    status TEXT NOT NULL DEFAULT 'waiting', result BLOB, fetched_s REAL, PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, kind TEXT NOT NULL, created_s REAL NOT NULL, expires_s REAL,
    directory TEXT NOT NULL, size_bytes INTEGER NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, base TEXT NOT NULL, path TEXT, kind TEXT NOT NULL, model TEXT,
    directory TEXT, version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sampler TEXT NOT NULL, created_s REAL NOT NULL,
    prompt BLOB NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL, stop TEXT NOT NULL);
"""
_FORMAT = "1"
JOURNAL_FILE, LOCK_FILE = "journal.sqlite", "server.lock"
KEPT_SAMPLES = 2000
"""How many sampled sequences are kept for who looks at them later; older ones are deleted."""

WAITING, DONE, FAILED = "waiting", "done", "failed"
"""The states of a request: waiting ──▶ done or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One request of a model."""

    model: str
    seq: int
    """Its place among the requests of the model; 0 makes the model."""
    kind: str
    """The endpoint."""
    body: bytes
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a request."""

    status: str
    """:data:`WAITING`, :data:`DONE` or :data:`FAILED`."""
    result: bytes | None
    """The answer; ``None`` while it waits, and after its time has passed."""


class Journal:
    """An SQLite database in ``directory``, written by one process at a time; any of its threads may call. Others may
    read it meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Open the journal, or make it. Raises :class:`~headrace.base.errors.ConfigError` for one of another format,
        and if another process has it open."""
        self._descriptor = _hold(directory)
        self._lock = threading.RLock()
        try:
            # what clients sent is for the owner alone, as the key is; sqlite gives the files beside it the same mode
            made = os.open(directory / JOURNAL_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            with suppress(PermissionError):  # of another owner, whose choice its mode is
                os.fchmod(made, 0o600)
            os.close(made)
            self._db = sqlite3.connect(directory / JOURNAL_FILE, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.DatabaseError) as error:
            os.close(self._descriptor)
            raise _unusable(directory, error) from None
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (_FORMAT,))
            found = self.value("format")
        except sqlite3.DatabaseError as error:
            self.close()
            raise _unusable(directory, error) from None
        if found != _FORMAT:
            self.close()
            raise ConfigError(
                f"--state {directory} is of format {found}, and this version writes {_FORMAT}",
                remedy="give another directory, or the version that made it",
            )

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()
            os.close(self._descriptor)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes within this context at once, or none."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have ended it
                    self._db.execute("ROLLBACK")
                raise

    def value(self, key: str) -> str | None:
        """Return a setting of the state; ``None`` if it was never set."""
        row = self.one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row["value"])

    def set_value(self, key: str, value: str) -> None:
        """Set a setting of the state."""
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def one(self, query: str, *values: object) -> sqlite3.Row | None:
        """Return the first row of ``query``; ``None`` if it has none."""
        with self._lock:
            row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
            return row

    def all(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Return the rows of ``query``."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def run(self, query: str, *values: object) -> int:
        """Change the database, and return the number of rows changed."""
        with self._lock:
            return self._db.execute(query, values).rowcount

    def accept(self, entry: JournalEntry, now_s: float) -> bool:
        """Write a request; return whether it is new."""
        return bool(
            self.run(
                "INSERT OR IGNORE INTO requests (model, seq, kind, body, created_s) VALUES (?, ?, ?, ?, ?)",
                entry.model, entry.seq, entry.kind, entry.body, now_s,
            )
        )  # fmt: skip

    def outcome(self, model: str, seq: int) -> Outcome | None:
        """Return what became of a request; ``None`` for an unknown one."""
        row = self.one("SELECT status, result FROM requests WHERE model = ? AND seq = ?", model, seq)
        return None if row is None else Outcome(status=row["status"], result=row["result"])

    def set_kind(self, model: str, seq: int, kind: str) -> None:
        """Change the kind of a request, so that a replay does not repeat it."""
        self.run("UPDATE requests SET kind = ? WHERE model = ? AND seq = ?", kind, model, seq)

    def end(self, model: str, seq: int, status: str, result: bytes) -> None:
        """Write the result of a request."""
        self.run("UPDATE requests SET status = ?, result = ? WHERE model = ? AND seq = ?", status, result, model, seq)

    def drop_body(self, model: str, seq: int) -> None:
        """Forget the body of a request that has ended, and that is never computed again."""
        self.run("UPDATE requests SET body = x'' WHERE model = ? AND seq = ?", model, seq)

    def entry(self, model: str, seq: int) -> JournalEntry | None:
        """Return a request; ``None`` for an unknown one."""
        row = self.one("SELECT model, seq, kind, body, status FROM requests WHERE model = ? AND seq = ?", model, seq)
        return None if row is None else JournalEntry(**dict(row))

    def expire_unused(self, now_s: float) -> None:
        """Let weights without a name expire that no sampler of a living session uses."""
        self.run(
            "UPDATE checkpoints SET expires_s = ? WHERE kind = 'ephemeral' AND directory NOT IN "
            "(SELECT directory FROM samplers JOIN sessions ON sessions.id = samplers.session "
            "WHERE directory IS NOT NULL AND NOT finished)",
            now_s,
        )

    def keep_used(self, sessions: Container[str], now_s: float, kept_s: float) -> None:
        """Let weights without a name that samplers of ``sessions`` use expire ``kept_s`` from now; those that have more
        than half of this time left stay as they are."""
        rows = self.all(
            "SELECT checkpoints.path, session FROM checkpoints "
            "JOIN samplers ON samplers.directory = checkpoints.directory "
            "WHERE checkpoints.kind = 'ephemeral' AND expires_s < ?",
            now_s + kept_s / 2,
        )
        for row in rows:
            if row["session"] in sessions:
                self.run("UPDATE checkpoints SET expires_s = ? WHERE path = ?", now_s + kept_s, row["path"])

    def keep_samples(self, rows: Sequence[tuple[object, ...]]) -> None:
        """Write sampled sequences, each as the values of the columns after its number."""
        with self.transaction():
            self._db.executemany("INSERT INTO samples VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def forget_samples(self) -> None:
        """Delete the sampled sequences before the last :data:`KEPT_SAMPLES`."""
        self.run("DELETE FROM samples WHERE number <= (SELECT max(number) FROM samples) - ?", KEPT_SAMPLES)

    def forget_before(self, model: str, seq: int, fetched_before_s: float) -> None:
        """Drop the bodies of requests up to ``seq``, which a copy on the disk covers, and results that were fetched
        before a time."""
        with self.transaction():
            self.run("UPDATE requests SET body = x'' WHERE model = ? AND seq <= ? AND length(body) > 0", model, seq)
            self.run(
                "UPDATE requests SET result = NULL WHERE model = ? AND seq <= ? AND fetched_s < ?",
                model, seq, fetched_before_s,
            )  # fmt: skip


def _hold(directory: Path) -> int:
    """Return a descriptor that holds the directory until it is closed. Raises
    :class:`~headrace.base.errors.ConfigError` while another process holds it, and for one that cannot be written."""
    state_directory(directory)
    descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"--state {directory} is used by another server", remedy="end that server, or give another directory"
        ) from None
    return descriptor


def _unusable(directory: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"--state {directory}: its {JOURNAL_FILE} cannot be used: {error}",
        remedy="end the program that writes it, put its file back, or give another directory",
    )


def state_directory(directory: Path) -> Path:
    """Return the directory of a state, which is made if there is none. Raises
    :class:`~headrace.base.errors.ConfigError` if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.close(os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600))
    except IsADirectoryError:
        raise ConfigError(
            f"--state {directory}: its {LOCK_FILE} is a directory", remedy="delete it, or give another directory"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--state {directory}: {error.strerror}", remedy="give a directory that this user can write"
        ) from None
    return directory


def facts_of(row: Mapping[str, Any] | sqlite3.Row) -> dict[str, Any]:
    """Return the column ``facts`` of a row."""
    found: dict[str, Any] = json.loads(row["facts"])
    return found
