"""Scores finished episodes and closes their groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from headrace.base.errors import EnvError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn, TurnPart
from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control.board import LoopContract
from headrace.control.drought import ZeroSignalCounter
from headrace.control.evaluation import completion_ids, completion_text
from headrace.control.groups import Closed, OpenGroup, close_group
from headrace.control.loops.rollout import FinishedEpisodes
from headrace.control.measuring import own_length, sampled_length
from headrace.control.pivots import PivotResampler
from headrace.control.state import RunState, trainer_state
from headrace.control.teaching import Teaching
from headrace.control.together import Together
from headrace.control.turns import REWARD_NONE, TurnScores, settle
from headrace.flow.filters import FilterContext, rewards_of
from headrace.flow.ledger import Ledger
from headrace.rollout.runner import remedy_of
from headrace.rollout.scoring import Graded, ScoringContext


class ScoringLoop:
    """Finished episodes in, scored groups out."""

    contract = LoopContract(
        name="scoring",
        consumes="finished episodes",
        produces="scored groups",
        waits_for="episodes; the scorers, teachers",
        unblocked_by="rollout, scoring workers, teachers",
    )

    def __init__(self, state: RunState, finished: FinishedEpisodes) -> None:
        self._state = state
        self._finished = finished
        self._failed_in_a_row = 0
        self._last_cause = ""
        self._turns: TurnScores | None = None
        self._teaching: Teaching | None = None
        self._at_it = Together("scoring", "score", state.observers, state.parts.clock)
        self._taught = Together("teachers", "teach", state.observers, state.parts.clock)
        config = state.flow_config
        self._pivots: PivotResampler | None = None
        if config.pivots is not None:
            self._pivots = PivotResampler(state, config.pivots, judge=self._judge, on_turn=self.turn_ended)
        self._drought = ZeroSignalCounter(most=config.max_idle_batches * config.groups_per_step)
        state.tally.rewarding.most = config.groups_per_step * config.group_size
        self._context = FilterContext(decode=state.parts.decode, seed=state.run.seed)

    async def run(self) -> None:
        """Until cancelled: the learner says when the run is over."""
        state = self._state
        async with asyncio.TaskGroup() as scorings:
            if state.parts.teachers is not None:
                self._teaching = Teaching(state.parts.teachers, scorings, self._asking_a_teacher)
            if state.parts.turn_scorer is not None:
                self._turns = TurnScores(
                    state.parts, state.parts.turn_scorer, scorings, self._asking_for_turn, trainer=self._trainer
                )
            while True:
                with state.board.waiting("scoring", "a finished episode", on="rollout"):
                    group, episode = await self._finished.get()
                state.board.working("scoring", f"group {group.number}")
                self._take(group, episode, scorings)

    @contextmanager
    def _asking_for_turn(self) -> Iterator[None]:
        """While a turn is scored."""
        state = self._state
        start_s = state.parts.clock.now()
        with state.board.asking("scoring", "a process reward", of="scoring workers"):
            yield
        state.span("scoring turns", "turn", start_s)

    @contextmanager
    def _asking_a_teacher(self) -> Iterator[None]:
        """While a teacher is asked about an answer."""
        with self._state.board.asking("scoring", "what a teacher says", of="teachers"), self._taught:
            yield

    def recall(self, ledger: Ledger, step: int) -> None:
        """The run goes on from a checkpoint at ``step``."""
        if self._pivots is not None:
            self._pivots.recall(ledger, step)

    def turn_grew(self, part: TurnPart) -> None:
        """Tokens of a turn have arrived."""
        if self._pivots is not None:
            self._pivots.trails.add(part)

    def turn_ended(self, key: EpisodeKey, task: Task, prompt_ids_T: IntColumn, turn: Turn) -> None:
        """A turn has been sampled; its episode may go on."""
        if self._turns is not None:
            self._turns.turn_ended(key, task, prompt_ids_T, turn)

    def _take(self, group: OpenGroup, episode: EpisodeGraph, scorings: asyncio.TaskGroup) -> None:
        by_group = self._state.parts.scorer.by_group
        earned = episode.status is EpisodeStatus.FINISHED and episode.reward is not None
        if self._teaching is not None and not episode.status.ended:
            self._teaching.ask(group.task, episode)
        if episode.status.ended:
            if self._turns is not None:
                self._turns.forget(episode.key)
            self._ended(group, [episode])
        elif earned:  # its environment has said how much
            scorings.create_task(self._conclude(group, episode, Graded(reward=episode.reward)))
        elif not by_group:
            scorings.create_task(self._score(group, [episode]))
        else:
            group.episodes[episode.key.place] = episode
        if by_group and group.complete:
            unscored = [e for e in group.in_order if not e.status.ended]
            if unscored:
                scorings.create_task(self._score(group, unscored))

    async def _score(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        await self._rate(group, episodes)
        await self._grow(group, episodes)
        self._ended(group, episodes)

    async def _grow(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        """Add branches to those that have failed."""
        if self._pivots is None:
            return
        async with asyncio.TaskGroup() as growing:
            for episode in episodes:
                growing.create_task(self._pivots.grow(group, episode))

    async def _judge(self, group: OpenGroup, attempts: Sequence[EpisodeGraph]) -> None:
        """Score attempts that are to be branches, if they have come to their end."""
        finished = [attempt for attempt in attempts if attempt.status is EpisodeStatus.FINISHED]
        for attempt in attempts:
            if self._turns is not None and attempt.status is not EpisodeStatus.FINISHED:
                self._turns.forget(attempt.key)
        if self._teaching is not None:
            for attempt in finished:
                self._teaching.ask(group.task, attempt)
        for attempt in finished:
            if attempt.reward is not None:
                await self._grade(attempt, Graded(reward=attempt.reward))
        if unscored := [attempt for attempt in finished if not attempt.status.ended]:
            await self._rate(group, unscored)

    async def _rate(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        state = self._state
        texts = tuple(completion_text(state.parts, episode) for episode in episodes)
        with state.board.asking("scoring", "a reward", of="scoring workers"), self._at_it:
            scores = await state.parts.scorer.score(group.task, texts, self._context_of(episodes))
        for place, episode in enumerate(episodes):
            await self._grade(episode, scores.of(place))
        state.tally.last_sample, state.tally.last_sample_reward = texts[-1], episodes[-1].reward

    def _context_of(self, episodes: Sequence[EpisodeGraph]) -> ScoringContext:
        """What a reward may ask for beside task and text. The step is the version under which the group was admitted,
        which is the same however often and whenever the group is scored."""
        ids = tuple(completion_ids(episode) for episode in episodes)
        return ScoringContext(completion_ids=ids, trainer=self._trainer(episodes[0].key))

    def _trainer(self, key: EpisodeKey) -> TrainerState:
        group = self._state.flow.state.groups.get(key.group)
        version = None if group is None else group.oldest_version
        return trainer_state(self._state, version or 0)

    async def _conclude(self, group: OpenGroup, episode: EpisodeGraph, graded: Graded) -> None:
        await self._grade(episode, graded)
        await self._grow(group, [episode])
        self._ended(group, [episode])

    async def _grade(self, episode: EpisodeGraph, graded: Graded) -> None:
        """Put together what the whole episode earned, what its turns did, and what a teacher says of them."""
        failure = "" if self._teaching is None else await self._teaching.add(episode)
        if self._turns is not None:
            graded = await self._turns.add(episode, graded)
        self._state.tally.rewarding.add(graded, lambda words, kind: self._state.warn(words, kind=kind))
        settle(episode, replace(graded, reward=None, failure=failure) if failure else graded)

    def _ended(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        state = self._state
        for episode in episodes:
            group.episodes[episode.key.place] = episode
            if self._pivots is not None:
                self._pivots.ended(episode)
            state.flow.end_episode(episode)
            state.tally.fresh_lengths.append(own_length(episode))
            if episode.status is EpisodeStatus.LEFT_OUT:
                state.tally.set_aside[episode.cause] += 1
            if episode.status.untrained:
                state.tally.wasted_tokens[episode.cause.partition(":")[0]] += sampled_length(episode)
            if episode.reward is not None:
                state.tally.fresh_rewards.append(episode.reward)
            if episode.status is EpisodeStatus.FAILED:
                self._last_cause = episode.cause
                sort = ": ".join(episode.cause.split(": ")[:2])  # the reason, and the kind of error
                state.warn(f"episodes fail: {episode.cause}", kind=f"episodes fail: {sort}")
        if group.complete and all(episode.status.ended for episode in group.episodes.values()):
            self._close(group)

    def _close(self, group: OpenGroup) -> None:
        state = self._state
        state.observe(group.number, group.task.row_index, rewards_of(group.in_order))
        closed = close_group(
            group.number,
            group.in_order,
            min_episodes=state.flow_config.min_episodes,
            filters=state.flow_config.filters,
            context=self._context,
        )
        if not closed.reason:
            self._failed_in_a_row = 0
            self._drought.kept()
            self._set_aside(closed)
            state.flow.scored(closed.group)
            return
        state.flow.drop(group.number, closed.reason)
        if self._pivots is not None:
            self._pivots.dropped(group.number)
        sampled = [sampled_length(episode) for episode in group.in_order if not episode.status.untrained]
        state.tally.wasted_tokens[closed.reason] += sum(sampled)
        if closed.dropped_by is None:
            self._stop_if_all_fail()
            return
        self._failed_in_a_row = 0
        self._drought.dropped(closed.reason, closed.dropped_by, rewards_of(closed.group.counted))
        if self._drought.length == max(2, self._drought.most // 2):
            state.warn(f"{self._drought.in_words()}; after {self._drought.most} in a row the run ends")

    def _set_aside(self, closed: Closed) -> None:
        """Tell the ledger which episodes of a group that is kept are not trained."""
        fates = dict.fromkeys((episode.status, episode.cause) for episode in closed.changed)
        for status, reason in fates:
            places = [e.key.place for e in closed.changed if (e.status, e.cause) == (status, reason)]
            self._state.flow.drop_episodes(closed.group.number, places, status=status, reason=reason)
            self._state.tally.set_aside[reason] += len(places)
        for episode in closed.changed:
            self._state.tally.wasted_tokens[episode.cause.partition(":")[0]] += sampled_length(episode)

    def _stop_if_all_fail(self) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row < self._state.flow_config.max_failed_groups:
            return
        if self._last_cause == REWARD_NONE:
            raise EnvError(
                f"none of the answers of {self._failed_in_a_row} groups in a row has a reward: the reward function "
                "returned None for the last, and None means that an answer does not count",
                remedy="look whether it returns what it has computed (headrace check env tries it on rows), or raise "
                "flow.max_failed_groups if so many do not count, then --resume",
            )
        raise EnvError(
            f"{self._failed_in_a_row} groups in a row were dropped because their episodes failed; the last: "
            f"{self._last_cause}",
            remedy=f"{remedy_of(self._last_cause)} (or raise flow.max_failed_groups), then --resume",
        )
