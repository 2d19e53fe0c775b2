"""The files of a snapshot of a local session: layers that nothing writes to any more, or an archive."""

from __future__ import annotations

import tempfile
from typing import IO, Literal

from headrace.wings.sandboxes.base import SandboxDriver


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
        """Make room for the archive of a session of ``driver``."""
        self.driver = driver
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the snapshot

    def opened(self, mode: Literal["rb", "wb"]) -> IO[bytes]:
        """Return the archive, opened once more: readers at the same time have a place of their own in it."""
        return open(f"/proc/self/fd/{self._file.fileno()}", mode)

    def close(self) -> None:
        """Free the disk."""
        self._file.close()
