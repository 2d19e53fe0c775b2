"""Append-only files of records, one JSON object per line, unbuffered; and :class:`Recorder`, the observer that writes
the files of a run.

A *record* is a ``msgspec`` struct. A killed process leaves whole lines and at most one torn line at the end, which
lacks its line break. The reader skips a torn line; the writer removes it before it appends the next record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, Self, TypeVar

import msgspec

from headrace.base.errors import DataError, RunError
from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.control.observer import Observer

METRICS_FILE = "metrics.jsonl"
"""The file of :class:`~headrace.base.types.observation.StepRecord` lines in a run directory."""

TRACE_FILE = "trace.jsonl"
"""The file of :class:`~headrace.base.types.trace.Span` lines in a run directory."""

EVENTS_FILE = "events.jsonl"
"""The file of :class:`~headrace.base.types.observation.Event` lines in a run directory."""

LIVE_FILE = "live.json"
"""The file with the :class:`~headrace.base.types.observation.LiveState` of a run that is still running, renewed every
second."""

R = TypeVar("R", bound=msgspec.Struct)


class JsonlWriter(Generic[R]):
    """A writer that appends records of one class to one file, each as a line of JSON. Opening the file cuts off a torn
    last line.

    >>> import tempfile
    >>> from headrace.base.types.trace import Span
    >>> path = Path(tempfile.mkdtemp()) / "trace.jsonl"
    >>> with JsonlWriter[Span](path) as writer:
    ...     writer.write([Span(lane="engine", name="generate", start_s=0.0, end_s=1.5)])
    >>> read_jsonl(path, Span)[0].end_s
    1.5
    """

    def __init__(self, path: Path) -> None:
        """Open the file ``path`` for appending, and create it if it is missing. Raises
        :class:`~headrace.base.errors.RunError` if the file cannot be written."""
        self._path = path
        self._encoder = msgspec.json.Encoder()
        try:
            _cut_torn_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._make_write_error(error) from None

    def write(self, records: Iterable[R]) -> None:
        """Append ``records`` to the file. They are passed to the operating system at once, so that a later kill of the
        process loses nothing.

        Raises :class:`~headrace.base.errors.RunError` if the file cannot be written, for example on a full disk.
        """
        unwritten = memoryview(self._encoder.encode_lines(list(records)))
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise self._make_write_error(error) from None

    def close(self) -> None:
        """Close the file. All records are already written."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, however the context ends."""
        self.close()

    def _make_write_error(self, error: OSError) -> RunError:
        """Return the error to raise if opening or writing the file failed with ``error``."""
        return RunError(
            f"{self._path} cannot be written: {error.strerror}",
            remedy="make room on that disk and make the run directory writable, then continue with --resume",
        )


def read_jsonl(path: Path, kind: type[R], skipped: Callable[[str], None] | None = None) -> list[R]:
    """Return every record of the file ``path``, in order; each line is decoded as a ``kind``, the class of the records.
    A torn last line, as a killed or a running process leaves it, is skipped.

    Raises :class:`~headrace.base.errors.DataError` if the file cannot be read. Raises it also, with the number of the
    line, if a line before the last, or the only line, cannot be decoded. With ``skipped``, lines that cannot be decoded
    are skipped instead, and ``skipped`` is called once with a message about them.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", remedy="name a run directory") from None
    decoder = msgspec.json.Decoder(kind)
    lines = [(number, line) for number, line in enumerate(data.split(b"\n")[:-1], start=1) if line.strip()]
    records: list[R] = []
    undecoded: list[tuple[int, str]] = []
    for number, line in lines:
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            undecoded.append((number, f"line {number} is not a {kind.__name__}: {error}"))
    if not undecoded:
        return records
    line_number, problem = undecoded[0]
    torn = bool(records) and line_number == lines[-1][0]
    if skipped is not None:
        others = f", nor are {len(undecoded) - 1} others" if len(undecoded) > 1 else ""
        skipped(f"{path}, {problem}{others}")
    elif not torn:
        raise DataError(f"{path}, {problem}", remedy="remove that line, or name the directory of a Headrace run")
    return records


def read_steps(path: Path, skipped: Callable[[str], None] | None = None) -> list[StepRecord]:
    """Return the records of the optimizer steps in ``path``, a ``metrics.jsonl``, one for each step, in order.
    ``skipped`` and the errors have the same meaning as for :func:`read_jsonl`.

    A run that was resumed from a checkpoint wrote some steps again; the later line of a step replaces the earlier one
    and all steps after it.
    """
    valid: list[StepRecord] = []
    for record in read_jsonl(path, StepRecord, skipped):
        while valid and valid[-1].step >= record.step:
            valid.pop()
        valid.append(record)
    return valid


def _cut_torn_line(path: Path) -> None:
    """Truncate the file ``path`` after its last line break, which removes a torn last line. A missing file is not
    created."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        end = size
        while end > 0:  # read blocks backwards from the end, since the file may be large
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


class Recorder(Observer):
    """An observer that writes ``metrics.jsonl``, ``trace.jsonl``, ``events.jsonl`` and ``live.json`` into the run
    directory.

    Each call writes at once. Use it as a context manager. Raises :class:`~headrace.base.errors.RunError` if the run
    directory cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open the files in ``run_dir`` to append to them; a resumed run continues its old files."""
        self._metrics = JsonlWriter[StepRecord](run_dir / METRICS_FILE)
        self._trace = JsonlWriter[Span](run_dir / TRACE_FILE)
        self._events = JsonlWriter[Event](run_dir / EVENTS_FILE)
        self._live_path = run_dir / LIVE_FILE

    def step(self, record: StepRecord) -> None:
        """Append the record of an optimizer step to ``metrics.jsonl``."""
        self._metrics.write([record])

    def event(self, event: Event) -> None:
        """Append an event to ``events.jsonl``."""
        self._events.write([event])

    def spans(self, spans: Sequence[Span]) -> None:
        """Append the spans to ``trace.jsonl``."""
        self._trace.write(spans)

    def update(self, state: LiveState) -> None:
        """Replace ``live.json`` by the present state of the run. The replacement is atomic: another process reads the
        old or the new state, never a part of one."""
        temporary = self._live_path.with_name(f".{LIVE_FILE}.tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(state))
            temporary.replace(self._live_path)
        except OSError as error:
            remedy = "make room on that disk and make the run directory writable, then continue with --resume"
            raise RunError(f"{self._live_path} cannot be written: {error.strerror}", remedy=remedy) from None

    def close(self) -> None:
        """Close ``metrics.jsonl``, ``trace.jsonl`` and ``events.jsonl``."""
        for file in (self._metrics, self._trace, self._events):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files, however the context ends."""
        self.close()
