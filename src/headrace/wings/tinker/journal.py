"""The journal of a server of the Tinker protocol: the durable record of sessions, models, requests and their results,
checkpoints and samplers.

A model is what one client trains; its requests are numbered by ``seq`` from 0, the request that creates it. A request
of a model is written before it is acknowledged. Its result is written in the same transaction as the other changes that
the request makes. So after a kill at any moment, the state of a model can be restored: its last copy on the disk is
read, and the requests after that copy are computed again.
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
"""The number of sampled sequences that are kept for viewing; older sequences are deleted."""

WAITING, DONE, FAILED = "waiting", "done", "failed"
"""The states of a request: waiting ──▶ done or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One request of a model, as a row of the journal."""

    model: str
    """The id of the model."""
    seq: int
    """The number of the request among the requests of the model; request 0 creates the model."""
    kind: str
    """The name of the request's endpoint, such as ``forward_backward``."""
    body: bytes
    """The body as the client sent it; empty after it was deleted."""
    status: str
    """:data:`WAITING`, :data:`DONE` or :data:`FAILED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The status and the result of a request."""

    status: str
    """:data:`WAITING`, :data:`DONE` or :data:`FAILED`."""
    result: bytes | None
    """The answer for the client, an error if the request failed; ``None`` while the request waits, and after the answer
    was fetched and then deleted."""


