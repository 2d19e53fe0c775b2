"""A text stream that survives the loss of its output: a closed terminal, a pipe without a reader, a full disk."""

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

    At the first write that fails, the file behind ``stream`` is replaced by the null device for the whole process. What
    other code prints there is lost too, and raises no error. ``lost`` says why.

    >>> import sys
    >>> lasting = LossTolerantStream(sys.stdout)
    >>> print("still here", file=lasting)
    still here
    >>> lasting.lost
    ''
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to ``stream``, such as ``sys.stdout``, for as long as it works."""
        self._stream = stream
        self._is_terminal = False
        """Whether the stream was a terminal at first. A terminal that is closed reports that it is none; a view that
        heeds this would stop writing, so that the loss would not be noticed."""
        with suppress(OSError, ValueError):
            self._is_terminal = stream.isatty()
        self.lost = ""
        """Why the output was lost; empty while it works."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of the wrapped stream; ``utf-8`` if it has none."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Return the way in which the wrapped stream handles characters that it cannot encode."""
        return self._stream.errors

    def fileno(self) -> int:
        """Return the file descriptor of the wrapped stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream was a terminal when it was wrapped, and is not lost."""
        return self._is_terminal and not self.lost

    def writable(self) -> bool:
        """Return true: this stream accepts text even after its output is lost."""
        return True

    def write(self, text: str) -> int:
        """Write ``text``, or discard it if the stream is lost. Return the number of characters, in both cases."""
        if not self.lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, unless it is lost."""
        if not self.lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def look(self) -> None:
        """Check, without writing, whether a terminal has been closed or the reader of a pipe has gone; if so, the
        stream is lost from now on."""
        if self.lost:
            return
        with suppress(OSError, ValueError):  # no file, or a closed one: the next write finds out
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
    """Replace the file behind ``stream`` by the null device, so that all further output is discarded; also the text
    that ``stream`` has buffered. A stream without a file is left as it is."""
    with suppress(OSError, ValueError):  # no file behind the stream, or a closed one
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
