"""Copies the write-ahead log into the database in a thread of its own, so that whoever records never waits for a disk
to be done: with SQLite's own way one transaction in a thousand takes as long as the disk likes."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

CLOSE_S = 10.0
"""How long the end waits for a copy that is under way; the log keeps what it has not copied."""


class LogCopier:
    """Copies when it is told; whatever comes meanwhile is recorded behind it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = threading.Event()
        self._closing = False
        self._error: sqlite3.Error | None = None
        self._thread = threading.Thread(target=self._run, name="ledger-upkeep", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """There is something to copy. Raises the ``sqlite3.Error`` of the copy before, if it failed."""
        if self._error is not None:
            raise self._error
        self._told.set()

    def close(self) -> None:
        """Copy no more."""
        self._closing = True
        self._told.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            with closing(sqlite3.connect(self._path, isolation_level=None)) as db:
                self._copy_when_told(db)
        except sqlite3.Error as error:
            self._error = error

    def _copy_when_told(self, db: sqlite3.Connection) -> None:
        while True:
            self._told.wait()
            self._told.clear()
            if self._closing:
                return
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
