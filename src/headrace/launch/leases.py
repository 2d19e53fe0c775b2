"""Files and directories of a run that the next run removes when this one was killed: what is in use is locked.

A lock ends with the process that holds it, wherever that runs; a process id says nothing in another container.
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
_NAME = re.compile(r"headrace-\d+-")


class Lease:
    """A path that is ours until :meth:`end`, which removes it. ``OSError`` where it cannot be made.

    It gets its name only when it is locked, so that no sweep can come between.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def directory(cls, root: Path) -> Lease:
        """A new directory that only this user can enter."""
        made = Path(tempfile.mkdtemp(prefix=".headrace-", dir=root))
        try:
            descriptor = _locked(made / LOCK)
            return cls(made.rename(_name(root)), descriptor)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    @classmethod
    def file(cls, root: Path) -> Lease:
        """A new empty file, for another process of ours to fill."""
        made = root / f".headrace-{secrets.token_hex(4)}"
        try:
            descriptor = _locked(made)
            return cls(made.rename(_name(root)), descriptor)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def end(self) -> None:
        """Remove it."""
        _remove(self.path)
        os.close(self._descriptor)


def sweep(root: Path) -> None:
    """Remove what runs of this user left in ``root`` when they were killed."""
    for path in root.glob("headrace-*"):
        if _NAME.match(path.name):
            with contextlib.suppress(OSError):  # in use, another user's, or swept by another run just now
                os.close(_locked(path / LOCK if path.is_dir() else path, new=False))
                _remove(path)


def _name(root: Path) -> Path:
    return root / f"headrace-{os.getpid()}-{secrets.token_hex(4)}"


def _locked(path: Path, *, new: bool = True) -> int:
    """A descriptor of ``path`` that holds its lock; ``OSError`` where another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
