"""The files of a snapshot of a local session: layers that nothing writes to any more, or an archive."""

from __future__ import annotations

import resource
import tempfile
from typing import IO, Literal

from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes.base import SandboxDriver

MOST_OPEN = 16_384
"""The number of open files that a process with sessions asks the system for: each session needs some, and each copy of
files is one."""
LEFT_OPEN = 128
"""The number of open files that copies leave to sessions, so that these can start and end."""


def allow_open_files() -> None:
    """Raise this process's limit of open files, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN)
    if most > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class LayerFiles:
    """The files of a snapshot as layers that nothing writes to any more."""

    def __init__(self, driver: SandboxDriver, layers: list[str], user: int) -> None:
        """``layers`` of ``driver`` are in order, and ``user`` owns their files."""
        self.driver = driver
        self.layers = layers
        self.user = user


class CopiedFiles:
    """The files of a snapshot as an archive without a name on the disk: it ends with this process."""

    user = 0

    def __init__(self, driver: SandboxDriver) -> None:
        """Make room for the archive of a session of ``driver``. Raises
        :class:`~headrace.base.errors.EpisodeError` where there is none."""
        self.driver = driver
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the snapshot
        except OSError as error:
            raise _no_copy(str(error.strerror)) from None
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and self._file.fileno() > most - LEFT_OPEN:
            self._file.close()
            raise _no_copy(f"{most} files are the most that this process may have open, and snapshots have all but "
                           f"{LEFT_OPEN} of them")  # fmt: skip

    def opened(self, mode: Literal["rb", "wb"]) -> IO[bytes]:
        """Return the archive, opened once more: readers at the same time have a place of their own in it."""
        return open(f"/proc/self/fd/{self._file.fileno()}", mode)

    def close(self) -> None:
        """Free the disk."""
        self._file.close()


def _no_copy(problem: str) -> EpisodeError:
    """Return the error of a copy that has no place."""
    return EpisodeError(
        f"the files of a session cannot be copied: {problem}",
        remedy="keep the moments of fewer episodes (env.options.episodes), allow this process more open files (ulimit "
        "-Hn), or make room on the disk",
        reason="session_snapshot",
    )
