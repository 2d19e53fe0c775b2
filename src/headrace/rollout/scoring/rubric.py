"""A reward of several components. Each component is graded separately, then clamped, weighted and added up."""

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
"""The pause before the first repetition of a failed call, and the upper limit of a pause, in seconds. Each pause is
twice as long as the pause before."""


class Graders(Scorer, Protocol):
    """The pool of scoring workers of one component, as a rubric uses it."""

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Scores:
        """Return the scores of one turn of an episode, given its text and the text that the model read before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RubricPart:
    """One component of a rubric: its settings and its workers."""

    section: RewardSection
    """The settings of the component."""
    graders: Graders
    """The workers that compute the component."""

    @property
    def label(self) -> str:
        """The name of the component."""
        return self.section.label


class Rubric:
    """The :class:`~headrace.rollout.scoring.Scorer` and :class:`~headrace.rollout.scoring.TurnScorer` contracts over
    components.

    All components score at the same time, in separate workers. The slowest component determines the total time, and a
    component that hangs does not affect the others. A failed call is repeated up to ``retries`` times. After that the
    ``default`` of the component is used; without a default the completion has failed.
    """

    def __init__(self, components: Sequence[RubricPart], *, clock: Clock, on_span: Callable[[Span], None]) -> None:
        """Create a rubric of ``components``, in this order. If there are several components, or if a component scores
        turns, ``on_span`` receives the span of each call, for the trace."""
        self._whole = [component for component in components if not component.section.by_turn]
        """The components that score whole episodes."""
        self._by_turn = [component for component in components if component.section.by_turn]
        """The components that score turns."""
        self._labels = tuple(component.label for component in components)
        self._records_spans = len(components) > 1  # a single component takes as long as the whole score
        self._clock = clock
        self._on_span = on_span

    @property
    def by_group(self) -> bool:
        """Whether any component needs all completions of a group in one call."""
        return any(component.graders.by_group for component in self._whole)

    @property
    def by_turn(self) -> bool:
        """Whether any component scores turns."""
        return bool(self._by_turn)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the components, in order."""
        return self._labels

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        """Score the whole answers ``completions`` to ``task`` with all components that score episodes, and return the
        weighted sums. ``context`` is further information for the reward functions."""
        scores_by_label = await _gather({c.label: self._grade(c, task, completions, context) for c in self._whole})
        names_parts = len(self._labels) > 1  # a single component equals the reward
        graded = tuple(
            self._sum(
                self._whole, {label: scores.get_graded(index) for label, scores in scores_by_label.items()}, names_parts
            )
            for index in range(len(completions))
        )
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Graded:
        """Score turn number ``turn`` of an attempt at ``task``, whose text is ``text``, with all components that score
        turns, and return the weighted sum. ``history`` is the text that the model read before the turn, and ``context``
        is further information for the reward functions."""
        calls = {
            c.label: partial(c.graders.score_turn, task, text, history, turn, context=context) for c in self._by_turn
        }
        scores_by_label = await _gather({c.label: self._call_with_retries(c, calls[c.label]) for c in self._by_turn})
        return self._sum(self._by_turn, {label: scores.get_graded(0) for label, scores in scores_by_label.items()})

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        """Return the part of the episode's reward that each turn earned, given the scores ``turns`` of the turns. None
        of the turns may have failed."""
        shares = [0.0] * len(turns)
        for component in self._by_turn:
            values = [turn.parts[component.label] for turn in turns]
            for index, share in enumerate(_SHARES[component.section.over_turns](values)):
                shares[index] += component.section.weight * share
        return shares

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        """Return the value of each component over all turns of an episode, by name, without the components' weights.
        ``turns`` are the scores of the turns."""
        labels = {c.label: _SHARES[c.section.over_turns] for c in self._by_turn}
        return {label: sum(shares([turn.parts[label] for turn in turns])) for label, shares in labels.items()}

    async def _grade(
        self, component: RubricPart, task: Task, completions: tuple[str, ...], context: ScoringContext
    ) -> Scores:
        """Return the scores of all ``completions`` of ``task`` by ``component``. If failed calls are repeated, each
        completion that can be scored alone has its own call and its own retries. ``context`` is further information for
        the reward functions."""
        graders = component.graders
        if graders.by_group or len(completions) == 1 or not component.section.retries:
            return await self._call_with_retries(component, partial(graders.score, task, completions, context))
        calls = [
            partial(graders.score, task, (completion,), context.select(index))
            for index, completion in enumerate(completions)
        ]
        scores_by_index = await _gather(
            {index: self._call_with_retries(component, call) for index, call in enumerate(calls)}
        )
        graded = tuple(scores.get_graded(0) for scores in scores_by_index.values())
        return Scores(rewards=tuple(each.reward for each in graded), graded=graded)

    async def _call_with_retries(self, component: RubricPart, call: Callable[[], Awaitable[Scores]]) -> Scores:
        """Execute ``call``, a call of the workers of ``component``. Repeat it with growing pauses while it fails and
        retries are left. Return the last result."""
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
        """Return the weighted sum of ``components`` for one completion. ``graded`` are their results by label. If an
        optional component fails or returns ``None``, its default is used. ``names_parts`` says whether the result lists
        the values of the components."""
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
                    self._add_label(component, graded_part.failure)
                )
        extra: dict[str, Any] = {}
        metrics: dict[str, tuple[float, ...]] = {}
        for label, each in graded.items():
            extra |= {f"{label}.{name}" if name in extra else name: value for name, value in each.extra.items()}
            metrics |= {name: (*metrics.get(name, ()), *values) for name, values in each.metrics.items()}
        reward, failure = None, failures[0] if failures else ""
        if self._labels and not failures and not without_reward:  # a rubric without components gives no reward
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

    def _add_label(self, component: RubricPart, failure: str) -> str:
        """Return the text of ``failure`` with the name of its component inserted, if the rubric has several components.
        An empty text stays empty."""
        if len(self._labels) == 1 or not failure:
            return failure
        reason, _, details = failure.partition(": ")
        return f"{reason}: {component.label}: {details}"


async def _gather(calls: Mapping[K, Coroutine[Any, Any, Scores]]) -> dict[K, Scores]:
    """Run all coroutines ``calls`` concurrently, and return their results by the same keys."""
    if len(calls) == 1:  # most runs have one reward: this avoids a task per call
        return {key: await call for key, call in calls.items()}
    async with asyncio.TaskGroup() as group:
        tasks = {key: group.create_task(call) for key, call in calls.items()}
    return {key: task.result() for key, task in tasks.items()}


def _min_shares(values: Sequence[float]) -> list[float]:
    """Return the share of each turn in the reward if the reward of an episode is the smallest score of its turns: the
    turn with the smallest score has all of it."""
    smallest = min(range(len(values)), key=values.__getitem__, default=0)
    return [value if index == smallest else 0.0 for index, value in enumerate(values)]


_SHARES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "mean": lambda values: [value / len(values) for value in values],
    "sum": list,
    "min": _min_shares,
    "last": lambda values: [*[0.0] * (len(values) - 1), *values[-1:]],
}
"""By value of ``over_turns``: a function from the scores of the turns to their shares in the reward of the episode."""
