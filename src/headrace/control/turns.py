"""Process rewards: rewards of single turns, which are scored while their episode is still running; the episode does not
wait for the scores. A turn can be cut into *segments*, which are scored one by one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
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
"""The cause of an episode that is not trained because its reward function returned ``None``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnQuery:
    """A turn, or a segment of one, that is being scored."""

    ids_T: IntColumn
    """The tokens of the whole turn; this array is how the turn is found in the episode."""
    start: int
    """The index of the first token of the segment that is scored; 0 for a whole turn."""
    scoring: asyncio.Task[Graded]
    """The task that returns the score."""


class ProcessRewards:
    """The process rewards of the episodes that run.

    A turn is scored as soon as it has been sampled, while its episode is still running. When the episode has come to
    its end, :meth:`add` waits for the scores that are still missing. The episodes that run bound the number of turns
    that wait for a score, and the workers bound the number that are scored at the same time.

    If turns are cut into segments (``parts.segments``), each segment is scored and becomes a turn of its own. The
    process rewards are then kept beside the episode's reward and do not count in it.
    """

    def __init__(
        self,
        parts: Serving,
        scorer: TurnScorer,
        tasks: asyncio.TaskGroup,
        show_request: Callable[[], AbstractContextManager[None]],
        *,
        trainer: Callable[[EpisodeKey], TrainerState] = lambda _: TrainerState(),
    ) -> None:
        """Score turns with ``scorer`` in tasks of the group ``tasks``. ``show_request`` returns a context that is
        entered while a score is computed, so that views can show it. ``trainer`` returns the trainer state for an
        episode, for rewards that request it."""
        self._parts = parts
        self._scorer = scorer
        self._tasks = tasks
        self._show_request = show_request
        self._trainer = trainer
        self._queries: dict[EpisodeKey, list[_TurnQuery]] = {}

    def turn_ended(self, key: EpisodeKey, task: Task, prompt_ids_T: IntColumn, turn: Turn) -> None:
        """Begin to score a turn of the episode ``key``, or each of its segments. The turn was sampled after the tokens
        ``prompt_ids_T``."""
        queries, ids_T = self._queries.setdefault(key, []), turn.tokens.ids_T
        cuts = () if self._parts.segments is None else self._parts.segments(turn.tokens)
        bounds = [0, *cuts, len(ids_T)]
        for start, end in itertools.pairwise(bounds):
            history_T = np.concatenate([prompt_ids_T, ids_T[:start]])
            scoring = self._tasks.create_task(self._score(key, task, history_T, ids_T[start:end], number=len(queries)))
            queries.append(_TurnQuery(ids_T=ids_T, start=start, scoring=scoring))

    def forget(self, key: EpisodeKey) -> None:
        """Cancel the scoring of the turns of the episode ``key``, which is not needed any more."""
        for queries in self._queries.pop(key, ()):
            queries.scoring.cancel()

    async def add(self, episode: EpisodeGraph, graded: Graded) -> Graded:
        """Return ``graded``, the result for a whole episode, combined with the results for its turns, whose rewards are
        added. Wait for those that are missing. The combination has no reward if that of the episode or of a turn is
        missing."""
        turns = await self._join(episode)
        both = turns.beside(graded)
        parts = {label: both.parts[label] for label in self._scorer.labels if label in both.parts}
        both = msgspec.structs.replace(both, parts=parts, extra=graded.extra)
        if graded.reward is None or turns.reward is None:
            failed = graded if graded.reward is None else turns
            return msgspec.structs.replace(both, reward=None, failure=failed.failure)
        return msgspec.structs.replace(both, reward=graded.reward + turns.reward)

    async def _join(self, episode: EpisodeGraph) -> Graded:
        """Add the process rewards to the turns of an episode, and return one result that combines those of its turns.
        It has no reward if that of a turn is missing.

        Turns that the episode no longer has, such as those of an attempt that was retried, do not count.
        """
        # The identity of the token array names a turn: two turns may have equal tokens.
        held = {id(turn.tokens.ids_T): place for place, turn in enumerate(episode.turns)}
        queries = [one for one in self._queries.pop(episode.key, ()) if id(one.ids_T) in held]
        graded = [await one.scoring for one in queries]
        combined = Graded(reward=0.0)
        for one, scored in zip(queries, graded, strict=True):
            combined = Graded(reward=0.0, calls=scored.calls, metrics=scored.metrics).beside(combined)
            place = held[id(one.ids_T)]
            if scored.extra:
                turn = episode.turns[place]
                episode.turns[place] = msgspec.structs.replace(turn, extra={**turn.extra, **scored.extra})
        failed = next((one for one in graded if one.reward is None), None)
        if failed is not None:
            return msgspec.structs.replace(
                combined, reward=None, failure=failed.failure or REWARD_NONE, parts=failed.parts
            )
        if self._parts.segments is not None:
            places = [(held[id(one.ids_T)], one.start) for one in queries]
            _cut(episode.turns, [(*place, one.reward or 0.0) for place, one in zip(places, graded, strict=True)])
            return msgspec.structs.replace(combined, parts=self._scorer.parts_of_turns(graded))
        shares = self._scorer.over_turns(graded)
        for one, share in zip(queries, shares, strict=True):
            place = held[id(one.ids_T)]
            turn = episode.turns[place]
            episode.turns[place] = msgspec.structs.replace(turn, reward=(turn.reward or 0.0) + share)
        return msgspec.structs.replace(combined, reward=sum(shares), parts=self._scorer.parts_of_turns(graded))

    async def _score(
        self, key: EpisodeKey, task: Task, history_T: IntColumn, ids_T: IntColumn, *, number: int
    ) -> Graded:
        """Return the score of one turn, or of a segment, with the tokens ``ids_T``. ``history_T`` are the tokens before
        it, and ``number`` is its index among those of the episode."""
        parts = self._parts
        context = ScoringContext(completion_ids=(ids_T,), trainer=self._trainer(key))
        ids = ids_T.tolist()
        if ids and ids[-1] in parts.sampling.stop_ids:
            ids = ids[:-1]
        # Decoding a long history takes milliseconds, which the event loop must not lose.
        history, text = await off_loop(lambda: (parts.decode(history_T.tolist()), parts.decode(ids)))
        with self._show_request():
            return await self._scorer.score_turn(task, text, history, number, context=context)


