"""The contract of a scorer, and the settings that all kinds of rewards share.

completion ─▶ grade ─▶ clamp ─▶ × weight ─▶ Σ ─▶ reward of the episode
              each component by itself, in workers of its own
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
"""The weight of the newest call in the running mean of a grader's call times."""


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scoring one completion."""

    reward: float | None
    """The reward. ``None`` if there is none, because scoring failed (see ``failure``) or because the function returned
    ``None``."""
    failure: str = ""
    """``reason: description`` if scoring failed; empty otherwise."""
    parts: dict[str, float] = {}
    """The values of the reward's components by name, clamped but not weighted."""
    calls: dict[str, tuple[str, ...]] = {}
    """For each component by name, the failure of each of its calls; the text is empty for a call that succeeded. Failed
    components whose ``default`` is used are included."""
    extra: dict[str, Any] = {}
    """The columns that reward functions logged with ``log_extra``."""
    metrics: dict[str, tuple[float, ...]] = {}
    """The values that reward functions logged with ``log_metric``. If a group is scored at once, they are in the result
    of its first completion."""

    def beside(self, earlier: Graded) -> Graded:
        """Return a copy of this result that also contains the components, calls, columns and metrics of ``earlier``.
        The reward and the failure of this result are kept."""
        return msgspec.structs.replace(
            self,
            parts={**earlier.parts, **self.parts},
            calls=_merge(earlier.calls, self.calls),
            extra={**earlier.extra, **self.extra},
            metrics=_merge(earlier.metrics, self.metrics),
        )


def _merge(first: Mapping[str, tuple[T, ...]], second: Mapping[str, tuple[T, ...]]) -> dict[str, tuple[T, ...]]:
    """Return both mappings as one. If both contain a name, the values of ``first`` come before the values of
    ``second``."""
    return {name: (*first.get(name, ()), *second.get(name, ())) for name in {**first, **second}}


class ScoringContext(msgspec.Struct, frozen=True, kw_only=True):
    """Information for scorers in addition to the task and the text of the completions."""

    completion_ids: tuple[IntColumn, ...] = ()
    """The token ids of each completion as they were sampled, including a stop token."""
    trainer: TrainerState = msgspec.field(default_factory=TrainerState)
    """The progress of the run."""

    def select(self, index: int) -> ScoringContext:
        """Return the context of the single completion with the index ``index``."""
        return msgspec.structs.replace(self, completion_ids=self.completion_ids[index : index + 1])


NO_CONTEXT = ScoringContext()
"""A context without any information."""


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The result of scoring several completions."""

    rewards: tuple[float | None, ...]
    """One reward per completion; empty if scoring failed. ``None`` means that the function excludes the completion."""
    failure: str = ""
    """``reason: description`` if scoring failed; empty otherwise. The reason is ``reward_error``, ``reward_nan``,
    ``reward_timeout`` or ``reward_crashed``."""
    graded: tuple[Graded, ...] = ()
    """One result per completion, for a reward of several components, some of which may fail alone; empty otherwise."""
    metrics: dict[str, tuple[float, ...]] = {}
    """The values that the function logged with ``log_metric``, by name."""
    extra: tuple[dict[str, Any], ...] = ()
    """The values that the function logged with ``log_extra``, as the columns of each completion; empty if there are
    none."""

    def get_graded(self, index: int) -> Graded:
        """Return the result for the completion with the index ``index``. Metrics belong to no single completion, and
        are part of the result with index 0."""
        if self.graded:
            return self.graded[index]
        extra = self.extra[index] if self.extra else {}
        metrics = self.metrics if index == 0 else {}
        if self.failure:
            return Graded(reward=None, failure=self.failure, extra=extra, metrics=metrics)
        return Graded(reward=self.rewards[index], extra=extra, metrics=metrics)


ContextField = Literal["completion_ids", "trainer"]
"""The name of a field of :class:`ScoringContext`. A field is sent only to scorers that use it."""


class Scorer(Protocol):
    """A scorer of completions. It returns an error of a reward function as a failure, and raises no exception for
    it."""

    @property
    def by_group(self) -> bool:
        """Whether the scorer needs all completions of a group in one call."""

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Return the scores of ``completions`` of ``task``: one completion, or all completions of a group if
        :attr:`by_group` is true."""


class TurnScorer(Protocol):
    """A scorer of the turns of an episode in progress. It returns an error of a reward as a failure, and raises no
    exception for it."""

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Graded:
        """Return the process reward of one turn. ``text`` is the text of the turn, ``history`` is the text that the
        model read before it, and ``turn`` is the number of the turn in the episode."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of all components in order, including components that score whole episodes."""

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        """Return the part of the episode's reward that each turn earned. ``turns`` are the results of
        :meth:`score_turn` in order, none of which may have failed."""

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        """Return the value of each component over all turns of an episode, by name. ``turns`` are the results of
        :meth:`score_turn` in order."""


@dataclass(slots=True)
class MeasuredCall:
    """A call whose duration is being measured."""

    counts: bool = True
    """Whether the duration is included in the mean. The body sets it to ``False`` if the call has only begun."""


