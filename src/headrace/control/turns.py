"""Process rewards: turns are scored while their episode goes on, and wait for nobody."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from headrace.base.clock import off_loop
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control.parts import Serving
from headrace.rollout.branches import split
from headrace.rollout.scoring import Graded, ScoringContext, TurnScorer

REWARD_NONE = "reward_none: the reward was None, which means that the answer does not count"
"""Why an episode without a reward is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnQuery:
    ids_T: IntColumn
    """Of the turn, by which it is known again."""
    start: int
    """Which of them is the first of the segment that is scored; 0 where it is the turn as a whole."""
    scoring: asyncio.Task[Graded]


class TurnScores:
    """The process rewards of the episodes that run.

    A turn is scored as soon as it has been sampled; its episode is told nothing of it. When the episode has come to its
    end, :meth:`add` waits for those that are still on their way. How many are at once is bounded by the episodes that
    run; how many of them are computed, by the workers.

    Where turns are cut into segments (``parts.segments``), each of these is scored and becomes a turn of its own, and
    their process rewards do not count in the episode's: they stand beside it.
    """

    def __init__(
        self,
        parts: Serving,
        scorer: TurnScorer,
        tasks: asyncio.TaskGroup,
        asking: Callable[[], AbstractContextManager[None]],
        *,
        trainer: Callable[[EpisodeKey], TrainerState] = lambda _: TrainerState(),
    ) -> None:
        """``asking`` is entered while a score is waited for. ``trainer`` says where the run is, for an episode."""
        self._parts = parts
        self._scorer = scorer
        self._tasks = tasks
        self._asking = asking
        self._trainer = trainer
        self._asked: dict[EpisodeKey, list[_TurnQuery]] = {}

    def turn_ended(self, key: EpisodeKey, task: Task, prompt_ids_T: IntColumn, turn: Turn) -> None:
        """A turn has been sampled after ``prompt_ids_T``."""
        asked, ids_T = self._asked.setdefault(key, []), turn.tokens.ids_T
        cuts = () if self._parts.segments is None else self._parts.segments(turn.tokens)
        bounds = [0, *cuts, len(ids_T)]
        for start, end in itertools.pairwise(bounds):
            history_T = np.concatenate([prompt_ids_T, ids_T[:start]])
            scoring = self._tasks.create_task(self._score(key, task, history_T, ids_T[start:end], number=len(asked)))
            asked.append(_TurnQuery(ids_T=ids_T, start=start, scoring=scoring))

    def forget(self, key: EpisodeKey) -> None:
        """Nobody needs the scores of that episode any more."""
        for asked in self._asked.pop(key, ()):
            asked.scoring.cancel()

    async def add(self, episode: EpisodeGraph, graded: Graded) -> Graded:
        """What a whole episode earned, and what its turns did."""
        turns = await self._join(episode)
        both = turns.beside(graded)
        parts = {label: both.parts[label] for label in self._scorer.labels if label in both.parts}
        both = replace(both, parts=parts, extra=graded.extra)
        if graded.reward is None or turns.reward is None:
            failed = graded if graded.reward is None else turns
            return replace(both, reward=None, failure=failed.failure)
        return replace(both, reward=graded.reward + turns.reward)

    async def _join(self, episode: EpisodeGraph) -> Graded:
        """Add to the turns of an episode what they earned, and say what became of its components.

        Turns that it does not hold any more, of an attempt that was made again for one, do not count.
        """
        held = {id(turn.tokens.ids_T): place for place, turn in enumerate(episode.turns)}
        asked = [one for one in self._asked.pop(episode.key, ()) if id(one.ids_T) in held]
        graded = [await one.scoring for one in asked]
        said = Graded(reward=0.0)
        for one, scored in zip(asked, graded, strict=True):
            said = Graded(reward=0.0, calls=scored.calls, metrics=scored.metrics).beside(said)
            place = held[id(one.ids_T)]
            if scored.extra:
                turn = episode.turns[place]
                episode.turns[place] = replace(turn, extra={**turn.extra, **scored.extra})
        failed = next((one for one in graded if one.reward is None), None)
        if failed is not None:
            return replace(said, reward=None, failure=failed.failure or REWARD_NONE, parts=failed.parts)
        if self._parts.segments is not None:
            places = [(held[id(one.ids_T)], one.start) for one in asked]
            _cut(episode.turns, [(*place, one.reward or 0.0) for place, one in zip(places, graded, strict=True)])
            return replace(said, parts=self._scorer.parts_of_turns(graded))
        shares = self._scorer.over_turns(graded)
        for one, share in zip(asked, shares, strict=True):
            place = held[id(one.ids_T)]
            turn = episode.turns[place]
            episode.turns[place] = replace(turn, reward=(turn.reward or 0.0) + share)
        return replace(said, reward=sum(shares), parts=self._scorer.parts_of_turns(graded))

    async def _score(
        self, key: EpisodeKey, task: Task, history_T: IntColumn, ids_T: IntColumn, *, number: int
    ) -> Graded:
        parts = self._parts
        context = ScoringContext(completion_ids=(ids_T,), trainer=self._trainer(key))
        ids = ids_T.tolist()
        if ids and ids[-1] in parts.sampling.stop_ids:
            ids = ids[:-1]
        history, text = await off_loop(lambda: (parts.decode(history_T.tolist()), parts.decode(ids)))
        with self._asking():
            return await self._scorer.score_turn(task, text, history, number, context=context)


def _cut(turns: list[Turn], graded: Sequence[tuple[int, int, float]]) -> None:
    """Cut turns into their segments: ``graded`` has the turn, the first token and the process reward of each."""
    for place in sorted({place for place, _, _ in graded}, reverse=True):
        segments = [(start, reward) for turn, start, reward in graded if turn == place]
        split(turns, place, [start for start, _ in segments[1:]])
        for number, (_, reward) in enumerate(segments, start=place):
            turns[number] = replace(turns[number], process=reward)


def settle(episode: EpisodeGraph, graded: Graded) -> None:
    """It is scored, or has failed. What rewards logged of it stands with the last turn that was sampled."""
    sampled = [place for place, turn in enumerate(episode.turns) if turn.stop_reason is not None]
    if graded.extra and sampled:
        turn = episode.turns[sampled[-1]]
        episode.turns[sampled[-1]] = replace(turn, extra={**turn.extra, **graded.extra})
    episode.reward, episode.parts = graded.reward, dict(graded.parts)
    episode.cause = graded.failure or (REWARD_NONE if graded.reward is None else "")
    episode.status = EpisodeStatus.FAILED if episode.cause else EpisodeStatus.SCORED
