"""The observers of a run, and the lanes of its event trace that many tasks share. A *span* is a time in which a part of
the run was busy; a *lane* is a row of the trace, which consists of spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from headrace.base.clock import Clock
from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span

MAX_KEPT_SPANS = 4096
"""Greatest number of spans that are collected before the observers get them."""


class Observer(Protocol):
    """The contract of an observer, such as a writer of metrics or a view: it receives the events of a run. Its methods
    must return at once; an exception that they raise ends the run."""

    def step(self, record: StepRecord) -> None:
        """Receive the record of an optimizer step that is done."""
        ...

    def event(self, event: Event) -> None:
        """Receive an event that is worth one line to a person: a warning, an evaluation, a checkpoint."""
        ...

    def spans(self, spans: Sequence[Span]) -> None:
        """Receive spans: times in which parts of the run were busy."""
        ...

    def update(self, state: LiveState) -> None:
        """Receive the present state of the run, once a second."""
        ...


class Observers:
    """An observer that passes everything on to several observers.

    Spans, of which a run has thousands a second, are collected and passed on together: before the record of a step, and
    before a state of the run. Call :meth:`flush` before an observer is closed, so that it gets the last ones.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Pass everything on to ``observers``, in this order."""
        self._observers = tuple(observers)
        self._spans: list[Span] = []
        self._sources: list[Callable[[], list[Span]]] = []

    def add_span_source(self, source: Callable[[], list[Span]]) -> None:
        """Call ``source`` whenever spans are passed on. It returns the spans of its lane since its last call."""
        self._sources.append(source)

    def step(self, record: StepRecord) -> None:
        """Pass on the collected spans and then the record of a step."""
        self.flush()
        for observer in self._observers:
            observer.step(record)

    def event(self, event: Event) -> None:
        """Pass an event on at once."""
        for observer in self._observers:
            observer.event(event)

    def span(self, span: Span) -> None:
        """Collect one span, to pass it on with others."""
        self._spans.append(span)
        if len(self._spans) >= MAX_KEPT_SPANS:
            self.flush()

    def spans(self, spans: Sequence[Span]) -> None:
        """Collect spans, to pass them on with others."""
        self._spans += spans
        if len(self._spans) >= MAX_KEPT_SPANS:
            self.flush()

    def update(self, state: LiveState) -> None:
        """Pass on the collected spans and then the present state of the run."""
        self.flush()
        for observer in self._observers:
            observer.update(state)

    def flush(self) -> None:
        """Pass the spans that are collected, and those of all sources, on to the observers."""
        spans, self._spans = self._spans, []
        for source in self._sources:
            spans += source()
        if spans:
            for observer in self._observers:
                observer.spans(spans)


class BusyLane:
    """A lane of the trace that many tasks share; its spans are the times in which at least one task worked.

    Each task enters it as a context manager, and several may be inside at the same time, so that thousands of short
    spans become a few long ones. A span that lasts is reported in pieces, whenever the observers receive something.
    """

    def __init__(self, lane: str, name: str, observers: Observers, clock: Clock) -> None:
        """Report spans called ``name`` in the lane ``lane`` to ``observers``."""
        self._lane = lane
        self._name = name
        self._observers = observers
        self._clock = clock
        self._num_working = 0
        self._since_s = 0.0
        observers.add_span_source(self._spans_so_far)

    def __enter__(self) -> None:
        """Note that a task has begun to work; the lane is busy from now on, if it was not."""
        if not self._num_working:
            self._since_s = self._clock.now()
        self._num_working += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Note that a task has stopped working. If it was the last one, report the span of the lane."""
        if self._num_working == 1:
            self._observers.spans(self._spans_so_far())
        self._num_working -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count a task that has entered the lane as not working while the body runs, for example because it waits for
        the model."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _spans_so_far(self) -> list[Span]:
        """Return the span of the work since the last call, up to now; none if the lane is idle."""
        if not self._num_working:
            return []
        since_s, self._since_s = self._since_s, self._clock.now()
        return [Span(lane=self._lane, name=self._name, start_s=since_s, end_s=self._since_s)]
