"""Temporary files and directories of a run, in a directory such as ``/tmp`` or ``/dev/shm``. If the run is killed, the
next run removes them; locked ones are in use.

A lock ends with the process that holds it, wherever that process runs. A process id would not do, since it means
nothing in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

LOCK = "lock"
"""The name of the file within a leased directory that is locked; a leased file is locked itself."""
_NAME = re.compile(r"headrace-\d+-")


class Lease:
    """A locked temporary path that belongs to this process until :meth:`end` removes it. The constructors raise
    ``OSError`` if it cannot be made. The path gets its final name only after it is locked, so that another run cannot
    remove it in between."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def directory(cls, root: Path) -> Lease:
        """Make and lock a new directory in ``root`` that only this user can enter."""
        made = Path(tempfile.mkdtemp(prefix=".headrace-", dir=root))
        try:
            descriptor = _locked(made / LOCK)
            return cls(made.rename(_name(root)), descriptor)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    @classmethod
    def file(cls, root: Path) -> Lease:
        """Make and lock a new empty file in ``root``, which another process of the run will fill."""
        made = root / f".headrace-{secrets.token_hex(4)}"
        try:
            descriptor = _locked(made)
            return cls(made.rename(_name(root)), descriptor)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def end(self) -> None:
        """Remove the path and release the lock."""
        _remove(self.path)
        os.close(self._descriptor)


def sweep(root: Path) -> None:
    """Remove the files and directories that killed runs of this user left in ``root``."""
    for path in root.glob("headrace-*"):
        if _NAME.match(path.name):
            with contextlib.suppress(OSError):  # in use, another user's, or swept by another run just now
                os.close(_locked(path / LOCK if path.is_dir() else path, new=False))
                _remove(path)


def _name(root: Path) -> Path:
    """Return a new path in ``root`` by whose name :func:`sweep` recognises it: with this process's id and a random
    part."""
    return root / f"headrace-{os.getpid()}-{secrets.token_hex(4)}"


def _locked(path: Path, *, new: bool = True) -> int:
    """Open ``path``, which is made if it is ``new``, and lock it; return the descriptor, which holds the lock until it
    is closed. Raises ``OSError`` if another process holds the lock, or the file cannot be opened."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path) -> None:
    """Delete a file or a directory, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
