"""Who watches a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span

MOST_KEPT = 4096
"""Spans that wait to be told."""


class Observer(Protocol):
    """Is told what happens. Must return at once; what it raises ends the run."""

    def step(self, record: StepRecord) -> None:
        """An optimizer step is done."""
        ...

    def event(self, event: Event) -> None:
        """Something worth a line."""
        ...

    def spans(self, spans: Sequence[Span]) -> None:
        """Parts were busy."""
        ...

    def update(self, state: LiveState) -> None:
        """The present moment, once a second."""
        ...


class Observers:
    """Several observers as one.

    Spans, of which a run has thousands a second, are kept and told together: before the end of a step is told, and
    before the present moment is. Whoever closes an observer tells it with :meth:`flush` what is left.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._spans: list[Span] = []
        self._lasting: list[Callable[[], list[Span]]] = []

    def ask(self, lasting: Callable[[], list[Span]]) -> None:
        """``lasting`` says what a lane has been at since it was last asked: it is, whenever spans are told."""
        self._lasting.append(lasting)

    def step(self, record: StepRecord) -> None:
        self.flush()
        for observer in self._observers:
            observer.step(record)

    def event(self, event: Event) -> None:
        for observer in self._observers:
            observer.event(event)

    def span(self, span: Span) -> None:
        """Keep one."""
        self._spans.append(span)
        if len(self._spans) >= MOST_KEPT:
            self.flush()

    def spans(self, spans: Sequence[Span]) -> None:
        self._spans += spans
        if len(self._spans) >= MOST_KEPT:
            self.flush()

    def update(self, state: LiveState) -> None:
        self.flush()
        for observer in self._observers:
            observer.update(state)

    def flush(self) -> None:
        """Tell the spans that are kept."""
        spans, self._spans = self._spans, []
        for lasting in self._lasting:
            spans += lasting()
        if spans:
            for observer in self._observers:
                observer.spans(spans)
