"""A small file of one JSON object that its owner replaces from time to time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

MOST_BYTES = 64 << 20


class JsonFile:
    """The object in ``path``, read again when the file has changed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "summary.json"
    >>> sheet = JsonFile(path)
    >>> sheet.tree, path.write_text('{"steps": 3}'), sheet.tree
    ({}, 12, {'steps': 3})
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._tree: dict[str, Any] = {}
        self.problem = ""
        """Why it cannot be read, in words; empty where it can, or is not there."""

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Changes whenever the file does; ``None`` where there is none."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    @property
    def tree(self) -> dict[str, Any]:
        """What it holds; empty where it is not there or damaged."""
        stamp = self.stamp
        if stamp is None:
            self._stamp, self._tree, self.problem = None, {}, ""
        elif stamp != self._stamp:
            self._stamp = stamp
            self._tree = self._read()
        return self._tree

    def section(self, name: str) -> dict[str, Any]:
        """One table of it; empty where there is none."""
        found = self.tree.get(name)
        return found if isinstance(found, dict) else {}

    def _read(self) -> dict[str, Any]:
        self.problem = ""
        try:
            if self._path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self.problem = f"{self._path.name} cannot be read: {error}"
            return {}