def _cut(turns: list[Turn], graded: Sequence[tuple[int, int, float]]) -> None:
    """Cut turns of an episode into their segments, in place, and give each segment its process reward. ``graded`` has,
    for each segment, the index of its turn, the index of its first token, and the reward."""
    # From the last turn to the first, since a cut moves the indices of all later turns.
    for place in sorted({place for place, _, _ in graded}, reverse=True):
        segments = [(start, reward) for turn, start, reward in graded if turn == place]
        split(turns, place, [start for start, _ in segments[1:]])
        for number, (_, reward) in enumerate(segments, start=place):
            turns[number] = msgspec.structs.replace(turns[number], process=reward)


def assign_reward(episode: EpisodeGraph, graded: Graded) -> None:
    """Give an episode its reward, its components and its status: SCORED, or FAILED with the cause if there is no
    reward. Columns that reward functions logged go to its last sampled turn."""
    sampled = [place for place, turn in enumerate(episode.turns) if turn.stop_reason is not None]
    if graded.extra and sampled:
        turn = episode.turns[sampled[-1]]
        episode.turns[sampled[-1]] = msgspec.structs.replace(turn, extra={**turn.extra, **graded.extra})
    episode.reward, episode.parts = graded.reward, dict(graded.parts)
    episode.cause = graded.failure or (REWARD_NONE if graded.reward is None else "")
    episode.status = EpisodeStatus.FAILED if episode.cause else EpisodeStatus.SCORED
