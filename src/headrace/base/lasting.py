"""A text stream that tolerates the loss of its output, such as a closed terminal, a pipe without a reader, a full
disk."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from contextlib import suppress
from typing import TextIO


class LossTolerantStream(io.TextIOBase):
    """A text stream that accepts all text, and writes it to ``stream`` as long as ``stream`` can be written to.

    When a write fails for the first time, the file behind ``stream`` is replaced by the null device for the whole
    process. Output of other code to this file is then discarded too, without an error. ``lost`` contains the reason.

    >>> import sys
    >>> lasting = LossTolerantStream(sys.stdout)
    >>> print("still here", file=lasting)
    still here
    >>> lasting.lost
    ''
    """

    def __init__(self, stream: TextIO) -> None:
        """Wrap ``stream``, such as ``sys.stdout``."""
        self._stream = stream
        self._is_terminal = False
        """Whether the stream was a terminal when it was wrapped. A closed terminal reports that it is not a terminal; a
        view that checks this would stop writing, and the loss would not be detected."""
        with suppress(OSError, ValueError):
            self._is_terminal = stream.isatty()
        self.lost = ""
        """The reason why the output was lost; empty while it can be written."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of the wrapped stream; ``utf-8`` if it has none."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Return the error handler of the wrapped stream for characters that it cannot encode, such as ``strict``."""
        return self._stream.errors

    def fileno(self) -> int:
        """Return the file descriptor of the wrapped stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream was a terminal when it was wrapped and its output is not lost."""
        return self._is_terminal and not self.lost

    def writable(self) -> bool:
        """Return true: this stream accepts text even after its output was lost."""
        return True

    def write(self, text: str) -> int:
        """Write ``text``, or discard it if the output is lost. Return the number of characters of ``text``."""
        if not self.lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless its output is lost."""
        if not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def detect_loss(self) -> None:
        """Check, without writing, whether the terminal was closed or the reader of the pipe has ended; if so, treat the
        output as lost from now on."""
        if self.lost:
            return
        with suppress(OSError, ValueError):  # no file, or a closed file: the next write detects the loss
            descriptor = self._stream.fileno()
            number = errno.EPIPE if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else errno.EIO
            poll = select.poll()
            poll.register(descriptor, 0)  # no events to register: a hang-up is always reported
            if any(found & (select.POLLHUP | select.POLLERR) for _, found in poll.poll(0)):
                self._lose(OSError(number, os.strerror(number)))

    def _lose(self, error: OSError | ValueError) -> None:
        """Record ``error`` as the reason why the output was lost, and discard all further output."""
        self.lost = str(error)
        redirect_to_null(self._stream)


def redirect_to_null(stream: TextIO) -> None:
    """Replace the file behind ``stream`` by the null device, so that all further output is discarded, including the
    text in the stream's buffer. A stream without a file is not changed."""
    with suppress(OSError, ValueError):  # no file behind the stream, or a closed one
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
