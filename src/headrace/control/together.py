"""One lane that many tasks keep busy at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from headrace.base.clock import Clock
from headrace.base.types.trace import Span
from headrace.control.observer import Observers


class Together:
    """Tells when at least one task is at it: a lane with thousands of short spans a second costs a few long ones.

    Every task enters it as a context manager; several may be within at once. What lasts is told in pieces, whenever
    the observers are told something.
    """

    def __init__(self, lane: str, name: str, observers: Observers, clock: Clock) -> None:
        self._lane = lane
        self._name = name
        self._observers = observers
        self._clock = clock
        self._num = 0
        self._since_s = 0.0
        observers.ask(self._so_far)

    def __enter__(self) -> None:
        if not self._num:
            self._since_s = self._clock.now()
        self._num += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._num == 1:
            self._observers.spans(self._so_far())
        self._num -= 1

    @contextmanager
    def left(self) -> Iterator[None]:
        """Within this, a task that has entered is not at it."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def _so_far(self) -> list[Span]:
        if not self._num:
            return []
        since_s, self._since_s = self._since_s, self._clock.now()
        return [Span(lane=self._lane, name=self._name, start_s=since_s, end_s=self._since_s)]
