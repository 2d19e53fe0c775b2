"""Leases: temporary files and directories of a run, in a directory such as ``/tmp`` or ``/dev/shm``. A lease is locked
while it is in use. If a run is killed, the next run finds its leases unlocked and removes them.

The kernel releases a lock when the process that holds it ends. The id of the process in the file name would not
suffice, because process ids have no meaning in other containers.
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
"""The name of the file that is locked in a leased directory. A leased file is locked itself."""
_NAME = re.compile(r"headrace-\d+-")
"""A pattern for the names of leases."""


class Lease:
    """A locked temporary path that belongs to this process until :meth:`end` removes it. The constructors raise
    ``OSError`` if the path cannot be created. The path receives its final name only after it is locked, so that another
    run cannot remove it before."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Own ``path``, which is locked through the file descriptor ``descriptor``."""
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create_directory(cls, root: Path) -> Lease:
        """Create and lock a new directory in ``root`` that only this user can enter."""
        path = Path(tempfile.mkdtemp(prefix=".headrace-", dir=root))
        try:
            descriptor = _open_locked(path / LOCK)
            return cls(path.rename(_make_path(root)), descriptor)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def create_file(cls, root: Path) -> Lease:
        """Create and lock a new empty file in ``root``. Another process of the run will fill it."""
        path = root / f".headrace-{secrets.token_hex(4)}"
        try:
            descriptor = _open_locked(path)
            return cls(path.rename(_make_path(root)), descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def end(self) -> None:
        """Remove the path and release the lock."""
        try:
            _remove(self.path)
        finally:
            os.close(self._descriptor)


def sweep(root: Path) -> None:
    """Remove the files and directories that killed runs of this user have left in ``root``."""
    for path in root.glob("headrace-*"):
        if _NAME.match(path.name):
            with contextlib.suppress(OSError):  # in use, of another user, or just removed by another run
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    """Remove the lease ``path``. Raises ``OSError`` if a process uses it, or if it cannot be removed."""
    try:
        os.close(_open_locked(path / LOCK if path.is_dir() else path, new=False))
    except FileNotFoundError:
        path.rmdir()  # only an empty directory, all that is left where a removal was interrupted after the lock
    else:
        _remove(path)


def _make_path(root: Path) -> Path:
    """Return a new path in ``root``. :func:`sweep` recognises its name, which contains this process's id and a random
    part."""
    return root / f"headrace-{os.getpid()}-{secrets.token_hex(4)}"


def _open_locked(path: Path, *, new: bool = True) -> int:
    """Open the file ``path`` and lock it. With ``new``, the file is created. Return the descriptor; the lock is
    released when it is closed. Raises ``OSError`` if another process holds the lock, or if the file cannot be
    opened."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path) -> None:
    """Delete a file or a directory, if it exists. The lock of a directory is deleted after everything else, so that
    :func:`sweep` finds a directory whose removal is interrupted."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(OSError):  # a directory that cannot be listed
        for entry in [each for each in path.iterdir() if each.name != LOCK]:
            with contextlib.suppress(OSError):
                _remove(entry)
    shutil.rmtree(path, ignore_errors=True)
