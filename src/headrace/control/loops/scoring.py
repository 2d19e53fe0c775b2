"""Scores finished episodes and closes their groups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.control.board import LoopContract
from headrace.control.evaluation import completion_text
from headrace.control.groups import OpenGroup, close_group
from headrace.control.loops.rollout import FinishedEpisodes
from headrace.control.state import RunState
from headrace.errors import EnvError
from headrace.types.episode import Episode, EpisodeStatus


class ScoringLoop:
    """Finished episodes in, scored groups out."""

    contract = LoopContract(
        name="scoring",
        consumes="finished episodes",
        produces="scored groups",
        waits_for="episodes; the scorers",
        unblocked_by="rollout, scoring workers",
    )

    def __init__(self, state: RunState, finished: FinishedEpisodes) -> None:
        self._state = state
        self._finished = finished
        self._failed_in_a_row = 0
        self._last_cause = ""

    async def run(self) -> None:
        """Until cancelled: the learner says when the run is over."""
        state = self._state
        async with asyncio.TaskGroup() as scorings:
            while True:
                with state.board.waiting("scoring", "a finished episode", on="rollout"):
                    group, episode = await self._finished.get()
                state.board.working("scoring", f"group {group.number}")
                self._take(group, episode, scorings)

    def _take(self, group: OpenGroup, episode: Episode, scorings: asyncio.TaskGroup) -> None:
        by_group = self._state.parts.scorer.by_group
        if episode.status.ended:
            self._ended(group, [episode])
        elif not by_group:
            scorings.create_task(self._score(group, [episode]))
        else:
            group.episodes[episode.key.place] = episode
        if by_group and group.complete:
            unscored = [e for e in group.in_order if not e.status.ended]
            if unscored:
                scorings.create_task(self._score(group, unscored))

    async def _score(self, group: OpenGroup, episodes: Sequence[Episode]) -> None:
        state = self._state
        texts = tuple(completion_text(state.parts, episode) for episode in episodes)
        start_s = state.parts.clock.now()
        with state.board.asking("scoring", "a reward", of="scoring workers"):
            scores = await state.parts.scorer.score(group.task, texts)
        state.span("scoring", "score", start_s)
        rewards = scores.rewards or (None,) * len(episodes)
        for episode, reward in zip(episodes, rewards, strict=True):
            episode.reward = reward
            episode.cause = scores.failure or ("reward_none" if reward is None else "")
            episode.status = EpisodeStatus.FAILED if episode.cause else EpisodeStatus.SCORED
        state.tally.last_sample, state.tally.last_sample_reward = texts[-1], episodes[-1].reward
        self._ended(group, episodes)

    def _ended(self, group: OpenGroup, episodes: Sequence[Episode]) -> None:
        state = self._state
        for episode in episodes:
            group.episodes[episode.key.place] = episode
            state.flow.end_episode(episode)
            if episode.status is EpisodeStatus.FAILED:
                self._last_cause = episode.cause
                sort = ": ".join(episode.cause.split(": ")[:2])  # the reason, and the kind of error
                state.warn(f"episodes fail: {episode.cause}", kind=f"episodes fail: {sort}")
        if group.complete and all(episode.status.ended for episode in group.episodes.values()):
            self._close(group)

    def _close(self, group: OpenGroup) -> None:
        state = self._state
        closed = close_group(
            group.number,
            group.in_order,
            min_episodes=state.flow_config.min_episodes,
        )
        if not isinstance(closed, str):
            self._failed_in_a_row = 0
            state.flow.scored(closed)
            return
        state.flow.drop(group.number, closed)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= state.flow_config.max_failed_groups:
            raise EnvError(
                f"{self._failed_in_a_row} groups in a row were dropped because their episodes failed; the last: "
                f"{self._last_cause}",
                remedy="mend the reward function (or raise flow.max_failed_groups), then --resume",
            )
