"""Checksums of the rows of a ledger's SQLite database, which detect bits that have flipped on the disk before damaged
tokens are trained.

The last column of each table is ``row_checksum``: the 64-bit XXH3 hash of the other columns of the row, in order. A
statement that inserts a row also writes its checksum (:func:`insert`); after an update, :func:`seal_rows` computes it
again in the same transaction. The table ``meta`` also contains a checksum of the schema. SQLite itself finds damage to
the structure of its file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache

import msgspec
import xxhash

COLUMNS: dict[str, tuple[str, ...]] = {
    "groups": ("number", "row", "state", "reason", "oldest_version", "step", "submitted_s", "moved_s"),
    "episodes": (
        *("group_number", "position", "status", "cause", "reward", "sampled_tokens", "oldest_version"),
        *("newest_version", "ended_s", "reward_parts", "agent_rewards", "bundle", "entry"),
    ),
    "bundles": ("id", "turns"),
    "parts": ("id", "group_number", "position", "turn", "prompt", "sampled_tokens", "tokens"),
    "lost_tokens": ("reason", "tokens"),
    "steps": ("step", "trained_tokens", "dropped_tokens", "ages", "trained_s", "updates", "lost"),
    "learned": ("step", "tokens"),
    "versions": ("version", "checksum", "committed_s"),
    "notes": ("id", "kind", "detail", "at_s"),
    "meta": ("key", "value"),
}
"""The columns of each table that the checksum of a row covers: all columns except the checksum itself. The first column
identifies the row."""
_SCHEMA = "schema"
"""The key of the checksum of the schema in the table ``meta``."""


def checksum_rows(db: sqlite3.Connection) -> None:
    """Register the SQL function ``row_checksum(...)`` in the connection ``db``. Call this before any statement that
    writes to the ledger."""
    db.create_function("row_checksum", -1, _row_checksum, deterministic=True)


def _row_checksum(*values: int | float | str | bytes | None) -> bytes:
    """Return the checksum of the values of one row, eight bytes. SQL calls it as ``row_checksum``."""
    return xxhash.xxh3_64_digest(msgspec.msgpack.encode(values))


@cache
def insert(table: str, *, otherwise: str = "") -> str:
    """Return the SQL statement that writes one row of ``table`` with its checksum; its parameters are all columns in
    :data:`COLUMNS`.

    Numbers of REAL columns must be given as floats, because the checksum covers the values as given. ``otherwise`` is a
    conflict clause such as ``"OR REPLACE"``.

    >>> into, values = insert("lost_tokens").split(" SELECT ")
    >>> into
    'INSERT  INTO lost_tokens (reason, tokens, row_checksum)'
    >>> values
    '*, row_checksum(column1, column2) FROM (VALUES (?, ?))'
    """
    columns = COLUMNS[table]
    # SQLite's names for the columns of VALUES
    values = ", ".join(f"column{place}" for place in range(1, len(columns) + 1))
    # each parameter occurs once: using one twice needs numbered parameters, for which Python 3.12.0 to 3.12.3 warns
    return (
        f"INSERT {otherwise} INTO {table} ({', '.join(columns)}, row_checksum)"
        f" SELECT *, row_checksum({values}) FROM (VALUES ({', '.join('?' * len(columns))}))"
    )


@cache
def seal_rows(table: str, condition: str = "") -> str:
    """Return the SQL statement that computes the checksums of rows of ``table`` again after an update. ``condition`` is
    the SQL condition that selects the rows; empty for all rows."""
    columns = ", ".join(COLUMNS[table])
    return f"UPDATE {table} SET row_checksum = row_checksum({columns})" + (f" WHERE {condition}" if condition else "")


def next_id(db: sqlite3.Connection, table: str) -> int:
    """Return the ``id`` for the next row of ``table`` in the database ``db``. SQLite cannot choose it, because the
    row's checksum covers it."""
    return int(db.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()[0])


def seal_all(db: sqlite3.Connection) -> None:
    """Compute and write the checksums of all rows and of the schema of the database ``db``. The last migration ends
    with this call."""
    for table in COLUMNS:
        db.execute(seal_rows(table))
    db.execute(insert("meta", otherwise="OR REPLACE"), (_SCHEMA, _schema(db)))


def damage(db: sqlite3.Connection) -> str:
    """Return a text for an error message that describes the damage of the ledger in the database ``db``: which rows, or
    the schema, do not match their checksums. Empty if all match. The ledger may have an older schema, if its rows have
    checksums."""
    problems = [_changed_rows(db, table) for table in COLUMNS]
    stored = db.execute("SELECT value FROM meta WHERE key = ?", (_SCHEMA,)).fetchone()
    if stored is None or stored[0] != _schema(db):
        problems.append("its schema has changed since it was written")
    return "; ".join(filter(None, problems))


def _changed_rows(db: sqlite3.Connection, table: str) -> str:
    """Return a text that says how many rows of ``table`` in the database ``db`` do not match their checksums, and which
    is the first; empty if all match."""
    try:
        # the columns that the file has: a schema before a migration has fewer than COLUMNS
        columns = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")][:-1]
        if not columns:  # a later schema has the table; a table that this schema lacks changes the schema's checksum
            return ""
        changed = f"FROM {table} WHERE row_checksum IS NOT row_checksum({', '.join(columns)})"
        (count,) = db.execute(f"SELECT count(*) {changed}").fetchone()
        if not count:
            return ""
        (first,) = db.execute(f"SELECT {columns[0]} {changed} LIMIT 1").fetchone()
        rows = f"{count} rows of its table {table} have" if count > 1 else f"1 row of its table {table} has"
        return f"{rows} changed since it was written (the first: {columns[0]} {first})"
    except sqlite3.OperationalError as error:
        if "user-defined function" not in str(error) and "decode" not in str(error):
            raise
        return f"its table {table} holds text that cannot be decoded"


def _schema(db: sqlite3.Connection) -> str:
    """Return a hash of the SQL definitions of all tables and indexes of the database."""
    rows: Sequence[tuple[str, ...]] = db.execute(
        "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema ORDER BY type, name"
    ).fetchall()
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(rows))
