"""A reward of several components: each graded by itself, clamped, weighted and added up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from headrace.base.clock import Clock
from headrace.base.types.task import Task
from headrace.base.types.trace import Span
from headrace.rollout.scoring.base import NO_CONTEXT, Graded, RewardSection, Scorer, Scores, ScoringContext

K = TypeVar("K")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""The pause before a failed call is made again, and its upper limit, in seconds; each pause is twice the one before."""


class Graders(Scorer, Protocol):
    """The pool of scoring workers of one component."""

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Scores:
        """Score one turn of an episode, from its text and the text that the model had read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricPart:
    """One component of a rubric: its settings, and the workers that compute it."""

    section: RewardSection
    """The settings of the component."""
    graders: Graders
    """The workers that compute it."""

    @property
    def label(self) -> str:
        """The name of the component."""
        return self.section.label


class Rubric:
    """The :class:`~headrace.rollout.scoring.Scorer` and :class:`~headrace.rollout.scoring.TurnScorer` contracts over
    components.

    All components score at the same time, each in workers of its own: the slowest one determines the time, and one that
    hangs does not affect the others. A call that fails is made again, up to ``retries`` times; then the component
    counts as its ``default``, or the completion has failed.
    """

    def __init__(self, components: Sequence[RubricPart], *, clock: Clock, on_span: Callable[[Span], None]) -> None:
        """Combine ``components``, in this order. ``on_span`` is called with the span of each call of one of several
        components, for the trace."""
        self._whole = [component for component in components if not component.section.by_turn]
        self._by_turn = [component for component in components if component.section.by_turn]
        self._labels = tuple(component.label for component in components)
        self._records_spans = len(components) > 1  # the only one takes as long as the whole score
        self._clock = clock
        self._on_span = on_span

    @property
    def by_group(self) -> bool:
        """Whether a component scores all completions of a group at once."""
        return any(component.graders.by_group for component in self._whole)

    @property
    def by_turn(self) -> bool:
        """Whether a component scores turns."""
        return bool(self._by_turn)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the components, in order."""
        return self._labels

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Score whole answers to a task by all components, and return their weighted sums."""
        scores_by_label = await _gather({c.label: self._grade(c, task, completions, context) for c in self._whole})
        names_parts = len(self._labels) > 1  # the only component is the reward
        graded = tuple(
            self._sum(self._whole, {label: scores.of(index) for label, scores in scores_by_label.items()}, names_parts)
            for index in range(len(completions))
        )
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Graded:
        """Score one turn by the components that are scored by turn, and return their weighted sum. ``history`` is the
        conversation before it."""
        calls = {
            c.label: partial(c.graders.score_turn, task, text, history, turn, context=context) for c in self._by_turn
        }
        scores_by_label = await _gather({c.label: self._with_retries(c, calls[c.label]) for c in self._by_turn})
        return self._sum(self._by_turn, {label: scores.of(0) for label, scores in scores_by_label.items()})

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        """Return the share of each turn in the reward of the episode, from their scores. None of the turns may have
        failed."""
        shares = [0.0] * len(turns)
        for component in self._by_turn:
            values = [turn.parts[component.label] for turn in turns]
            for index, share in enumerate(_SHARES[component.section.over_turns](values)):
                shares[index] += component.section.weight * share
        return shares

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        """Return the components over all turns of an episode, as they count in its reward, without their weights."""
        labels = {c.label: _SHARES[c.section.over_turns] for c in self._by_turn}
        return {label: sum(shares([turn.parts[label] for turn in turns])) for label, shares in labels.items()}

    async def _grade(
        self, component: RubricPart, task: Task, completions: tuple[str, ...], context: ScoringContext
    ) -> Scores:
        """Return one component's scores of all completions. If failed calls are made again, each completion that is
        scored by itself has calls of its own."""
        graders = component.graders
        if graders.by_group or len(completions) == 1 or not component.section.retries:
            return await self._with_retries(component, partial(graders.score, task, completions, context))
        calls = [
            partial(graders.score, task, (completion,), context.at(index))
            for index, completion in enumerate(completions)
        ]
        scores_by_index = await _gather(
            {index: self._with_retries(component, call) for index, call in enumerate(calls)}
        )
        graded = tuple(scores.of(0) for scores in scores_by_index.values())
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def _with_retries(self, component: RubricPart, call: Callable[[], Awaitable[Scores]]) -> Scores:
        """Make one call of a component's workers, and repeat it with growing pauses while it fails and retries are
        left. Return the last result."""
        pause_s, retries = FIRST_PAUSE_S, component.section.retries
        while True:
            start_s = self._clock.now()
            scores = await call()
            if self._records_spans or component.section.by_turn:
                end_s = self._clock.now()
                self._on_span(Span(lane=f"reward {component.label}", name="score", start_s=start_s, end_s=end_s))
            if not scores.failure or not retries:
                return scores
            await asyncio.sleep(pause_s)
            pause_s, retries = min(2 * pause_s, LONGEST_PAUSE_S), retries - 1

    def _sum(self, components: Sequence[RubricPart], graded: Mapping[str, Graded], names_parts: bool = True) -> Graded:
        """Add up the components of one completion. An optional component counts as its default if it fails, and if it
        returned ``None``, which is not a failure. ``names_parts`` says whether the result lists the components."""
        parts: dict[str, float] = {}
        without_reward: list[str] = []
        failures: list[str] = []
        for component in components:
            section, graded_part = component.section, graded[component.label]
            if graded_part.reward is not None:
                parts[component.label] = section.clamped(graded_part.reward)
            elif section.default is not None:
                parts[component.label] = section.default
            else:
                (failures if graded_part.failure else without_reward).append(
                    self._with_label(component, graded_part.failure)
                )
        extra: dict[str, Any] = {}
        metrics: dict[str, tuple[float, ...]] = {}
        for label, each in graded.items():
            extra |= {f"{label}.{name}" if name in extra else name: value for name, value in each.extra.items()}
            metrics |= {name: (*metrics.get(name, ()), *values) for name, values in each.metrics.items()}
        reward, failure = None, failures[0] if failures else ""
        if self._labels and not failures and not without_reward:  # without a component the environment rewards
            reward = sum(component.section.weight * parts[component.label] for component in components)
            if not math.isfinite(reward):
                reward, failure = None, "reward_nan: the weighted sum is not finite"
        return Graded(
            reward=reward,
            failure=failure,
            parts=parts if names_parts else {},
            calls={label: (each.failure,) for label, each in graded.items()},
            extra=extra,
            metrics=metrics,
        )

    def _with_label(self, component: RubricPart, failure: str) -> str:
        """Return the text of a ``failure`` with the name of its component in it, if there are several components; an
        empty one stays empty."""
        if len(self._labels) == 1 or not failure:
            return failure
        reason, _, words = failure.partition(": ")
        return f"{reason}: {component.label}: {words}"


async def _gather(answers: Mapping[K, Coroutine[Any, Any, Scores]]) -> dict[K, Scores]:
    """Wait for all coroutines at the same time, and return their results by the same keys."""
    if len(answers) == 1:  # most runs have one reward: no task is made for each of its answers
        return {key: await answer for key, answer in answers.items()}
    async with asyncio.TaskGroup() as group:
        tasks = {key: group.create_task(answer) for key, answer in answers.items()}
    return {key: task.result() for key, task in tasks.items()}


def _mean(values: Sequence[float]) -> list[float]:
    """Return the shares of the turns' scores if an episode earns their mean."""
    return [value / len(values) for value in values]


def _least(values: Sequence[float]) -> list[float]:
    """Return the shares of the turns' scores if an episode earns the least of them: that turn's score, and 0 for the
    others."""
    least = min(range(len(values)), key=values.__getitem__, default=0)
    return [value if index == least else 0.0 for index, value in enumerate(values)]


def _last(values: Sequence[float]) -> list[float]:
    """Return the shares of the turns' scores if an episode earns the score of its last turn."""
    return [value if index == len(values) - 1 else 0.0 for index, value in enumerate(values)]


_SHARES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "mean": _mean,
    "sum": list,
    "min": _least,
    "last": _last,
}
"""Functions from the scores of turns to their shares in the reward of the episode."""
