"""Append-only files of records: one JSON object per line, unbuffered.

A killed process leaves whole lines and at most one torn one at the end. The reader skips it; the writer cuts it off
before it appends, so that it never ends up glued to the next record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from headrace.base.errors import DataError, RunError
from headrace.base.types.observation import StepRecord

METRICS_FILE = "metrics.jsonl"
"""Where a run directory holds its :class:`~headrace.base.types.observation.StepRecord` lines."""

TRACE_FILE = "trace.jsonl"
"""Where a run directory holds its :class:`~headrace.base.types.trace.Span` lines."""

EVENTS_FILE = "events.jsonl"
"""Where a run directory holds its :class:`~headrace.base.types.observation.Event` lines."""

LIVE_FILE = "live.json"
"""The :class:`~headrace.base.types.observation.LiveState` of a running run, renewed every second."""

R = TypeVar("R", bound=msgspec.Struct)


class JsonlWriter(Generic[R]):
    """Appends records to one file; opening it cuts off a torn last line.

    >>> import tempfile
    >>> from headrace.base.types.trace import Span
    >>> path = Path(tempfile.mkdtemp()) / "trace.jsonl"
    >>> with JsonlWriter[Span](path) as writer:
    ...     writer.write([Span(lane="engine", name="generate", start_s=0.0, end_s=1.5)])
    >>> read_jsonl(path, Span)[0].end_s
    1.5
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`~headrace.base.errors.RunError` if the file cannot be written."""
        self._path = path
        self._encoder = msgspec.json.Encoder()
        try:
            _cut_torn_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._refused(error) from None

    def write(self, records: Iterable[R]) -> None:
        """Hand ``records`` to the operating system: a kill of the process afterwards loses nothing.

        Raises :class:`~headrace.base.errors.RunError` where the file takes no more, a full disk for one.
        """
        rest = memoryview(self._encoder.encode_lines(list(records)))
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._refused(error) from None

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _refused(self, error: OSError) -> RunError:
        return RunError(
            f"{self._path} cannot be written: {error.strerror}",
            remedy="make room on that disk and make the run directory writable, then go on with --resume",
        )


def read_jsonl(path: Path, kind: type[R], skipped: Callable[[str], None] | None = None) -> list[R]:
    """Every record of the file, but for a torn last line: the file of a killed or a running process.

    Raises :class:`~headrace.base.errors.DataError` naming file and line where another line, or the only one, is not a
    ``kind``. With ``skipped`` all such lines are left out, and it is told of them, once.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="name a run directory") from None
    decoder = msgspec.json.Decoder(kind)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n")[:-1], start=1) if line.strip()]
    records: list[R] = []
    strange: list[tuple[int, str]] = []
    for number, line in lines:
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            strange.append((number, f"line {number} is not a {kind.__name__}: {error}"))
    if not strange:
        return records
    at, words = strange[0]
    torn = bool(records) and at == lines[-1][0]
    if skipped is not None:
        others = f", nor are {len(strange) - 1} others" if len(strange) > 1 else ""
        skipped(f"{path}, {words}{others}")
    elif not torn:
        raise DataError(f"{path}, {words}", remedy="remove that line, or name the directory of a Headrace run")
    return records


def read_steps(path: Path, skipped: Callable[[str], None] | None = None) -> list[StepRecord]:
    """The steps that count, in order: a run that resumed from a checkpoint wrote some steps again, and the later line
    is the true one. Errors as :func:`read_jsonl`."""
    kept: list[StepRecord] = []
    for record in read_jsonl(path, StepRecord, skipped):
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        at = end
        while at > 0:
            start = max(0, at - 65536)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                at = start + newline + 1
                break
            at = start
        if at < end:
            file.truncate(at)
