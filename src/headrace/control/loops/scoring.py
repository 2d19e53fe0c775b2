"""The scoring loop of the controller. It scores finished episodes and closes their groups.

A group is *closed* when all of its episodes have ended: the filters then decide whether it is trained or dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from headrace.base.errors import EnvError, NoRewards, StoreError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, TokenChunk, Turn
from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control.board import LoopContract
from headrace.control.evaluation import completion_ids
from headrace.control.groups import ClosedGroup, OpenGroup, ZeroSignalCounter, close_group
from headrace.control.loops.rollout import FinishedEpisodes
from headrace.control.observer import BusyLane
from headrace.control.pivots import PivotResampler
from headrace.control.state import RunState, make_trainer_state
from headrace.control.teaching import Teaching
from headrace.control.turns import REWARD_NONE, ProcessRewards, assign_reward
from headrace.flow.filters import FilterContext, get_rewards
from headrace.flow.ledger import Ledger
from headrace.flow.ready import UNSTORED, is_stored
from headrace.rollout.runner import find_remedy
from headrace.rollout.scoring import Graded, ScoringContext


class ScoringLoop:
    """The controller's scoring loop. It consumes finished episodes and produces scored groups."""

    contract = LoopContract(
        name="scoring",
        consumes="finished episodes",
        produces="scored groups",
        waits_for="episodes; the scorers, teachers",
        unblocked_by="rollout, scoring workers, teachers",
    )

    def __init__(self, state: RunState, finished: FinishedEpisodes) -> None:
        """Create the loop. ``state`` is the state of the run, and ``finished`` the queue in which episodes arrive with
        their group."""
        self._state = state
        self._finished = finished
        self._failed_in_a_row = 0
        """Number of groups in a row that were dropped because their episodes failed."""
        self._unstored_in_a_row = 0
        """Number of groups in a row that were dropped because their columns could not be stored."""
        self._last_cause = ""
        """The cause of the last episode that failed."""
        self._turns: ProcessRewards | None = None
        """The process rewards of running episodes; ``None`` if the run has none."""
        self._teaching: Teaching | None = None
        """The running calls of teachers; ``None`` if the run has no teachers."""
        self._scoring_lane = BusyLane("scoring", "score", state.observers, state.parts.clock)
        self._teacher_lane = BusyLane("teachers", "teach", state.observers, state.parts.clock)
        config = state.flow_config
        self._pivots: PivotResampler | None = None
        """The component that adds branches to failed episodes; ``None`` if the run samples no branches."""
        if config.pivots is not None:
            self._pivots = PivotResampler(
                state, config.pivots, score_attempts=self._score_branches, on_turn=self.turn_ended
            )
        self._zero_signal = ZeroSignalCounter(max_dropped=config.max_idle_batches * config.groups_per_step)
        self._filter_context = FilterContext(decode=state.parts.decode, seed=state.run.seed)

    async def run(self) -> None:
        """Score episodes until cancelled. The controller cancels this loop when the learner loop has ended."""
        state = self._state
        async with asyncio.TaskGroup() as scorings:
            if state.parts.teachers is not None:
                self._teaching = Teaching(state.parts.teachers, scorings, self._show_teacher_call)
            if state.parts.turn_scorer is not None:
                self._turns = ProcessRewards(
                    state.parts,
                    state.parts.turn_scorer,
                    scorings,
                    self._show_turn_scoring,
                    trainer=self._make_trainer_state,
                )
            while True:
                with state.board.waiting("scoring", "a finished episode", on="rollout"):
                    group, episodes = await self._finished.get()
                state.board.set_working("scoring", f"group {group.number}")
                self._handle_episodes(group, episodes, scorings)

    @contextmanager
    def _show_turn_scoring(self) -> Iterator[None]:
        """Report the scoring of a turn, which the body does, to the table of loops and the trace."""
        state = self._state
        start_s = state.parts.clock.now()
        with state.board.requesting("scoring", "a process reward", provider="scoring workers"):
            yield
        state.span("scoring turns", "turn", start_s)

    @contextmanager
    def _show_teacher_call(self) -> Iterator[None]:
        """Report the call of a teacher, which the body makes, to the table of loops and the trace."""
        with self._state.board.requesting("scoring", "what a teacher says", provider="teachers"), self._teacher_lane:
            yield

    def restore_pivots(self, ledger: Ledger, step: int) -> None:
        """Restore the outcomes of pivots from ``ledger``, up to the checkpoint of ``step``. Later pivots are chosen by
        them. Do nothing if the run samples no branches."""
        if self._pivots is not None:
            self._pivots.restore(ledger, step)

    def tokens_arrived(self, part: TokenChunk) -> None:
        """Receive tokens of a running turn. They are stored until the episode ends, because branches may be sampled
        from it."""
        if self._pivots is not None:
            self._pivots.sampled_turns.add(part)

    def turn_ended(self, key: EpisodeKey, task: Task, prompt_ids_T: IntColumn, turn: Turn) -> None:
        """Start to score ``turn``, a turn of the episode ``key``, which attempts ``task``, if the run has process
        rewards. The prompt of the turn is ``prompt_ids_T``; its episode may continue."""
        if self._turns is not None:
            self._turns.turn_ended(key, task, prompt_ids_T, turn)

    def _handle_episodes(self, group: OpenGroup, episodes: Sequence[EpisodeGraph], scorings: asyncio.TaskGroup) -> None:
        """Start to score episodes of one group that have ended together, as tasks in ``scorings``. If the scorer needs
        whole groups, the episodes are stored until their group is complete. An episode that has failed or was cancelled
        is recorded without a score."""
        by_group = self._state.parts.scorer.by_group
        unscored = []
        for episode in episodes:
            if self._teaching is not None and not episode.status.ended:
                self._teaching.start(group.task, episode)
            if episode.status.ended:
                if self._turns is not None:
                    self._turns.forget(episode.key)
                self._finish_episodes(group, [episode])
            elif episode.reward is not None:  # the environment has returned the reward
                scorings.create_task(self._finish_with_reward(group, episode, Graded(reward=episode.reward)))
            elif by_group:
                group.episodes[episode.key.place] = episode
            else:
                unscored.append(episode)
        if by_group and group.complete:
            unscored = [episode for episode in group.in_order if not episode.status.ended]
        if unscored:
            scorings.create_task(self._score(group, unscored))

    async def _score(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        """Score episodes of one group, add branches to the episodes that have failed, and record the episodes."""
        await self._score_answers(group, episodes)
        await self._add_branches(group, episodes)
        self._finish_episodes(group, episodes)

    async def _add_branches(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        """Sample branches from the episodes among ``episodes`` whose reward says that they have failed. Do nothing if
        the run samples no branches."""
        if self._pivots is None:
            return
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                tasks.create_task(self._pivots.add_branches(group, episode))

    async def _score_branches(self, group: OpenGroup, attempts: Sequence[EpisodeGraph]) -> None:
        """Score the finished episodes among ``attempts``, the attempts at one pivot."""
        finished = [attempt for attempt in attempts if attempt.status is EpisodeStatus.FINISHED]
        for attempt in attempts:
            if self._turns is not None and attempt.status is not EpisodeStatus.FINISHED:
                self._turns.forget(attempt.key)
        if self._teaching is not None:
            for attempt in finished:
                self._teaching.start(group.task, attempt)
        for attempt in finished:
            if attempt.reward is not None:
                await self._grade(attempt, Graded(reward=attempt.reward))
        if unscored := [attempt for attempt in finished if not attempt.status.ended]:
            await self._score_answers(group, unscored)

    async def _score_answers(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        """Score episodes of one group together, and set the reward of each episode."""
        state = self._state
        ids = tuple(map(completion_ids, episodes))
        texts = tuple(map(state.parts.decode_answer, ids))
        context = ScoringContext(completion_ids=ids, trainer=self._make_trainer_state(episodes[0].key))
        with state.board.requesting("scoring", "a reward", provider="scoring workers"), self._scoring_lane:
            scores = await state.parts.scorer.score(group.task, texts, context)
        for index, episode in enumerate(episodes):
            await self._grade(episode, scores.get_graded(index))
        state.metrics.answer_scored(texts[-1], episodes[-1].reward)

    def _make_trainer_state(self, key: EpisodeKey) -> TrainerState:
        """Return the trainer state for reward functions of the episode ``key``. Its step is the version under which the
        episode's group was admitted, so it does not depend on when the group is scored."""
        group = self._state.flow.state.groups.get(key.group)
        version = None if group is None else group.oldest_version
        return make_trainer_state(self._state, version or 0)

    async def _finish_with_reward(self, group: OpenGroup, episode: EpisodeGraph, graded: Graded) -> None:
        """Set the reward of an episode to ``graded``, which its environment has returned; add branches if the episode
        has failed; and record the episode."""
        await self._grade(episode, graded)
        await self._add_branches(group, [episode])
        self._finish_episodes(group, [episode])

    async def _grade(self, episode: EpisodeGraph, graded: Graded) -> None:
        """Set the final reward of an episode: the reward in ``graded``, combined with the process rewards of its turns.
        Before that, wait for the scores of its teacher; if the teacher failed, the episode fails."""
        failure = "" if self._teaching is None else await self._teaching.finish(episode)
        if self._turns is not None:
            graded = await self._turns.add(episode, graded)
        self._state.metrics.answer_graded(graded, lambda words, kind: self._state.warn(words, kind=kind))
        assign_reward(episode, msgspec.structs.replace(graded, reward=None, failure=failure) if failure else graded)

    def _finish_episodes(self, group: OpenGroup, episodes: Sequence[EpisodeGraph]) -> None:
        """Record ended episodes of one group, scored or not, and close the group if all of its episodes have ended."""
        state = self._state
        for episode in episodes:
            group.episodes[episode.key.place] = episode
            if self._pivots is not None:
                self._pivots.record_outcomes(episode)
            state.flow.end_episode(episode)
            state.metrics.episode_scored(episode)
            if episode.status is EpisodeStatus.FAILED:
                self._last_cause = episode.cause
                # the cause starts with the reason and the kind of error
                reason_and_error = ": ".join(episode.cause.split(": ")[:2])
                state.warn(f"episodes fail: {episode.cause}", kind=f"episodes fail: {reason_and_error}")
        if group.complete and all(episode.status.ended for episode in group.episodes.values()):
            self._close_group(group)

    def _close_group(self, group: OpenGroup) -> None:
        """Apply the filters to a complete group, then add it to the flow's buffer of ready groups, or drop it. Raises
        an error that ends the run after too many dropped groups in a row."""
        state = self._state
        state.observe(group.number, group.task.row_index, get_rewards(group.in_order))
        closed = close_group(
            group.number,
            group.in_order,
            min_episodes=state.flow_config.min_episodes,
            filters=state.flow_config.filters,
            context=self._filter_context,
        )
        if not closed.reason:
            self._zero_signal.record_kept()
            self._record_set_aside(closed)
            self._add_ready(closed)
            return
        state.flow.drop(group.number, closed.reason)
        if self._pivots is not None:
            self._pivots.forget_group(group.number)
        state.metrics.group_dropped(closed.reason, group.in_order)
        if closed.dropped_by is None:
            self._stop_if_all_fail()
            return
        self._failed_in_a_row = 0
        self._zero_signal.record_dropped(closed.reason, closed.dropped_by, get_rewards(closed.group.counted))
        if self._zero_signal.length == max(2, self._zero_signal.max_dropped // 2):
            state.warn(f"{self._zero_signal.describe()}; after {self._zero_signal.max_dropped} in a row the run ends")

    def _add_ready(self, closed: ClosedGroup) -> None:
        """Add a group that may be trained to the flow's buffer. If its columns cannot be written into the store, drop
        it, and end the run after too many such groups in a row."""
        state = self._state
        try:
            state.flow.add_scored(closed.group)
        except StoreError as error:
            state.warn(f"a group was dropped: {error.problem}; {error.remedy}", kind="groups that were not stored")
            state.flow.drop(closed.group.number, UNSTORED)
            if self._pivots is not None:
                self._pivots.forget_group(closed.group.number)
            state.metrics.group_dropped(UNSTORED, closed.group.episodes)
            self._unstored_in_a_row += 1
            if (count := self._unstored_in_a_row) == state.flow_config.max_failed_groups:
                problem = f"{count} groups in a row were dropped ({UNSTORED}); the last: {error.problem}"
                raise StoreError(problem, remedy=f"{error.remedy}, then --resume") from None
        else:
            self._failed_in_a_row = 0
            if is_stored(closed.group):  # groups that need no store do not show that there is room again
                self._unstored_in_a_row = 0

    def _record_set_aside(self, closed: ClosedGroup) -> None:
        """Record in the ledger and the metrics which episodes of a kept group the filters have excluded or masked."""
        new_statuses = dict.fromkeys((episode.status, episode.cause) for episode in closed.changed)
        for status, reason in new_statuses:
            places = [e.key.place for e in closed.changed if (e.status, e.cause) == (status, reason)]
            self._state.flow.drop_episodes(closed.group.number, places, status=status, reason=reason)
        for episode in closed.changed:
            self._state.metrics.episode_set_aside(episode)

    def _stop_if_all_fail(self) -> None:
        """Count a group that was dropped because its episodes failed. Raises :class:`~headrace.base.errors.EnvError`
        after ``flow.max_failed_groups`` such groups in a row."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row < self._state.flow_config.max_failed_groups:
            return
        if self._last_cause == REWARD_NONE:
            raise NoRewards(
                f"none of the answers of {self._failed_in_a_row} groups in a row has a reward: the reward function "
                "returned None for the last, and None means that an answer does not count",
                remedy="look whether it returns what it has computed (headrace check env tries it on rows), or raise "
                "flow.max_failed_groups if so many do not count, then --resume",
            )
        raise EnvError(
            f"{self._failed_in_a_row} groups in a row were dropped because their episodes failed; the last: "
            f"{self._last_cause}",
            remedy=f"{find_remedy(self._last_cause)} (or raise flow.max_failed_groups), then --resume",
        )
