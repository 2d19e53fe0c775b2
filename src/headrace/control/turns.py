"""Process rewards: turns are scored while their episode goes on, and wait for nobody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from headrace.clock import off_loop
from headrace.control.state import RunState
from headrace.scoring import Graded, TurnScorer
from headrace.types.episode import Episode, EpisodeKey, Turn
from headrace.types.task import Task
from headrace.types.tokens import IntColumn, Tokens

LANE = "scoring turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    tokens: Tokens
    """By which the turn is known again."""
    scoring: asyncio.Task[Graded]


class TurnScores:
    """The process rewards of the episodes that run.

    A turn is scored as soon as it has been sampled; its episode is told nothing of it. When the episode has come to its
    end, :meth:`join` waits for those that are still on their way. How many are at once is bounded by the episodes that
    run; how many of them are computed, by the workers.
    """

    def __init__(self, state: RunState, scorer: TurnScorer, tasks: asyncio.TaskGroup) -> None:
        self._state = state
        self._scorer = scorer
        self._tasks = tasks
        self._asked: dict[EpisodeKey, list[_Asked]] = {}

    def turn_ended(self, key: EpisodeKey, task: Task, prompt_ids_T: IntColumn, turn: Turn) -> None:
        """A turn has been sampled after ``prompt_ids_T``."""
        asked = self._asked.setdefault(key, [])
        scoring = self._score(task, prompt_ids_T, turn, len(asked))
        asked.append(_Asked(tokens=turn.tokens, scoring=self._tasks.create_task(scoring)))

    def forget(self, key: EpisodeKey) -> None:
        """Nobody needs the scores of that episode any more."""
        for asked in self._asked.pop(key, ()):
            asked.scoring.cancel()

    async def join(self, episode: Episode) -> Graded:
        """Add to the turns of an episode what they earned, and say what became of its components.

        Turns that it does not hold any more, of an attempt that was made again for one, do not count.
        """
        held = {id(turn.tokens): place for place, turn in enumerate(episode.turns)}
        asked = {held[id(one.tokens)]: one for one in self._asked.pop(episode.key, ()) if id(one.tokens) in held}
        graded = [await one.scoring for one in asked.values()]
        failed = next((one for one in graded if one.reward is None), None)
        if failed is not None:
            return replace(failed, failure=failed.failure or "reward_none")
        shares = self._scorer.over_turns(graded)
        for place, share in zip(asked, shares, strict=True):
            turn = episode.turns[place]
            episode.turns[place] = replace(turn, reward=(turn.reward or 0.0) + share)
        return Graded(reward=sum(shares), parts=self._scorer.parts_of_turns(graded))

    async def _score(self, task: Task, prompt_ids_T: IntColumn, turn: Turn, number: int) -> Graded:
        parts = self._state.parts
        ids = turn.tokens.ids_T.tolist()
        if ids and ids[-1] in parts.sampling.stop_ids:
            ids = ids[:-1]
        history, text = await off_loop(lambda: (parts.decode(prompt_ids_T.tolist()), parts.decode(ids)))
        start_s = parts.clock.now()
        with self._state.board.asking("scoring", "a process reward", of="scoring workers"):
            graded = await self._scorer.score_turn(task, text, history, number)
        self._state.span(LANE, "turn", start_s)
        return graded
