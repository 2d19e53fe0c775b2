"""The contract of observers, which receive the events of a run, and lanes of the event trace that many tasks share. A
*span* is a time interval in which a part of the run was busy; a *lane* is a row of the trace, which consists of
spans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.base.clock import Clock
from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span

MAX_KEPT_SPANS = 4096
"""Maximum number of spans that are collected before they are sent to the observers."""


class Observer:
    """The contract of an observer, which receives the events of a run: a writer of metrics or a view, for example. Its
    methods must return at once; an exception in a method ends the run. A method that is not overridden ignores what it
    receives."""

    def step(self, record: StepRecord) -> None:
        """Receive the record of a finished optimizer step."""

    def event(self, event: Event) -> None:
        """Receive an event to show to the user as one line: a warning, an evaluation, a checkpoint."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Receive new spans of the event trace."""

    def update(self, state: LiveState) -> None:
        """Receive the current state of the run, about once a second."""


class Observers:
    """An observer that forwards everything to several observers.

    A run has thousands of spans a second, so they are collected and forwarded together: before the record of a step,
    before a state of the run, and when there are :data:`MAX_KEPT_SPANS`. Call :meth:`flush` before an observer is
    closed, so that it receives the last spans.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Create the forwarding observer. ``observers`` are the observers that receive everything, in this order."""
        self._observers = tuple(observers)
        self._spans: list[Span] = []
        """The spans that were collected and not forwarded yet."""
        self._sources: list[Callable[[], list[Span]]] = []
        """The functions that return the spans since their last calls."""

    def add_span_source(self, source: Callable[[], list[Span]]) -> None:
        """Add a source of spans: ``source`` is called whenever spans are forwarded, and returns the spans since its
        last call."""
        self._sources.append(source)

    def step(self, record: StepRecord) -> None:
        """Forward the collected spans and then the record of a step."""
        self.flush()
        for observer in self._observers:
            observer.step(record)

    def event(self, event: Event) -> None:
        """Forward an event at once."""
        for observer in self._observers:
            observer.event(event)

    def spans(self, spans: Sequence[Span]) -> None:
        """Collect spans, to forward them later with others."""
        self._spans += spans
        if len(self._spans) >= MAX_KEPT_SPANS:
            self.flush()

    def update(self, state: LiveState) -> None:
        """Forward the collected spans and then the current state of the run."""
        self.flush()
        for observer in self._observers:
            observer.update(state)

    def flush(self) -> None:
        """Forward the collected spans, and the spans of all sources, to the observers."""
        spans, self._spans = self._spans, []
        for source in self._sources:
            spans += source()
        if spans:
            for observer in self._observers:
                observer.spans(spans)


class BusyLane:
    """A lane of the trace that many tasks share. Its spans are the time intervals in which at least one task worked.

    Each task enters the lane as a context manager, and several tasks may be inside at the same time. So thousands of
    short spans become a few long ones. A long span is reported in pieces, whenever the observers receive something.
    """

    def __init__(self, lane: str, name: str, observers: Observers, clock: Clock) -> None:
        """Create an idle lane. ``lane`` is the name of the lane and ``name`` the name of its spans, which are reported
        to ``observers``. ``clock`` measures them."""
        self._lane = lane
        self._name = name
        self._observers = observers
        self._clock = clock
        self._num_working = 0
        """The number of tasks that work in the lane."""
        self._since_s = 0.0
        """The start of the current span, in seconds on the clock."""
        observers.add_span_source(self._spans_so_far)

    def __enter__(self) -> None:
        """Count a task that starts to work. If no other task works, a span of the lane begins."""
        if not self._num_working:
            self._since_s = self._clock.now()
        self._num_working += 1

    def __exit__(self, *_: object) -> None:
        """Count a task that stops working. If no other task works, report the span of the lane."""
        if self._num_working == 1:
            self._observers.spans(self._spans_so_far())
        self._num_working -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count a task that has entered the lane as not working while the body runs, for example because it waits for
        the model."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _spans_so_far(self) -> list[Span]:
        """Return the span from the last call, or from the start of the work, until now; empty if the lane is idle."""
        if not self._num_working:
            return []
        since_s, self._since_s = self._since_s, self._clock.now()
        return [Span(lane=self._lane, name=self._name, start_s=since_s, end_s=self._since_s)]
