"""Hands metrics to writers, in a thread: a slow or broken one costs the run nothing."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe.metrics import flat
from headrace.run.observe.writers.base import MetricWriter

MOST_WAITING = 256
"""Steps that wait to be written."""
FAREWELL_S = 30.0
"""How long the end of a run waits for a writer."""

_Post = tuple[int, float, dict[str, float]]


class Posting:
    """One writer as an observer. What it cannot write is counted and told as a warning: ``metrics.jsonl`` has it.

    Use it as a context manager: leaving it writes what waits.
    """

    def __init__(self, kind: str, writer: MetricWriter, warn: Callable[[str], None]) -> None:
        self._kind = kind
        self._writer = writer
        self._warn = warn
        self._posts: queue.Queue[_Post | None] = queue.Queue(maxsize=MOST_WAITING)
        self._num, self._written = 0, 0
        self._trouble, self._told = "", False
        self._thread = threading.Thread(target=self._run, name=f"writer {kind}", daemon=True)

    def step(self, record: StepRecord) -> None:
        """Post its numbers; one that is not finite is left out, as no such system takes it."""
        values = {name: value for name, value in flat(record).items() if math.isfinite(value)}
        self._num += 1
        try:
            self._posts.put_nowait((record.step, record.unix_s, values))
        except queue.Full:
            self._trouble = self._trouble or f"it is {MOST_WAITING} steps behind"
        self._tell()

    def event(self, event: Event) -> None:
        """Nothing."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Nothing."""

    def update(self, state: LiveState) -> None:
        """Tell what has gone wrong, once."""
        self._tell()

    def _tell(self) -> None:
        if self._trouble and not self._told:
            self._told = True
            self._warn(f"the writer {self._kind} fails, the run goes on: {self._trouble}")

    def _run(self) -> None:
        while (post := self._posts.get()) is not None:
            self._written += self._attempt(partial(self._writer.write, *post))
        self._attempt(self._writer.close)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever posts must hear of it
            self._trouble = self._trouble or f"{type(error).__name__}: {error}"
            return False
        return True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._posts.put(None, timeout=FAREWELL_S)
        except queue.Full:
            self._trouble = self._trouble or "it takes nothing any more"
        self._thread.join(FAREWELL_S)
        self._tell()
        if lost := self._num - self._written:
            self._warn(f"the writer {self._kind} has lost {lost} of {self._num} steps; metrics.jsonl has them all")
