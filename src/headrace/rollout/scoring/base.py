"""The contract of a scorer, and the settings that all kinds of rewards share.

completion ─▶ grade ─▶ clamp ─▶ × weight ─▶ Σ ─▶ reward of the episode
              each component by itself, in workers of its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import msgspec
import pydantic
from pydantic import Field

from headrace.base.clock import RealClock
from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.base.types.messages.scorer import ScoreCompletions, TrainerState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn

T = TypeVar("T")
NEWEST_SHARE = 0.02
"""The weight of the newest call in the mean time of a grader's calls."""


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scoring one completion."""

    reward: float | None
    """The reward; ``None``: none, for the reason in ``failure``, or because the function returned ``None``."""
    failure: str = ""
    """``reason: description``; empty if scoring did not fail."""
    parts: dict[str, float] = {}
    """The components of the reward by name: clamped, not weighted."""
    calls: dict[str, tuple[str, ...]] = {}
    """For each component by name, the failure of each call; empty for a call that succeeded. Components that count as
    their default are included."""
    extra: dict[str, Any] = {}
    """The columns that reward functions added with ``log_extra``."""
    metrics: dict[str, tuple[float, ...]] = {}
    """The values that reward functions passed to ``log_metric``; for a group that is scored at once, with its first
    completion."""

    def beside(self, earlier: Graded) -> Graded:
        """Return this result, with the components, calls, columns and metrics of the result ``earlier`` before its
        own."""
        return msgspec.structs.replace(
            self,
            parts={**earlier.parts, **self.parts},
            calls=_merged(earlier.calls, self.calls),
            extra={**earlier.extra, **self.extra},
            metrics=_merged(earlier.metrics, self.metrics),
        )


def _merged(first: Mapping[str, tuple[T, ...]], second: Mapping[str, tuple[T, ...]]) -> dict[str, tuple[T, ...]]:
    """Return the values of both mappings by name; where both have a name, those of ``first`` come first."""
    return {name: (*first.get(name, ()), *second.get(name, ())) for name in {**first, **second}}


class ScoringContext(msgspec.Struct, frozen=True, kw_only=True):
    """Information for scorers besides the task and the text of the completions."""

    completion_ids: tuple[IntColumn, ...] = ()
    """The tokens of each completion as they were sampled, a stop token included."""
    trainer: TrainerState = msgspec.field(default_factory=TrainerState)
    """The progress of the run."""

    def at(self, index: int) -> ScoringContext:
        """Return the context of one completion, that at ``index``."""
        return msgspec.structs.replace(self, completion_ids=self.completion_ids[index : index + 1])


NO_CONTEXT = ScoringContext()
"""The context without any information."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scoring several completions."""

    rewards: tuple[float | None, ...]
    """One reward per completion; ``None``: the function asks not to count the completion."""
    failure: str = ""
    """``reason: description`` if there are no rewards: ``reward_error``, ``reward_nan``, ``reward_timeout`` or
    ``reward_crashed``."""
    graded: tuple[Graded, ...] = ()
    """One result per completion, for a reward of several components, of which only some may fail."""
    metrics: dict[str, tuple[float, ...]] = {}
    """The values that the function passed to ``log_metric``, by name."""
    extra: tuple[dict[str, Any], ...] = ()
    """The values that it passed to ``log_extra``: the columns of each completion; empty if there are none."""

    def of(self, index: int) -> Graded:
        """Return the result for one completion, that at ``index``. The metrics, which belong to no single completion,
        are in the first one's."""
        if self.graded:
            return self.graded[index]
        extra = self.extra[index] if self.extra else {}
        metrics = self.metrics if index == 0 else {}
        if self.failure:
            return Graded(reward=None, failure=self.failure, extra=extra, metrics=metrics)
        return Graded(reward=self.rewards[index], extra=extra, metrics=metrics)


ContextField = Literal["completion_ids", "trainer"]
"""The fields of :class:`ScoringContext`; each is sent only to scorers that use it."""


class Scorer(Protocol):
    """A scorer of completions. It never raises for an error of a reward function."""

    @property
    def by_group(self) -> bool:
        """Whether it scores all completions of a group at once."""
        ...

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Score completions of ``task``: one, or a whole group where :attr:`by_group` is true."""
        ...


class TurnScorer(Protocol):
    """A scorer of the turns of an episode in progress. It never raises for an error of a reward."""

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Graded:
        """Return the process rewards of one turn: of its ``text``, after ``history``, the text that the model had read.
        ``turn`` is the number of the turn in the episode."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all components in order, those that score whole episodes included."""
        ...

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        """Return the share of each turn in the reward of the episode, from the results of :meth:`score_turn` in order.
        None of the turns may have failed."""
        ...

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        """Return the value of each component over all turns of an episode, by name, from the results of
        :meth:`score_turn`."""
        ...


