"""Readers of JSON files that another process writes: :class:`Tail` for files to which lines are appended,
:class:`JsonFile` for files that are replaced. The dashboard reads the files of a run with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

R = TypeVar("R", bound=msgspec.Struct)

MOST_BYTES = 32 << 20
"""Largest part of a file in bytes that one call reads, so that a long file does not delay other requests."""


class Tail(Generic[R]):
    """A reader of a file of JSON lines that returns the records that were appended since the last call. Incomplete
    lines are read by a later call.

    >>> import tempfile
    >>> from headrace.base.types.observation import Event
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> tail = Tail(path, Event)
    >>> tail.read(), path.write_text('{"wall_s": 1, "text": "a"}\\n{"wall')
    ([], 33)
    >>> [event.text for event in tail.read()], tail.read()
    (['a'], [])
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        """Create a reader of the file ``path``, whose lines are records of the type ``kind``; the file may not exist
        yet."""
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        """The decoder of one record."""
        self._kind = kind
        self._at = 0
        """Position in the file, in bytes, up to which it was read."""
        self.restarted = False
        """Whether the file was shorter at the last call than before, so that it was read from its beginning."""
        self.problem = ""
        """The reason why a part of the file could not be read; empty if there was no problem."""

    def read(self) -> list[R]:
        """Return the records that were added since the last call; empty if there are none. An invalid line is skipped
        and described in :attr:`problem`. A call reads at most 32 MiB: call again until the result is empty."""
        self.restarted = False
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._at:
                    self._at, self.restarted, self.problem = 0, True, ""
                file.seek(self._at)
                data = file.read(MOST_BYTES)
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
            return []
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == MOST_BYTES:
            self.problem = (
                f"{self._path.name} has a line of more than {MOST_BYTES >> 20} MiB: it is not a file of a run"
            )
            return []
        self._at += len(whole)
        return self._decode(whole)

    def _decode(self, lines: bytes) -> list[R]:
        """Return the records of complete lines, without those of damaged lines."""
        try:
            return self._decoder.decode_lines(lines)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return [record for line in lines.splitlines() if line.strip() for record in self._decode_line(line)]

    def _decode_line(self, line: bytes) -> list[R]:
        """Return the record of a line as a list; an empty list, with a note in :attr:`problem`, if the line is
        damaged."""
        try:
            return [self._decoder.decode(line)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.problem = f"{self._path.name} has a line that is not a {self._kind.__name__}: {error}"
            return []


MOST_OBJECT_BYTES = 64 << 20
"""Largest size of a file with one object that is read."""


class JsonFile:
    """A reader of a file with one JSON object, which is read again when the file has changed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "summary.json"
    >>> file = JsonFile(path)
    >>> file.tree, path.write_text('{"steps": 3}'), file.tree
    ({}, 12, {'steps': 3})
    """

    def __init__(self, path: Path) -> None:
        """Create a reader of the file ``path``, which may not exist yet."""
        self._path = path
        self._stamp: tuple[int, int] | None = None
        """The value of :attr:`stamp` when the file was read last."""
        self._tree: dict[str, Any] = {}
        """The object as it was read last."""
        self.problem = ""
        """The reason why the file cannot be read; empty if it can be read, or does not exist."""

    @property
    def stamp(self) -> tuple[int, int] | None:
        """A value that changes whenever the file changes; ``None`` if the file does not exist."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    @property
    def tree(self) -> dict[str, Any]:
        """Return the object; empty if the file does not exist or is damaged."""
        stamp = self.stamp
        if stamp is None:
            self._stamp, self._tree, self.problem = None, {}, ""
        elif stamp != self._stamp:
            self._stamp = stamp
            self._tree = self._read()
        return self._tree

    def section(self, name: str) -> dict[str, Any]:
        """Return the object under the key ``name``; empty if there is none."""
        found = self.tree.get(name)
        return found if isinstance(found, dict) else {}

    def _read(self) -> dict[str, Any]:
        """Return the content of the file. If it cannot be read, return an empty dictionary and set :attr:`problem`."""
        self.problem = ""
        try:
            if self._path.stat().st_size > MOST_OBJECT_BYTES:
                raise ValueError(f"it has more than {MOST_OBJECT_BYTES >> 20} MiB")
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, msgspec.DecodeError) as error:
            self.problem = f"{self._path.name} cannot be read: {error}"
            return {}
