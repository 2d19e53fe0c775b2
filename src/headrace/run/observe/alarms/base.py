"""What an alarm is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from headrace.base.types.observation import LiveState

Numbers = Mapping[str, float]
"""The metrics of one step, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An alarm that has just gone off."""

    name: str
    words: str
    """What is wrong, with the numbers."""
    advice: str

    def __str__(self) -> str:
        return f"alarm {self.name}: {self.words}. {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The present moment, as alarms see it."""

    state: LiveState
    free_bytes: int
    """On the disk of the run directory."""


class Alarm(Protocol):
    """A state machine. It says why it goes off when it does, and then nothing until what was wrong has gone."""

    def step(self, numbers: Numbers) -> str:
        """After a step; empty where nothing is wrong, or nothing new."""
        ...

    def moment(self, now: Moment) -> str:
        """The present moment; the same."""
        ...


class Lasting:
    """Goes off when something has been wrong for ``patience`` steps in a row, and again only after it was right.

    >>> alarm = Lasting(lambda numbers: "too high" if numbers["kl_mu_k3"] > 1 else "", patience=2)
    >>> [alarm.step({"kl_mu_k3": value}) for value in (2, 2, 2, 0, 2, 2)]
    ['', 'too high', '', '', '', 'too high']
    """

    def __init__(self, wrong: Callable[[Numbers], str], *, patience: int) -> None:
        """``wrong`` says what is wrong in a step; empty where nothing is."""
        self._wrong = wrong
        self._patience = patience
        self._times = 0

    def step(self, numbers: Numbers) -> str:
        words = self._wrong(numbers)
        self._times = self._times + 1 if words else 0
        return words if self._times == self._patience else ""

    def moment(self, now: Moment) -> str:
        return ""


class Now:
    """Goes off when something is wrong at this moment, and again only after it was right."""

    def __init__(self, wrong: Callable[[Moment], str]) -> None:
        self._wrong = wrong
        self._raised = False

    def step(self, numbers: Numbers) -> str:
        return ""

    def moment(self, now: Moment) -> str:
        words, before = self._wrong(now), self._raised
        self._raised = bool(words)
        return "" if before else words


class Baseline:
    """The median of the first values of one metric: what a run began with."""

    def __init__(self, name: str, num: int) -> None:
        self._name = name
        self._num = num
        self._first: list[float] = []

    def __call__(self, numbers: Numbers) -> tuple[float, float] | None:
        """The value now and that of the beginning; ``None`` while the beginning lasts, or without a value."""
        value = numbers.get(self._name)
        if value is None:
            return None
        if len(self._first) < self._num:
            self._first.append(value)
            return None
        return value, median(self._first)
