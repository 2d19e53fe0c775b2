"""Process rewards: rewards of single turns. A turn is scored while its episode is still running, and the episode does
not wait for the score. A turn can be cut into *segments*, which are scored separately."""

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
"""The cause of the failure of an episode whose reward function returned ``None``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnQuery:
    """A turn, or a segment of a turn, that is being scored."""

    ids_T: IntColumn
    """The tokens of the whole turn. The identity of this array identifies the turn in the episode."""
    start: int
    """The index of the first token of the segment that is scored; 0 for a whole turn."""
    scoring: asyncio.Task[Graded]
    """The task that returns the score."""


class ProcessRewards:
    """The process rewards of the running episodes: it starts the scoring of turns and collects the scores.

    The scoring of a turn starts when the turn has been sampled. When the episode has ended, :meth:`add` waits for the
    missing scores. The number of turns that wait for a score is bounded by the number of running episodes, and the
    number of concurrent scorings by the number of workers.

    If turns are cut into segments (``parts.segments``), each segment is scored and becomes a separate turn. The process
    rewards are then stored in these turns and are not added to the reward of the episode.
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
        """Create the object without running scorings. ``parts`` contains the tokenizer's decoder and the cut into
        segments. ``scorer`` scores turns in tasks of the group ``tasks``. ``show_request`` returns a context manager
        that is entered while a score is computed, so that views can show the request. ``trainer`` returns the trainer
        state for an episode, for reward functions that request it."""
        self._parts = parts
        self._scorer = scorer
        self._tasks = tasks
        self._show_request = show_request
        self._trainer = trainer
        self._queries: dict[EpisodeKey, list[_TurnQuery]] = {}
        """The turns and segments of each running episode that are being scored, in order."""

    def turn_ended(self, key: EpisodeKey, task: Task, prompt_ids_T: IntColumn, turn: Turn) -> None:
        """Start to score ``turn``, a turn of the episode ``key``, which attempts ``task``, or each segment of the turn.
        ``prompt_ids_T`` are the tokens of the turn's prompt."""
        queries, ids_T = self._queries.setdefault(key, []), turn.tokens.ids_T
        cuts = () if self._parts.segments is None else self._parts.segments(turn.tokens)
        bounds = [0, *cuts, len(ids_T)]
        for start, end in itertools.pairwise(bounds):
            history_T = np.concatenate([prompt_ids_T, ids_T[:start]])
            scoring = self._tasks.create_task(self._score(key, task, history_T, ids_T[start:end], number=len(queries)))
            queries.append(_TurnQuery(ids_T=ids_T, start=start, scoring=scoring))

    def forget(self, key: EpisodeKey) -> None:
        """Cancel the scoring of the turns of the episode ``key``, which was cancelled or has failed."""
        for query in self._queries.pop(key, ()):
            query.scoring.cancel()

    async def add(self, episode: EpisodeGraph, graded: Graded) -> Graded:
        """Return the result of an episode: ``graded``, its result without process rewards, combined with the results of
        its turns, whose rewards are added. Wait for results that are missing. The result has no reward if the episode
        or a turn has none."""
        turns = await self._collect_turns(episode)
        combined = turns.beside(graded)
        parts = {label: combined.parts[label] for label in self._scorer.labels if label in combined.parts}
        combined = msgspec.structs.replace(combined, parts=parts, extra=graded.extra)
        if graded.reward is None or turns.reward is None:
            failed = graded if graded.reward is None else turns
            return msgspec.structs.replace(combined, reward=None, failure=failed.failure)
        return msgspec.structs.replace(combined, reward=graded.reward + turns.reward)

    async def _collect_turns(self, episode: EpisodeGraph) -> Graded:
        """Set the process rewards of an episode's turns, and return one result that combines the results of all turns.
        It has no reward if a turn has none.

        Results of turns that the episode does not contain are ignored, such as turns of an attempt that was retried.
        """
        # The identity of the token array identifies a turn, because two turns may have equal tokens.
        indices = {id(turn.tokens.ids_T): index for index, turn in enumerate(episode.turns)}
        queries = [query for query in self._queries.pop(episode.key, ()) if id(query.ids_T) in indices]
        graded = [await query.scoring for query in queries]
        combined = Graded(reward=0.0)
        for query, scored in zip(queries, graded, strict=True):
            combined = Graded(reward=0.0, calls=scored.calls, metrics=scored.metrics).beside(combined)
            index = indices[id(query.ids_T)]
            if scored.extra:
                turn = episode.turns[index]
                episode.turns[index] = msgspec.structs.replace(turn, extra={**turn.extra, **scored.extra})
        failed = next((scored for scored in graded if scored.reward is None), None)
        if failed is not None:
            return msgspec.structs.replace(
                combined, reward=None, failure=failed.failure or REWARD_NONE, parts=failed.parts
            )
        if self._parts.segments is not None:
            starts = [(indices[id(query.ids_T)], query.start) for query in queries]
            _cut_into_segments(
                episode.turns, [(*start, scored.reward or 0.0) for start, scored in zip(starts, graded, strict=True)]
            )
            return msgspec.structs.replace(combined, parts=self._scorer.parts_of_turns(graded))
        shares = self._scorer.over_turns(graded)
        for query, share in zip(queries, shares, strict=True):
            index = indices[id(query.ids_T)]
            turn = episode.turns[index]
            episode.turns[index] = msgspec.structs.replace(turn, reward=(turn.reward or 0.0) + share)
        return msgspec.structs.replace(combined, reward=sum(shares), parts=self._scorer.parts_of_turns(graded))

    async def _score(
        self, key: EpisodeKey, task: Task, history_T: IntColumn, ids_T: IntColumn, *, number: int
    ) -> Graded:
        """Return the score of one turn, or of one segment, with the tokens ``ids_T``, in the episode ``key``, which
        attempts ``task``. ``history_T`` are all tokens before it, and ``number`` is its index among the scored turns
        and segments of the episode."""
        parts = self._parts
        context = ScoringContext(completion_ids=(ids_T,), trainer=self._trainer(key))
        # Decoding a long history takes milliseconds, for which the event loop must not be blocked.
        history, text = await off_loop(lambda: (parts.decode(history_T.tolist()), parts.decode_answer(ids_T)))
        with self._show_request():
            return await self._scorer.score_turn(task, text, history, number, context=context)


