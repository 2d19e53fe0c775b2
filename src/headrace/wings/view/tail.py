"""Reads on in a file of records to which somebody else appends."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

R = TypeVar("R", bound=msgspec.Struct)

MOST_BYTES = 32 << 20
"""Read at once: a long file is read in several goes, and other questions are answered between them."""


class Tail(Generic[R]):
    """The records of ``path`` that came since the last look. Only whole lines count: the last one may be torn.

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
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        self._at = 0
        self.restarted = False
        """Whether the last look found the file shorter than before, and began again."""
        self.problem = ""
        """What cannot be read, in words; empty where everything can."""

    def read(self) -> list[R]:
        """The new records; a line that is none is left out, and :attr:`problem` says so."""
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
            self.problem = f"{self._path.name} has a line of more than {MOST_BYTES >> 20} MiB: it is no file of a run"
            return []
        self._at += len(whole)
        return self._decode(whole)

    def _decode(self, lines: bytes) -> list[R]:
        try:
            return self._decoder.decode_lines(lines)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return [record for line in lines.splitlines() if line.strip() for record in self._one(line)]

    def _one(self, line: bytes) -> list[R]:
        try:
            return [self._decoder.decode(line)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.problem = f"{self._path.name} has a line that is not a {self._kind.__name__}: {error}"
            return []
