"""What a scorer is, and what every kind of reward has in common.

completion ─▶ grade ─▶ clamp ─▶ × weight ─▶ Σ ─▶ reward of the episode
              each component by itself, in workers of its own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import pydantic
from pydantic import Field

from headrace.config import Section
from headrace.errors import ConfigError
from headrace.types.messages.scorer import Score
from headrace.types.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What scoring one completion came to."""

    reward: float | None
    """``None``: none, for the reason that ``failure`` gives, or by the function's own word where it gives none."""
    failure: str = ""
    """``reason: words``; empty where there is none."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of the reward by name: clamped, not weighted."""


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
    notes: tuple[str, ...] = ()
    """What people should know of it, though it is no failure."""

    def of(self, place: int) -> Graded:
        """What became of one completion."""
        if self.graded:
            return self.graded[place]
        if self.failure:
            return Graded(reward=None, failure=self.failure)
        return Graded(reward=self.rewards[place])


class Scorer(Protocol):
    """Scores completions; never raises for what a reward function did."""

    @property
    def by_group(self) -> bool:
        """Whether it wants all completions of a group at once."""
        ...

    async def score(self, task: Task, completions: tuple[str, ...]) -> Scores:
        """Score completions of ``task``: one, or a whole group where :attr:`by_group`."""
        ...


class TurnScorer(Protocol):
    """Scores the turns of an episode while it goes on; never raises for what a reward did."""

    async def score_turn(self, task: Task, text: str, history: str, turn: int) -> Graded:
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

    async def score(self, request: Score, on_start: Callable[[], None]) -> Scores:
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

    def check(self) -> Self:
        """Refuse what can be known to fail before any process starts; the section with what it found filled in.
        :class:`~headrace.errors.HeadraceError` says what is wrong."""
        return self

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """At work, in the process that it will run in; ``executor`` is for what blocks."""
        raise NotImplementedError
