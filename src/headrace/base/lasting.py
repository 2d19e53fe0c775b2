"""Output that may go away while a run goes on: a terminal that is closed, a pipe nobody reads, a disk that is full."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from typing import TextIO


class LastingStream(io.TextIOBase):
    """A text stream that takes everything, and passes it on to ``stream`` as long as that takes it.

    At the first write that fails, the file behind ``stream`` becomes the null device for the whole process: what others
    print there is lost too, and fails nobody. ``lost`` says why.

    >>> import sys
    >>> lasting = LastingStream(sys.stdout)
    >>> print("still here", file=lasting)
    still here
    >>> lasting.lost
    ''
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = False
        """Whether it was one at first: one that hangs up says that it is none, and a view that heeds this never writes
        again, so that the loss would not be noticed."""
        with suppress(OSError, ValueError):
            self._is_terminal = stream.isatty()
        self.lost = ""
        """Why nothing more is shown; empty while it is."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._is_terminal and not self.lost

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        self.lost = str(error)
        to_nowhere(self._stream)


def to_nowhere(stream: TextIO) -> None:
    """Make the file behind ``stream`` the null device; what ``stream`` still holds goes there."""
    with suppress(OSError, ValueError):  # it has no file, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
