"""The files of a snapshot of a local session, in two forms: frozen overlay layers, or a copy in a tar archive."""

from __future__ import annotations

import resource
import tempfile
from typing import IO, Literal

from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes.base import SandboxDriver

MOST_OPEN = 16_384
"""The limit of open files that a process with sessions requests: each session needs several, and each copy of files
needs one."""
LEFT_OPEN = 128
"""The number of file descriptors that are reserved for sessions, so that copies of files cannot use them all."""


class LayerFiles:
    """The files of a snapshot as overlay layers, to which nothing is written any more."""

    def __init__(self, driver: SandboxDriver, layers: list[str], user: int) -> None:
        """Create the record of ``layers`` of ``driver``, lowest first, whose files the user id ``user`` owns."""
        self.driver = driver
        self.layers = layers
        self.user = user


class CopiedFiles:
    """The files of a snapshot as a nameless archive on disk, which the kernel frees when this process ends."""

    user = 0

    def __init__(self, driver: SandboxDriver) -> None:
        """Create the archive file of a session of ``driver``. Raises :class:`~headrace.base.errors.EpisodeError` if no
        file can be opened."""
        self.driver = driver
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the snapshot
            """The archive, a file without a name."""
        except OSError as error:
            raise _make_no_copy_error(str(error.strerror)) from None
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and self._file.fileno() > most - LEFT_OPEN:
            self._file.close()
            raise _make_no_copy_error(
                f"{most} files are the most that this process may have open, and snapshots have all but "
                f"{LEFT_OPEN} of them"
            )

    def open_archive(self, mode: Literal["rb", "wb"]) -> IO[bytes]:
        """Return a new file object of the archive, opened with ``mode``, with a position of its own."""
        return open(f"/proc/self/fd/{self._file.fileno()}", mode)

    def close(self) -> None:
        """Free the disk space of the archive."""
        self._file.close()


def _make_no_copy_error(problem: str) -> EpisodeError:
    """Return the error for a copy of files that cannot be stored because of ``problem``."""
    return EpisodeError(
        f"the files of a session cannot be copied: {problem}",
        remedy="keep the moments of fewer episodes (env.options.episodes), allow this process more open files (ulimit "
        "-Hn), or make room on the disk",
        reason="session_snapshot",
    )
