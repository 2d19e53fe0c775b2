"""Writes what a run tells its observers into the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from headrace.base.errors import RunError
from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe.jsonl import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, JsonlWriter


class Recorder:
    """An observer that appends to ``metrics.jsonl``, ``trace.jsonl`` and ``events.jsonl`` and renews ``live.json``; use
    it as a context manager.

    Everything is handed to the operating system when it is told; of spans, a run tells many at once.

    Raises :class:`~headrace.base.errors.RunError` where the run directory takes no more.
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics = JsonlWriter[StepRecord](run_dir / METRICS_FILE)
        self._trace = JsonlWriter[Span](run_dir / TRACE_FILE)
        self._events = JsonlWriter[Event](run_dir / EVENTS_FILE)
        self._live = run_dir / LIVE_FILE

    def step(self, record: StepRecord) -> None:
        """Append one line of metrics."""
        self._metrics.write([record])

    def event(self, event: Event) -> None:
        """Append one line."""
        self._events.write([event])

    def spans(self, spans: Sequence[Span]) -> None:
        """Append them to the trace."""
        self._trace.write(spans)

    def update(self, state: LiveState) -> None:
        """Renew the picture of the moment: a reader sees the old one or the new one."""
        temporary = self._live.with_name(f".{LIVE_FILE}.tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(state))
            temporary.replace(self._live)
        except OSError as error:
            remedy = "make room on that disk and make the run directory writable, then go on with --resume"
            raise RunError(f"{self._live} cannot be written: {error.strerror}", remedy=remedy) from None

    def close(self) -> None:
        """Let go of the files."""
        for file in (self._metrics, self._trace, self._events):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
