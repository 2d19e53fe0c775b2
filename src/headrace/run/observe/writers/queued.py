"""An observer that passes metrics to a writer in a thread, so that a slow or failing writer does not delay the run.

An *observer* receives a record of every optimizer step from the controller; a *writer* copies its metrics to another
program, such as TensorBoard.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Self

from headrace.base.types.observation import LiveState, StepRecord
from headrace.control.observer import Observer
from headrace.run.observe.metrics import flat
from headrace.run.observe.writers.base import MetricWriter

MAX_QUEUED = 256
"""The maximum number of steps in the queue of a writer."""
CLOSE_TIMEOUT_S = 30.0
"""The maximum wait at the end of a run, in seconds: once for room in the queue, and once for the writer's thread."""

_Entry = tuple[int, float, dict[str, float]]
"""An entry of the queue: the number of a step, its end in seconds since 1970, and its metrics by name."""


class QueuedWriter(Observer):
    """An observer that passes the metrics of each step to one writer, through a queue and a thread of its own.

    Steps that cannot be written are counted, and reported as a warning; ``metrics.jsonl`` contains them. Use the object
    as a context manager: at its end it waits, for at most a minute, until the queued steps are written.
    """

    def __init__(self, kind: str, writer: MetricWriter, warn: Callable[[str], None]) -> None:
        """Create the observer of ``writer``; the thread starts when the context is entered. ``kind`` names the writer
        in warnings, such as ``wandb``; ``warn`` records a warning of the run and is called in the thread of the caller,
        never in the writer's."""
        self._kind = kind
        self._writer = writer
        self._warn = warn
        self._queue: queue.Queue[_Entry | None] = queue.Queue(maxsize=MAX_QUEUED)
        """The steps that are not written yet; ``None`` ends the queue."""
        self._num_steps, self._num_written = 0, 0
        self._problem, self._has_warned = "", False
        """The first problem of the writer, empty without one; and whether a warning has reported it."""
        self._thread = threading.Thread(target=self._run, name=f"writer {kind}", daemon=True)

    def step(self, record: StepRecord) -> None:
        """Queue the metrics of an optimizer step for the writer, without waiting: if the queue is full, the step is
        lost to the writer. Values that are not finite are omitted, since these systems do not accept them."""
        values = {name: value for name, value in flat(record).items() if math.isfinite(value)}
        self._num_steps += 1
        try:
            self._queue.put_nowait((record.step, record.unix_s, values))
        except queue.Full:
            self._problem = self._problem or f"it is {MAX_QUEUED} steps behind"
        self._warn_once()

    def update(self, state: LiveState) -> None:
        """Warn if the writer has failed and no warning was recorded yet. The present state itself is not written."""
        self._warn_once()

    def _warn_once(self) -> None:
        """Report the writer's first problem as a warning of the run, if there is one; do nothing for later problems."""
        if self._problem and not self._has_warned:
            self._has_warned = True
            self._warn(f"the writer {self._kind} fails, the run continues: {self._problem}")

    def _run(self) -> None:
        """Write the queued steps until the entry ``None``, which ends the queue, and then close the writer. This is the
        body of the thread."""
        while (entry := self._queue.get()) is not None:
            self._num_written += self._try(partial(self._writer.write, *entry))
        self._try(self._writer.close)

    def _try(self, call: Callable[[], None]) -> bool:
        """Run ``call``, a call of the writer, and return whether it succeeded. The first error is stored for the
        warning."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the error becomes a warning of the run
            self._problem = self._problem or f"{type(error).__name__}: {error}"
            return False
        return True

    def __enter__(self) -> Self:
        """Start the writer's thread, and return the observer."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until the queued steps are written and the writer is closed, and warn of the steps that are lost. The
        wait for room in the queue and the wait for the thread take at most :data:`CLOSE_TIMEOUT_S` each."""
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            self._problem = self._problem or "it takes nothing any more"
        self._thread.join(CLOSE_TIMEOUT_S)
        self._warn_once()
        if lost := self._num_steps - self._num_written:
            num_steps = self._num_steps
            self._warn(f"the writer {self._kind} has lost {lost} of {num_steps} steps; metrics.jsonl has them all")