class Journal:
    """An SQLite database in the state directory of a server. One process at a time may open it for writing, and any
    thread of that process may call its methods. Other processes may read it meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Open the journal in ``directory``, or create it. Raises :class:`~headrace.base.errors.ConfigError` for a
        journal of another format, and if another process has opened it."""
        self._descriptor = _lock_directory(directory)
        """Descriptor of the lock file, which keeps other servers out of the directory."""
        self._lock = threading.RLock()
        """Held during each query and each transaction, since threads share the connection."""
        try:
            # only the owner may read the clients' data; SQLite creates its other files with the same mode
            made = os.open(directory / JOURNAL_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            with suppress(PermissionError):  # the file of another owner, who chooses its mode
                os.fchmod(made, 0o600)
            os.close(made)
            self._db = sqlite3.connect(directory / JOURNAL_FILE, check_same_thread=False, isolation_level=None)
        except (OSError, sqlite3.DatabaseError) as error:
            os.close(self._descriptor)
            raise _make_unusable_error(directory, error) from None
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (_FORMAT,))
            found = self.value("format")
        except sqlite3.DatabaseError as error:
            self.close()
            raise _make_unusable_error(directory, error) from None
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
        """Return a context whose changes are committed together at its end, or rolled back if it raises."""
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
        """Return the value stored under ``key`` in the journal's table of settings; ``None`` if it was never set."""
        row = self.one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row["value"])

    def set_value(self, key: str, value: str) -> None:
        """Store ``value`` under ``key`` in the journal's table of settings, and replace an earlier value."""
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def one(self, query: str, *values: object) -> sqlite3.Row | None:
        """Return the first row of the SQL ``query``, whose parameters are ``values``; ``None`` if there are no rows."""
        with self._lock:
            row: sqlite3.Row | None = self._db.execute(query, values).fetchone()
            return row

    def all(self, query: str, *values: object) -> list[sqlite3.Row]:
        """Return all rows of the SQL ``query``, whose parameters are ``values``."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def run(self, query: str, *values: object) -> int:
        """Execute the SQL ``query``, which changes the database, with the parameters ``values``; return the number of
        rows changed."""
        with self._lock:
            return self._db.execute(query, values).rowcount

    def accept(self, entry: JournalEntry, now_s: float) -> bool:
        """Write the request ``entry``, which arrived at ``now_s``, with the status :data:`WAITING`. Return whether the
        request is new: a repeated request, with the number of an earlier request, changes nothing."""
        return bool(
            self.run(
                "INSERT OR IGNORE INTO requests (model, seq, kind, body, created_s) VALUES (?, ?, ?, ?, ?)",
                entry.model, entry.seq, entry.kind, entry.body, now_s,
            )
        )  # fmt: skip

    def outcome(self, model: str, seq: int) -> Outcome | None:
        """Return the status and the result of the request ``seq`` of ``model``; ``None`` for an unknown one."""
        row = self.one("SELECT status, result FROM requests WHERE model = ? AND seq = ?", model, seq)
        return None if row is None else Outcome(status=row["status"], result=row["result"])

    def set_kind(self, model: str, seq: int, kind: str) -> None:
        """Change the kind of the request ``seq`` of ``model``, which failed because of a server error, to ``kind``, so
        that the request is not repeated when the state of the model is restored."""
        self.run("UPDATE requests SET kind = ? WHERE model = ? AND seq = ?", kind, model, seq)

    def end(self, model: str, seq: int, status: str, result: bytes) -> None:
        """Write the final ``status`` of the request ``seq`` of ``model``, :data:`DONE` or :data:`FAILED`, and its
        ``result`` for the client."""
        self.run("UPDATE requests SET status = ?, result = ? WHERE model = ? AND seq = ?", status, result, model, seq)

    def drop_body(self, model: str, seq: int) -> None:
        """Delete the body of the request ``seq`` of ``model``, which has ended and never has to be computed again."""
        self.run("UPDATE requests SET body = x'' WHERE model = ? AND seq = ?", model, seq)

    def entry(self, model: str, seq: int) -> JournalEntry | None:
        """Return the request ``seq`` of a model; ``None`` for an unknown one."""
        row = self.one("SELECT model, seq, kind, body, status FROM requests WHERE model = ? AND seq = ?", model, seq)
        return None if row is None else JournalEntry(**dict(row))

    def expire_unused(self, now_s: float) -> None:
        """Set the expiry time of unnamed weights (kind ``ephemeral``) to ``now_s``, except weights that a sampler uses
        whose session has not ended."""
        self.run(
            "UPDATE checkpoints SET expires_s = ? WHERE kind = 'ephemeral' AND directory NOT IN "
            "(SELECT directory FROM samplers JOIN sessions ON sessions.id = samplers.session "
            "WHERE directory IS NOT NULL AND NOT finished)",
            now_s,
        )

    def keep_used(self, sessions: Container[str], now_s: float, kept_s: float) -> None:
        """Extend the life of unnamed weights that samplers of the living ``sessions`` use: set their expiry time to
        ``kept_s`` seconds after ``now_s``. Weights that have more than half of this time left are not changed."""
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
        """Write sampled sequences. Each row contains the values of the columns of the table ``samples``, without the
        first column, ``number``."""
        with self.transaction():
            self._db.executemany("INSERT INTO samples VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def forget_samples(self) -> None:
        """Delete all sampled sequences but the last :data:`KEPT_SAMPLES`."""
        self.run("DELETE FROM samples WHERE number <= (SELECT max(number) FROM samples) - ?", KEPT_SAMPLES)

    def forget_before(self, model: str, seq: int, fetched_before_s: float) -> None:
        """Delete data of a model's requests up to ``seq``, whose effect a copy on the disk includes: their bodies, and
        the results that were fetched before the time ``fetched_before_s``."""
        with self.transaction():
            self.run("UPDATE requests SET body = x'' WHERE model = ? AND seq <= ? AND length(body) > 0", model, seq)
            self.run(
                "UPDATE requests SET result = NULL WHERE model = ? AND seq <= ? AND fetched_s < ?",
                model, seq, fetched_before_s,
            )  # fmt: skip


def _lock_directory(directory: Path) -> int:
    """Lock the state directory for this process, and return the descriptor of the lock file; closing the descriptor
    releases the lock. Raises :class:`~headrace.base.errors.ConfigError` while another process has the lock, and for a
    directory that cannot be written."""
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


def _make_unusable_error(directory: Path, error: Exception) -> ConfigError:
    """Return the error for a journal in ``directory`` that could not be opened because of ``error``."""
    return ConfigError(
        f"--state {directory}: its {JOURNAL_FILE} cannot be used: {error}",
        remedy="end the program that writes it, put its file back, or give another directory",
    )


def state_directory(directory: Path) -> Path:
    """Create the state directory of a server with its lock file, where they are missing, and return it. Raises
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


def decode_facts(row: Mapping[str, Any] | sqlite3.Row) -> dict[str, Any]:
    """Return the decoded JSON of the column ``facts`` of a row."""
    found: dict[str, Any] = json.loads(row["facts"])
    return found
