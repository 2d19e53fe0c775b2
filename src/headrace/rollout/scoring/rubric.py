"""A reward of several components: each graded by itself, clamped, weighted, added up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from headrace.base.clock import Clock
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.rollout.scoring.base import NO_CONTEXT, Graded, RewardSection, Scorer, Scores, ScoringContext

K = TypeVar("K")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a failed call is made again; twice as long every time."""


class Graders(Scorer, Protocol):
    """The workers of one component."""

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Scores:
        """Score one turn of an episode, from its text and all that the model had read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricPart:
    """One part of a rubric."""

    section: RewardSection
    graders: Graders

    @property
    def label(self) -> str:
        """How it is called."""
        return self.section.label


class Rubric:
    """The :class:`~headrace.rollout.scoring.Scorer` and :class:`~headrace.rollout.scoring.TurnScorer` contracts over
    components.

    Components are asked at the same time, each in workers of its own: the slowest decides how long it takes, and a
    hung one costs no other its answer. A call that fails is made again, ``retries`` times; then the component's
    ``default`` stands in for it, or the completion has failed.
    """

    def __init__(self, components: Sequence[RubricPart], *, clock: Clock, on_span: Callable[[Span], None]) -> None:
        self._whole = [component for component in components if not component.section.by_turn]
        self._by_turn = [component for component in components if component.section.by_turn]
        self._labels = tuple(component.label for component in components)
        self._apart = len(components) > 1  # one alone takes as long as the episode's score, which is told anyhow
        self._clock = clock
        self._on_span = on_span

    @property
    def by_group(self) -> bool:
        """Whether a component wants all completions of a group at once."""
        return any(component.graders.by_group for component in self._whole)

    @property
    def by_turn(self) -> bool:
        """Whether a component scores turns."""
        return bool(self._by_turn)

    @property
    def labels(self) -> tuple[str, ...]:
        """The components, in order."""
        return self._labels

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        asked = await _all({c.label: self._grade(c, task, completions, context) for c in self._whole})
        graded = tuple(
            self._sum(self._whole, {label: scores.of(place) for label, scores in asked.items()})
            for place in range(len(completions))
        )
        if len(self._labels) == 1:  # it is the reward
            graded = tuple(replace(each, parts={}) for each in graded)
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Graded:
        calls = {
            c.label: partial(c.graders.score_turn, task, text, history, turn, context=context) for c in self._by_turn
        }
        asked = await _all({c.label: self._again(c, calls[c.label]) for c in self._by_turn})
        return self._sum(self._by_turn, {label: scores.of(0) for label, scores in asked.items()})

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        """What each of an episode's turns adds to its reward, from their scores; none of them has failed."""
        shares = [0.0] * len(turns)
        for component in self._by_turn:
            values = [turn.parts[component.label] for turn in turns]
            for place, share in enumerate(_SHARES[component.section.over_turns](values)):
                shares[place] += component.section.weight * share
        return shares

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        """The components over all turns of an episode, as they count in its reward, but for their weights."""
        labels = {c.label: _SHARES[c.section.over_turns] for c in self._by_turn}
        return {label: sum(shares([turn.parts[label] for turn in turns])) for label, shares in labels.items()}

    async def _grade(
        self, component: RubricPart, task: Task, completions: tuple[str, ...], context: ScoringContext
    ) -> Scores:
        """All completions, at once or one by one as the component wants them."""
        graders = component.graders
        if graders.by_group or len(completions) == 1:
            return await self._again(component, partial(graders.score, task, completions, context))
        calls = [
            partial(graders.score, task, (completion,), context.at(place))
            for place, completion in enumerate(completions)
        ]
        asked = await _all({place: self._again(component, call) for place, call in enumerate(calls)})
        graded = tuple(scores.of(0) for scores in asked.values())
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def _again(self, component: RubricPart, call: Callable[[], Awaitable[Scores]]) -> Scores:
        """One call, and those after it while they fail."""
        pause_s, left = FIRST_PAUSE_S, component.section.retries
        while True:
            start_s = self._clock.now()
            scores = await call()
            if self._apart or component.section.by_turn:
                end_s = self._clock.now()
                self._on_span(Span(lane=f"reward {component.label}", name="score", start_s=start_s, end_s=end_s))
            if not scores.failure or not left:
                return scores
            await asyncio.sleep(pause_s)
            pause_s, left = min(2 * pause_s, LONGEST_PAUSE_S), left - 1

    def _sum(self, components: Sequence[RubricPart], graded: Mapping[str, Graded]) -> Graded:
        """One completion's components, added up. A component that is optional counts as its default where it fails,
        and where it returned ``None``, which is no failure."""
        parts: dict[str, float] = {}
        none: list[str] = []
        lost: list[str] = []
        for component in components:
            section, one = component.section, graded[component.label]
            if one.reward is not None:
                parts[component.label] = section.clamped(one.reward)
            elif section.default is not None:
                parts[component.label] = section.default
            else:
                (lost if one.failure else none).append(self._named(component, one.failure))
        said = Graded(reward=None, parts=parts, calls={label: (each.failure,) for label, each in graded.items()})
        for label, each in graded.items():
            twice = {f"{label}.{name}" if name in said.extra else name: value for name, value in each.extra.items()}
            said = Graded(reward=None, extra=twice, metrics=each.metrics).beside(said)
        if lost or none:
            return replace(said, failure=lost[0] if lost else "")
        if not self._labels:  # nobody says what an episode earns
            return said
        reward = sum(component.section.weight * parts[component.label] for component in components)
        if not math.isfinite(reward):
            return replace(said, failure="reward_nan: the weighted sum is not finite")
        return replace(said, reward=reward)

    def _named(self, component: RubricPart, failure: str) -> str:
        """A failure says whose it is, where there are several."""
        if len(self._labels) == 1 or not failure:
            return failure
        reason, _, words = failure.partition(": ")
        return f"{reason}: {component.label}: {words}"


async def _all(asked: Mapping[K, Coroutine[Any, Any, Scores]]) -> dict[K, Scores]:
    """The answers, which are waited for at the same time."""
    if len(asked) == 1:  # most runs have one reward: no task is made for each of its answers
        return {key: await answer for key, answer in asked.items()}
    async with asyncio.TaskGroup() as group:
        tasks = {key: group.create_task(answer) for key, answer in asked.items()}
    return {key: task.result() for key, task in tasks.items()}


def _mean(values: Sequence[float]) -> list[float]:
    return [value / len(values) for value in values]


def _least(values: Sequence[float]) -> list[float]:
    """The first of the least ones counts."""
    least = min(range(len(values)), key=values.__getitem__, default=0)
    return [value if place == least else 0.0 for place, value in enumerate(values)]


def _last(values: Sequence[float]) -> list[float]:
    return [value if place == len(values) - 1 else 0.0 for place, value in enumerate(values)]


_SHARES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "mean": _mean,
    "sum": list,
    "min": _least,
    "last": _last,
}
"""How the scores of turns become what each adds to the reward of the episode."""