class CallTimes:
    """The mean time of a grader's calls, where newer calls count more."""

    def __init__(self) -> None:
        """Begin without a call."""
        self.mean_s = math.inf
        """The mean in seconds; infinite before the first call."""
        self._clock = RealClock()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of the body as that of a call."""
        start_s = self._clock.now()
        try:
            yield
        finally:
            seconds = self._clock.now() - start_s
            known = math.isfinite(self.mean_s)
            self.mean_s = self.mean_s + NEWEST_SHARE * (seconds - self.mean_s) if known else seconds


@runtime_checkable
class TimedGrader(Protocol):
    """A grader that measures its calls, so that several of them can be ordered at once while they are short."""

    times: CallTimes
    """The times of its calls, without any wait before them."""

    async def score_each(self, requests: Sequence[ScoreCompletions], on_start: Callable[[], None]) -> list[Scores]:
        """Score requests of one completion each, one after the other, and return the scores of each. A grader that
        calls functions in threads uses one thread for all of them: to change threads takes longer than a short call.
        ``on_start`` is called, from any thread, when the first call begins."""
        ...


class Grader(Protocol):
    """The part of a scoring worker that computes one component of the reward."""

    by_group: bool
    """Whether it scores all completions of a group at once."""

    @property
    def wants(self) -> frozenset[ContextField]:
        """The fields of :class:`ScoringContext` that it uses; only these are sent to it."""
        ...

    async def score(self, request: ScoreCompletions, on_start: Callable[[], None]) -> Scores:
        """Score the completions of a request; every error becomes a failure. ``on_start`` is called, from any thread,
        when the call begins after its wait in the queue: its time counts from then on."""
        ...


class RewardSection(Section):
    """The settings that all components of a reward share."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """The name in metrics, causes and the trace; unset: its kind."""
    weight: float = 1.0
    """The factor of the component in the sum; 0: it is only measured."""
    clamp: tuple[float, float] | None = None
    """The least and the greatest value, to which the value is limited before it is weighted. Unset: no limit."""
    optional: bool = False
    """Whether a failure counts as ``default``, with a warning, instead of failing its episode."""
    default: float | None = None
    """The value of an optional component that fails."""
    timeout_s: float = Field(default=60.0, gt=0)
    """The longest time of a call, without its wait in the queue. A call that takes longer fails; the worker of a
    component that computes is replaced."""
    retries: int = Field(default=0, ge=0)
    """How often a failed call is made again, after 0.5 s, 1 s, 2 s, ..."""
    workers: int = Field(default=1, ge=1)
    """The number of processes of this component."""
    concurrency: int = Field(default=256, ge=1)
    """The most calls at once in each process; of components that compute, at most 16."""
    by_turn: bool = False
    """Whether every turn of the policy is scored while the episode is still running, instead of the last one at its
    end."""
    over_turns: Literal["mean", "sum", "min", "last"] = "mean"
    """How the scores of the turns are combined into the reward of the episode."""

    @property
    def label(self) -> str:
        """The name of the component, by which metrics and errors call it."""
        kind: str = self.model_dump(include={"kind"})["kind"]
        return self.name or kind

    @pydantic.model_validator(mode="after")
    def _has_a_default(self) -> Self:
        """Refuse an optional component without a default, a range without width, and a mean over turns that are not
        scored."""
        if self.optional != (self.default is not None):
            wrong = "optional=true without a default" if self.optional else f"default={self.default:g} without optional"
            raise ConfigError(
                f"env.rewards {self.label!r} has {wrong}", remedy="set both: optional = true and default = 0.0"
            )
        if self.clamp is not None and self.clamp[0] >= self.clamp[1]:
            raise ConfigError(
                f"env.rewards {self.label!r} has clamp={list(self.clamp)}: nothing could differ",
                remedy="write clamp = [least, greatest]",
            )
        if self.over_turns != "mean" and not self.by_turn:
            raise ConfigError(
                f"env.rewards {self.label!r} has over_turns={self.over_turns!r} and is not scored by turn",
                remedy="set by_turn = true, or leave over_turns out",
            )
        return self

    def clamped(self, value: float) -> float:
        """Return ``value``, a completion's, limited to the range ``clamp``."""
        return value if self.clamp is None else min(max(value, self.clamp[0]), self.clamp[1])

    def columns(self) -> dict[str, str]:
        """Return the columns that every row must have, by name, as far as they are known without running user code.
        Each value names the setting or parameter that reads the column, for error messages."""
        return {}

    def check(self) -> Self:
        """Validate the settings before any process starts, and return the section with the values found. Raises a
        :class:`~headrace.base.errors.HeadraceError` for a component that would fail."""
        return self

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Return the grader of this component. It is called in the scoring worker that runs it; ``executor`` is for
        calls that block."""
        raise NotImplementedError
