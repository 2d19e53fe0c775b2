"""Brings a database to the newest schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from importlib.resources import files

from headrace.base.errors import LedgerError


def steps() -> list[str]:
    """The migrations, oldest first; the schema's version is how many a database has taken."""
    found = sorted(
        (entry.name, entry.read_text(encoding="utf-8"))
        for entry in files("headrace.flow.ledger.migrations").iterdir()
        if entry.name.endswith(".sql")
    )
    assert [int(name[:4]) for name, _ in found] == list(range(1, len(found) + 1)), f"a gap in {found}"
    return [script for _, script in found]


def schema_version(db: sqlite3.Connection) -> int:
    """How many migrations ``db`` has taken; 0 for a new one."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return int(version)


def migrate(db: sqlite3.Connection, where: str, finish: Callable[[int], None]) -> None:
    """Take the migrations that are missing, each whole or not at all.

    ``finish`` is called within the last of them, with how many the database had taken before.

    :class:`~headrace.base.errors.LedgerError` for a database that a newer program wrote.
    """
    scripts, version = steps(), schema_version(db)
    if version > len(scripts):
        raise LedgerError(
            f"{where} has ledger format {version}, this program writes {len(scripts)}",
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
