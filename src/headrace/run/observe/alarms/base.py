"""The contract of an alarm, and the parts that alarms are made of."""

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
    """The problem, with its numbers."""
    advice: str
    """The advice to the user."""

    def __str__(self) -> str:
        return f"alarm {self.name}: {self.words}. {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The present state of a run, as alarms read it."""

    state: LiveState
    free_bytes: int
    """The free space on the disk of the run directory."""


class Alarm(Protocol):
    """A state machine that goes off once when a problem begins, and again only after the problem has gone."""

    def step(self, numbers: Numbers) -> str:
        """Read the metrics of a step that has ended. Return the problem where the alarm goes off now, else an empty
        string."""
        ...

    def moment(self, now: Moment) -> str:
        """Read the present state. Return the problem where the alarm goes off now, else an empty string."""
        ...


class Lasting:
    """Goes off when a problem has lasted for ``patience`` steps in a row, and again only after a step without it.

    >>> alarm = Lasting(lambda numbers: "too high" if numbers["kl_mu_k3"] > 1 else "", patience=2)
    >>> [alarm.step({"kl_mu_k3": value}) for value in (2, 2, 2, 0, 2, 2)]
    ['', 'too high', '', '', '', 'too high']
    """

    def __init__(self, problem_in: Callable[[Numbers], str], *, patience: int) -> None:
        """Create the alarm. ``problem_in`` returns the problem in the metrics of a step; empty where there is none."""
        self._problem_in = problem_in
        self._patience = patience
        self._times = 0

    def step(self, numbers: Numbers) -> str:
        words = self._problem_in(numbers)
        self._times = self._times + 1 if words else 0
        return words if self._times == self._patience else ""

    def moment(self, now: Moment) -> str:
        return ""


class Now:
    """Goes off when there is a problem in the present state, and again only after a state without it."""

    def __init__(self, problem_in: Callable[[Moment], str]) -> None:
        """Create the alarm. ``problem_in`` returns the problem in the present state; empty where there is none."""
        self._problem_in = problem_in
        self._raised = False

    def step(self, numbers: Numbers) -> str:
        return ""

    def moment(self, now: Moment) -> str:
        words, before = self._problem_in(now), self._raised
        self._raised = bool(words)
        return "" if before else words


class Baseline:
    """Compares a metric with its median over the first ``num`` steps that have it."""

    def __init__(self, name: str, num: int) -> None:
        self._name = name
        self._num = num
        self._first: list[float] = []

    def __call__(self, numbers: Numbers) -> tuple[float, float] | None:
        """Return the present value and the baseline; ``None`` without a value, and while the baseline is still
        measured."""
        value = numbers.get(self._name)
        if value is None:
            return None
        if len(self._first) < self._num:
            self._first.append(value)
            return None
        return value, median(self._first)