def _cut_into_segments(turns: list[Turn], graded: Sequence[tuple[int, int, float]]) -> None:
    """Replace some of ``turns``, the turns of an episode, by their segments, in place, and set the process reward of
    each segment. ``graded`` contains, for each segment, the index of its turn, the index of its first token in the
    turn, and its reward."""
    # From the last turn to the first, because a cut changes the indices of all later turns.
    for index in sorted({index for index, _, _ in graded}, reverse=True):
        segments = [(start, reward) for turn, start, reward in graded if turn == index]
        split(turns, index, [start for start, _ in segments[1:]])
        for number, (_, reward) in enumerate(segments, start=index):
            turns[number] = msgspec.structs.replace(turns[number], process=reward)


def assign_reward(episode: EpisodeGraph, graded: Graded) -> None:
    """Set the reward of ``episode``, the components of the reward, and its status from ``graded``: SCORED, or FAILED
    with the cause if there is no reward. Columns that reward functions logged are stored in its last sampled turn."""
    sampled = [index for index, turn in enumerate(episode.turns) if turn.stop_reason is not None]
    if graded.extra and sampled:
        turn = episode.turns[sampled[-1]]
        episode.turns[sampled[-1]] = msgspec.structs.replace(turn, extra={**turn.extra, **graded.extra})
    episode.reward, episode.parts = graded.reward, dict(graded.parts)
    episode.cause = graded.failure or (REWARD_NONE if graded.reward is None else "")
    episode.status = EpisodeStatus.FAILED if episode.cause else EpisodeStatus.SCORED
