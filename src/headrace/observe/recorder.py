"""Writes what a run tells its observers into the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.observe.jsonl import METRICS_FILE, TRACE_FILE, JsonlWriter
from headrace.types.observation import Event, StepRecord
from headrace.types.trace import Span


class Recorder:
    """An observer that appends to ``metrics.jsonl`` and ``trace.jsonl``; use it as a context manager.

    Raises :class:`~headrace.errors.RunError` where the run directory takes no more.
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics = JsonlWriter[StepRecord](run_dir / METRICS_FILE)
        self._trace = JsonlWriter[Span](run_dir / TRACE_FILE)

    def step(self, record: StepRecord) -> None:
        """Append one line of metrics."""
        self._metrics.write([record])

    def event(self, event: Event) -> None:
        """Nothing: the ledger and the summary keep what must last."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Append them to the trace."""
        self._trace.write(spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._metrics.close()
        self._trace.close()
