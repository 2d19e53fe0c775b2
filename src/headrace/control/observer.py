"""Who watches a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.types.observation import Event, StepRecord
from headrace.types.trace import Span


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


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def step(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.step(record)

    def event(self, event: Event) -> None:
        for observer in self._observers:
            observer.event(event)

    def spans(self, spans: Sequence[Span]) -> None:
        for observer in self._observers:
            observer.spans(spans)