class CallTimes:
    """The running mean of the durations of a grader's calls. Newer calls have more weight."""

    def __init__(self) -> None:
        """Create a mean without any call."""
        self.mean_s = math.inf
        """The mean duration in seconds; infinite before the first call."""
        self._clock = RealClock()

    @contextmanager
    def measure(self) -> Iterator[MeasuredCall]:
        """Measure the duration of the body and include it in the mean."""
        start_s, call = self._clock.now(), MeasuredCall()
        try:
            yield call
        finally:
            if call.counts:
                self._add(self._clock.now() - start_s)

    def _add(self, seconds: float) -> None:
        """Include the duration ``seconds`` of a call in the mean."""
        has_mean = math.isfinite(self.mean_s)
        self.mean_s = self.mean_s + NEWEST_SHARE * (seconds - self.mean_s) if has_mean else seconds


@runtime_checkable
class TimedGrader(Protocol):
    """A grader that measures its calls. If its calls are short, several of them are sent to its worker in advance."""

    times: CallTimes
    """The durations of its calls, without the time in the queue."""

    async def score_each(self, requests: Sequence[ScoreCompletions], on_start: Callable[[], None]) -> list[Scores]:
        """Score ``requests`` of one completion each sequentially, and return the scores of each. A grader that calls
        functions in threads uses one thread for all of them, because changing threads takes longer than a short call.
        ``on_start`` is called, from any thread, when the first call begins."""


class Grader(Protocol):
    """The object in a scoring worker that computes one component of the reward."""

    by_group: bool
    """Whether the grader needs all completions of a group in one call."""

    @property
    def wants(self) -> frozenset[ContextField]:
        """The fields of :class:`ScoringContext` that the grader uses. Only these fields are sent to it."""

    async def score(self, request: ScoreCompletions, on_start: Callable[[], None]) -> Scores:
        """Return the scores of the completions in ``request``. Every error becomes a failure. ``on_start`` is called,
        from any thread, when the call leaves the queue and begins; the time limit counts from then on."""


class RewardSection(Section):
    """The settings that all components of a reward share."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """The name of the component in metrics, failure causes and the trace; unset: its kind."""
    weight: float = 1.0
    """The factor of the component in the sum. With 0 the component is measured but does not change the reward."""
    clamp: tuple[float, float] | None = None
    """The smallest and the largest value. The component's value is limited to this range before it is weighted. Unset:
    no limit."""
    optional: bool = False
    """Whether a failure of this component counts as ``default``, with a warning, instead of failing the episode."""
    default: float | None = None
    """The value of an optional component that fails."""
    timeout_s: float = Field(default=60.0, gt=0)
    """The time limit of a call in seconds, without the time in the queue. A call that takes longer fails. If the
    component computes in the worker, the worker is replaced."""
    retries: int = Field(default=0, ge=0)
    """How often a failed call is repeated, after 0.5 s, 1 s, 2 s, ..."""
    workers: int = Field(default=1, ge=1)
    """The number of worker processes of this component."""
    concurrency: int = Field(default=256, ge=1)
    """The largest number of concurrent calls in each worker process; at most 16 for a component that computes in
    threads."""
    by_turn: bool = False
    """Whether every turn of the policy is scored while the episode is still running, instead of only the last turn at
    the end of the episode."""
    over_turns: Literal["mean", "sum", "min", "last"] = "mean"
    """How the scores of the turns are combined into the reward of the episode."""

    @property
    def label(self) -> str:
        """The name of the component in metrics and errors."""
        kind: str = self.model_dump(include={"kind"})["kind"]
        return self.name or kind

    @pydantic.model_validator(mode="after")
    def _settings_are_consistent(self) -> Self:
        """Refuse an optional component without a default, an empty clamp range, and ``over_turns`` without
        ``by_turn``."""
        if self.optional != (self.default is not None):
            wrong = "optional=true without a default" if self.optional else f"default={self.default:g} without optional"
            raise ConfigError(
                f"env.rewards {self.label!r} has {wrong}", remedy="set both: optional = true and default = 0.0"
            )
        if self.clamp is not None and self.clamp[0] >= self.clamp[1]:
            raise ConfigError(
                f"env.rewards {self.label!r} has clamp={list(self.clamp)}: nothing could differ",
                remedy="write clamp = [smallest, largest]",
            )
        if self.over_turns != "mean" and not self.by_turn:
            raise ConfigError(
                f"env.rewards {self.label!r} has over_turns={self.over_turns!r} and is not scored by turn",
                remedy="set by_turn = true, or leave over_turns out",
            )
        return self

    def clamped(self, value: float) -> float:
        """Return ``value``, the component's value for a completion, limited to the range ``clamp``."""
        return value if self.clamp is None else min(max(value, self.clamp[0]), self.clamp[1])

    def columns(self) -> dict[str, str]:
        """Return the columns that every row must have, as far as they can be determined without running user code. Keys
        are the names of the columns. Values name the setting or parameter that reads the column, for error messages."""
        return {}

    def check(self) -> Self:
        """Validate the settings before any process starts, and return the section, with paths resolved. Raises a
        :class:`~headrace.base.errors.HeadraceError` for a component that could not work."""
        return self

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Return the grader of this component. The scoring worker that runs the grader calls this. ``executor`` runs
        calls that block."""
        raise NotImplementedError
