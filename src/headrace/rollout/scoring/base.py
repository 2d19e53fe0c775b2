"""What a scorer is, and what every kind of reward has in common.

completion ─▶ grade ─▶ clamp ─▶ × weight ─▶ Σ ─▶ reward of the episode
              each component by itself, in workers of its own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self, TypeVar

import pydantic
from pydantic import Field

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.base.types.messages.scorer import ScoreCompletions, TrainerState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What scoring one completion came to."""

    reward: float | None
    """``None``: none, for the reason that ``failure`` gives, or by the function's own word where it gives none."""
    failure: str = ""
    """``reason: words``; empty where there is none."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of the reward by name: clamped, not weighted."""
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The components by name: of each call that was made the failure, empty where it did not fail. Also of components
    that count as their default."""
    extra: dict[str, Any] = field(default_factory=dict)
    """The columns that reward functions added with ``log_extra``."""
    metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What reward functions gave to ``log_metric``; of a group that is scored at once, with its first completion."""

    def beside(self, other: Graded) -> Graded:
        """Return this one, with what ``other`` says of components, calls, columns and metrics before its own."""
        return replace(
            self,
            parts={**other.parts, **self.parts},
            calls=_joined(other.calls, self.calls),
            extra={**other.extra, **self.extra},
            metrics=_joined(other.metrics, self.metrics),
        )


def _joined(one: Mapping[str, tuple[T, ...]], other: Mapping[str, tuple[T, ...]]) -> dict[str, tuple[T, ...]]:
    return {name: (*one.get(name, ()), *other.get(name, ())) for name in {**one, **other}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringContext:
    """What scorers are told beside the task and the text of the completions."""

    completion_ids: tuple[IntColumn, ...] = ()
    """The tokens of each completion as they were sampled, a stop token included."""
    trainer: TrainerState = field(default_factory=TrainerState)
    """Where the run is."""

    def at(self, place: int) -> ScoringContext:
        """The context of one of the completions."""
        return replace(self, completion_ids=self.completion_ids[place : place + 1])


NO_CONTEXT = ScoringContext()
"""Nothing is known beside task and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What scoring some completions came to."""

    rewards: tuple[float | None, ...]
    """One per completion; ``None``: the function's own word for 'do not count this one'."""
    failure: str = ""
    """``reason: words`` where there are no rewards: ``reward_error``, ``reward_nan``, ``reward_timeout``,
    ``reward_crashed``."""
    graded: tuple[Graded, ...] = ()
    """One per completion, where the reward has several components: some may fail, and others not."""
    metrics: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """What the function gave to ``log_metric``, by name."""
    extra: tuple[dict[str, Any], ...] = ()
    """What it gave to ``log_extra``: for each completion its columns; empty where it gave nothing."""

    def of(self, place: int) -> Graded:
        """What became of one completion."""
        if self.graded:
            return self.graded[place]
        extra = self.extra[place] if self.extra else {}
        metrics = self.metrics if place == 0 else {}
        if self.failure:
            return Graded(reward=None, failure=self.failure, extra=extra, metrics=metrics)
        return Graded(reward=self.rewards[place], extra=extra, metrics=metrics)


Wanted = Literal["completion_ids", "trainer"]
"""Fields of :class:`ScoringContext`, which travel only to scorers that want them."""


class Scorer(Protocol):
    """Scores completions; never raises for what a reward function did."""

    @property
    def by_group(self) -> bool:
        """Whether it wants all completions of a group at once."""
        ...

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Score completions of ``task``: one, or a whole group where :attr:`by_group`."""
        ...


class TurnScorer(Protocol):
    """Scores the turns of an episode while it goes on; never raises for what a reward did."""

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Graded:
        """The process rewards of one turn, from its text and all that the model had read."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """All components, those that score whole episodes included, in order."""
        ...

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        """What each turn adds to the reward of the episode; none of them has failed."""
        ...

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        """What the components come to over all turns."""
        ...


class Grader(Protocol):
    """One component at work, in a scoring worker."""

    by_group: bool
    """Whether it wants all completions of a group at once."""

    @property
    def wants(self) -> frozenset[Wanted]:
        """What it wants to be told beside task and text."""
        ...

    async def score(self, request: ScoreCompletions, on_start: Callable[[], None]) -> Scores:
        """Score what is asked; whatever goes wrong becomes a failure. Calls ``on_start``, from any thread, when the
        turn of this call has come: from then on its time runs."""
        ...


class RewardSection(Section):
    """One component of a reward: what all kinds have in common."""

    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """How metrics, causes and the trace call it; unset: its kind."""
    weight: float = 1.0
    """What it is multiplied with in the sum; 0: only measured."""
    clamp: tuple[float, float] | None = None
    """Least and greatest value: what it graded is brought within, before it is weighted. Unset: as it was graded."""
    optional: bool = False
    """Whether a failure counts as ``default``, with a warning, instead of failing its episode."""
    default: float | None = None
    """Value of an optional component that fails."""
    timeout_s: float = Field(default=60.0, gt=0)
    """A call that has not returned this long after it began has failed; one that computes has its worker replaced."""
    retries: int = Field(default=0, ge=0)
    """How often a call that failed is made again, after 0.5 s, 1 s, 2 s, ..."""
    workers: int = Field(default=1, ge=1)
    """Processes of its own."""
    concurrency: int = Field(default=256, ge=1)
    """Calls at once in each of them; of those that compute, at most 16."""
    by_turn: bool = False
    """Score every turn that the policy writes, while the episode goes on, instead of the last one at its end."""
    over_turns: Literal["mean", "sum", "min", "last"] = "mean"
    """What the scores of its turns add to the reward of the episode."""

    @property
    def label(self) -> str:
        """How it is called."""
        kind: str = self.model_dump(include={"kind"})["kind"]
        return self.name or kind

    @pydantic.model_validator(mode="after")
    def _has_a_default(self) -> Self:
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
        """As ``clamp`` says."""
        return value if self.clamp is None else min(max(value, self.clamp[0]), self.clamp[1])

    def columns(self) -> dict[str, str]:
        """Return the columns that every row must have, each with the words that name who reads it. What can be known
        without running code of the user's."""
        return {}

    def check(self) -> Self:
        """Refuse what can be known to fail before any process starts; the section with what it found filled in.
        :class:`~headrace.base.errors.HeadraceError` says what is wrong."""
        return self

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """At work, in the process that it will run in; ``executor`` is for what blocks."""
        raise NotImplementedError
