"""The contract of an alarm, classes from which alarms are built, and the settings of alarms.

An *alarm* checks the metrics of each optimizer step, or the present state of the run, for one problem, such as a
collapse of the entropy. The alarm *goes off* when the problem begins: the user is warned, and the run may stop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Protocol

from pydantic import Field

from headrace.base.config import Section
from headrace.base.config.kinds import NameOf
from headrace.base.plugins import Registry
from headrace.base.types.observation import LiveState

Numbers = Mapping[str, float]
"""The metrics of one step, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The message of an alarm that has just gone off."""

    name: str
    """The name of the alarm, such as ``entropy``."""
    words: str
    """The problem in words, with its numbers."""
    advice: str
    """The advice to the user."""

    def __str__(self) -> str:
        """Return the message as one line: the name of the alarm, the problem and the advice."""
        return f"alarm {self.name}: {self.words}. {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The present state of a run, which alarms receive once a second."""

    state: LiveState
    """The state that the terminal view shows too: steps, times, and what each loop waits for."""
    free_bytes: int
    """The free space on the disk of the run directory."""


class Alarm(Protocol):
    """The contract of an alarm: a state machine that goes off once when a problem begins, and again only after the
    problem has ended. Both methods return the problem in words when the alarm goes off, else an empty string."""

    def step(self, numbers: Numbers) -> str:
        """Check the metrics of an optimizer step that has ended, by name. Return the problem in words if the alarm goes
        off now, else an empty string."""

    def moment(self, now: Moment) -> str:
        """Check the present state of the run, once a second. Return the problem in words if the alarm goes off now,
        else an empty string."""


class Lasting:
    """An alarm on the metrics of steps. It goes off when a problem has lasted for ``patience`` steps in a row, and
    again only after a step without the problem.

    >>> alarm = Lasting(lambda numbers: "too high" if numbers["kl_mu_k3"] > 1 else "", patience=2)
    >>> [alarm.step({"kl_mu_k3": value}) for value in (2, 2, 2, 0, 2, 2)]
    ['', 'too high', '', '', '', 'too high']
    """

    def __init__(self, problem_in: Callable[[Numbers], str], *, patience: int) -> None:
        """Create the alarm. ``problem_in`` returns the problem in the metrics of a step, in words; an empty string for
        a step without the problem. ``patience`` is a number of steps, at least 1."""
        self._find_problem = problem_in
        self._patience = patience
        self._num_in_row = 0
        """The number of the last steps in a row that had the problem."""

    def step(self, numbers: Numbers) -> str:
        """Return the problem in the metrics of this step if it is the ``patience``-th step in a row with the problem,
        else an empty string."""
        words = self._find_problem(numbers)
        self._num_in_row = self._num_in_row + 1 if words else 0
        return words if self._num_in_row == self._patience else ""

    def moment(self, now: Moment) -> str:
        """Return an empty string: this alarm goes off at the end of steps alone."""
        return ""


class Now:
    """An alarm on the present state of the run. It goes off at once when a state has the problem, and again only after
    a state without the problem."""

    def __init__(self, problem_in: Callable[[Moment], str]) -> None:
        """Create the alarm. ``problem_in`` returns the problem in the present state, in words; an empty string for a
        state without the problem."""
        self._find_problem = problem_in
        self._had_problem = False
        """Whether the last state had the problem."""

    def step(self, numbers: Numbers) -> str:
        """Return an empty string: this alarm does not read the metrics of steps."""
        return ""

    def moment(self, now: Moment) -> str:
        """Return the problem in the present state if the state before did not have it, else an empty string."""
        words, had_problem = self._find_problem(now), self._had_problem
        self._had_problem = bool(words)
        return "" if had_problem else words


class Baseline:
    """The normal value of one metric, with which alarms compare later steps: the median over the first ``num`` steps
    that have the metric. The alarm calls the object with the metrics of every step, in order."""

    def __init__(self, name: str, num: int) -> None:
        """Start without a baseline for the metric ``name``; its first ``num`` values will make it."""
        self._name = name
        self._num = num
        self._first_values: list[float] = []
        """The values of the metric in the first steps, whose median is the baseline."""

    def __call__(self, numbers: Numbers) -> tuple[float, float] | None:
        """Return the value of the metric in this step and the baseline, its median over the first steps; ``None`` if
        the step lacks the metric, and while the baseline is still being measured."""
        value = numbers.get(self._name)
        if value is None:
            return None
        if len(self._first_values) < self._num:
            self._first_values.append(value)
            return None
        return value, median(self._first_values)


OWN = ("entropy", "zero_variance", "rewards", "kl", "mismatch", "length", "repetition", "stall", "disk")
"""The names of Headrace's own alarms."""
OFFERED = Registry[Any](group="headrace.alarms", setting="the alarm")
"""The registry of the alarms of installed packages, each an :class:`~headrace.run.observe.alarms.rows.AlarmRow`."""
AlarmName = Annotated[str, NameOf(OFFERED, also=OWN)]
"""The name of one of Headrace's alarms, or of an installed package's."""


class AlarmsConfig(Section):
    """The settings of the alarms, ``[observe.alarms]``: which are on, which stop the run, and their thresholds."""

    off: tuple[AlarmName, ...] = ()
    """The alarms that are switched off."""
    on: tuple[Annotated[str, NameOf(OFFERED)], ...] = ()
    """The alarms of installed packages that are switched on, beside those of Headrace."""
    stop_on: tuple[AlarmName, ...] = ()
    """The alarms that end the run as Ctrl-C does: with a checkpoint, after the steps that the learner has already
    received."""
    patience: int = Field(default=3, ge=1)
    """The number of steps in a row for which a problem must last before its alarm goes off."""
    baseline_steps: int = Field(default=10, ge=1)
    """The number of steps at the beginning of a run whose median entropy, length and repetition are the baseline for
    later steps."""
    entropy_frac: float = Field(default=0.1, gt=0, lt=1)
    """``entropy`` goes off if the mean entropy is below this fraction of the baseline."""
    zero_variance_frac: float = Field(default=0.9, gt=0, le=1)
    """``zero_variance`` goes off if at least this fraction of the groups has equal rewards."""
    max_reward_failed: float = Field(default=0.1, ge=0, lt=1)
    """``rewards`` goes off if more than this fraction of the calls of a reward component has failed."""
    max_kl: float = Field(default=0.5, gt=0)
    """``kl`` goes off if KL(μ‖π) by k3 over the batch, or KL(π‖π_ref), is above this, in nats per token."""
    max_mismatch: float = Field(default=0.01, gt=0)
    """``mismatch`` goes off if KL between engine and learner over fresh tokens is above this, in nats per token. About
    0.0004 is usual, 0.0015 in a mixture of experts without replay; a run with 0.013 has collapsed."""
    length_times: float = Field(default=3.0, gt=1)
    """``length`` goes off if episodes are this many times as long as the baseline."""
    max_repetition: float = Field(default=0.5, gt=0, le=1)
    """``repetition`` goes off if this fraction of 4-grams occurred earlier in the same episode, and it is at least
    twice the baseline."""
    stall_s: float = Field(default=120.0, gt=0)
    """``stall`` goes off if no step has ended for this many seconds and for five times the usual step."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """``disk`` goes off if fewer gigabytes than this are free on the disk of the run directory."""
