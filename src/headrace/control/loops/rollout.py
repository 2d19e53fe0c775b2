"""The rollout loop of the controller. It starts groups when the flow admits them, and runs their episodes.

A *part* of a turn is a chunk of its tokens, as an engine sends it; a *lane* is one row of the event trace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np

from headrace.base.errors import DataError
from headrace.base.types.episode import AttemptKind, EpisodeGraph, EpisodeKey, EpisodeStatus, TokenChunk, Turn
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.control.board import LoopContract
from headrace.control.groups import OpenGroup
from headrace.control.observer import BusyLane
from headrace.control.state import RunState
from headrace.flow import Admission
from headrace.flow.filters import REDUNDANT
from headrace.rollout import Withdrawal
from headrace.rollout.siblings import OnEnded, SiblingRunner

FinishedEpisodes = asyncio.Queue[tuple[OpenGroup, Sequence[EpisodeGraph]]]
"""The queue of episodes that have ended. An item is a group and the episodes of this group that ended together."""
RunEpisodeAlone = Callable[[EpisodeKey, Task, Withdrawal, Sequence[TokenChunk]], Awaitable[EpisodeGraph]]
"""A function that runs one episode, which continues from recorded tokens."""
RunGroup = Callable[[int, int, Task, OnEnded], Awaitable[None]]
"""A function that runs all episodes of a group. Its arguments are the number and the size of the group, the task, and a
callback for ended episodes."""
OnTurn = Callable[[EpisodeKey, Task, IntColumn, Turn], None]
"""A function that is called with each sampled turn: the key of the episode, its task, the tokens of the turn's prompt,
and the turn."""


class RolloutLoop:
    """The controller's rollout loop. It consumes groups that the flow admits and produces finished episodes."""

    contract = LoopContract(
        name="rollout",
        consumes="slots of the flow, tasks",
        produces="finished episodes",
        waits_for="a free slot; the engine's tokens",
        unblocked_by="sync (a commit frees slots), engine",
    )

    def __init__(
        self, state: RunState, finished: FinishedEpisodes, on_turn: OnTurn, on_part: Callable[[TokenChunk], None]
    ) -> None:
        """Create the loop. ``state`` is the state of the run. Episodes that have ended are put into the queue
        ``finished``. ``on_turn`` is called with each sampled turn. ``on_part`` is called with the tokens of every turn
        when they arrive, and with recorded tokens from an earlier life of the run."""
        self._state = state
        self._finished = finished
        self._on_part = on_part
        self._unfit_in_a_row = 0
        """Number of groups in a row whose prompts did not fit into the context."""
        self._running_tasks: dict[EpisodeKey, Task] = {}
        """The task of each running episode."""
        resting = 0 if state.curriculum is None else state.curriculum.num_rest
        self._max_unfit = 2 * len(state.parts.tasks) + resting
        """Number of such groups in a row after which the run ends. This many picks include every row that the
        curriculum may pick."""
        self._env_lane: BusyLane | None = None
        """The lane that is busy while an episode runs in its environment; ``None`` if episodes only call the engine."""
        if not state.parts.env.begins_with_prompt:
            self._env_lane = BusyLane("environment", "run", state.observers, state.parts.clock)
        runner = replace(
            state.parts.make_runner(state.run.seed, lambda _: state.board.record_progress()),
            on_part=self._tokens_arrived,
            on_turn=lambda key, prompt_ids_T, turn: on_turn(key, self._running_tasks[key], prompt_ids_T, turn),
            note=state.warn,
            sampling_turn=self._env_lane.paused if self._env_lane is not None else nullcontext,
            attempt_kind=AttemptKind.ALONE if state.flow_config.pivots is None else AttemptKind.ORIGIN,
        )
        siblings = SiblingRunner.from_runner(runner)
        self._run_episode: RunEpisodeAlone = runner.run
        """The function that runs one episode, here or in a rollout shard."""
        self._run_group = None if siblings is None else siblings.run
        """The function that runs all episodes of a group together; ``None`` if every episode runs alone."""
        shards = state.parts.shards
        if shards is not None:
            shards.connect(state.flow.running_turns.record, state.warn)
            self._run_episode, self._run_group = shards.run_episode, shards.run_group
        # single episodes of a group that runs as a whole could not be cancelled
        if state.flow_config.first is not None:
            self._run_group = None

    async def run(self) -> None:
        """Start groups until the last step has its batch; in a replay, until cancelled. Raises
        :class:`~headrace.base.errors.DataError` if no row of the dataset fits into the context."""
        state = self._state
        if not any(self._length(task) <= state.parts.max_context for task in state.parts.tasks):
            raise self._context_error("no row fits")
        async with asyncio.TaskGroup() as episodes:
            while state.flow.may_admit:
                self._start_admitted(episodes)
                num_held, since_s = state.flow.state.num_held, state.parts.clock.now()
                held_back = state.flow.state.free_capacity <= 0 and not state.parts.engine.stats().waiting
                planned_s = state.flow.planned_s
                what = f"a free slot ({num_held} groups hold one)"
                if planned_s is not None:
                    what = f"the planned start of the next group, in {planned_s - since_s:.1f} s or with new weights"
                with state.board.waiting("rollout", what, on="learner, sync" if planned_s is None else "time, sync"):
                    await self._wait_for_change(planned_s)
                if held_back:
                    state.metrics.held_back(state.parts.clock.now() - since_s)

    async def _wait_for_change(self, planned_s: float | None) -> None:
        """Wait until the flow has changed, or until the time ``planned_s`` on the clock, at which the pacing may allow
        a group to start; ``None``: no such time."""
        state = self._state
        delay_s = None if planned_s is None else planned_s - state.parts.clock.now()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await state.flow.changed.wait()

    def _tokens_arrived(self, part: TokenChunk) -> None:
        """Pass tokens of a running turn that have arrived to the flow, which records them in the ledger, and to the
        scoring loop."""
        self._state.flow.running_turns.add(part)
        self._on_part(part)

    def _context_error(self, beginning: str) -> DataError:
        """Return the error that ends the run because no row's prompt and answer fit into the context. ``beginning`` is
        the beginning of the message."""
        return DataError(
            f"{beginning} the context of {self._state.parts.max_context} tokens with an answer of "
            f"{self._state.parts.sampling.max_new_tokens}",
            remedy="raise the context, lower engine.max_new_tokens, or give rows with shorter prompts",
        )

    def _start_admitted(self, episodes: asyncio.TaskGroup) -> None:
        """Start all groups that the flow admits now."""
        # dropping a group that cannot start frees its slot, so the flow may admit another group
        while admissions := self._state.flow.admit():
            for admission in admissions:
                self._start(admission, episodes)

    def _start(self, admission: Admission, episodes: asyncio.TaskGroup) -> None:
        """Start the episodes of the group that ``admission`` admits as tasks in ``episodes``, or drop the group if its
        row cannot be used. Episodes that had ended before the run was resumed are put into the queue without running
        again."""
        state = self._state
        if admission.row >= len(state.parts.tasks):
            state.warn(f"row {admission.row + 1} is not in the dataset any more: dropped")
            self._drop(admission, "row_gone")
            return
        task = state.parts.tasks[admission.row]
        length = self._length(task)
        if length > state.parts.max_context:
            state.warn(
                f"row {admission.row + 1}: {len(task.prompt_ids_T)} prompt tokens, {length} with the answer, do not "
                f"fit the context of {state.parts.max_context}: dropped"
            )
            self._drop(admission, "prompt_too_long")
            self._unfit_in_a_row += 1
            if self._unfit_in_a_row > self._max_unfit:
                raise self._context_error("no row that the curriculum still picks fits")
            return
        self._unfit_in_a_row = 0
        if state.parts.env.begins_with_prompt and _has_other_prompt(admission.ended, task):
            state.warn(
                f"row {admission.row + 1} has another prompt than before the restart: its group, half done, is dropped"
            )
            self._drop(admission, "row_changed")
            return
        config = state.flow_config
        group = OpenGroup(number=admission.number, task=task, size=config.group_size, first=config.first)
        group.num_finished = sum(episode.reward is not None for episode in admission.ended)
        state.flow.start(group.number)
        state.metrics.group_started(group.number, task.row)
        ended_places = {episode.key.place for episode in admission.ended}
        for episode in admission.ended:
            episodes.create_task(self._finished.put((group, [episode])))
        if self._run_group is not None and not ended_places and not admission.partial_turns:
            episodes.create_task(self._run_together(group, self._run_group))
            return
        for place in range(group.size):
            if place not in ended_places:
                partial_turns = [part for part in admission.partial_turns if part.key.place == place]
                episodes.create_task(self._run_alone(group, place, partial_turns))

    def _drop(self, admission: Admission, reason: str) -> None:
        """Drop an admitted group that cannot start, and report to the curriculum that the group has no rewards."""
        self._state.observe(admission.number, admission.row, ())
        self._state.flow.drop(admission.number, reason)

    def _length(self, task: Task) -> int:
        """Return the number of tokens of the task's prompt plus the longest answer; 0 if the environment creates its
        own prompts."""
        if not self._state.parts.env.begins_with_prompt:
            return 0
        return len(task.prompt_ids_T) + self._state.parts.sampling.max_new_tokens

    async def _run_alone(self, group: OpenGroup, place: int, partial_turns: Sequence[TokenChunk]) -> None:
        """Run the episode at index ``place`` of ``group``, and put it into the queue. ``partial_turns`` are the
        recorded tokens of its turns from before the run was interrupted, from which the episode continues."""
        start_s = self._state.parts.clock.now()
        key = EpisodeKey(group.number, place)
        if group.has_enough:
            await self._finished.put((group, [EpisodeGraph(key=key, status=EpisodeStatus.LEFT_OUT, cause=REDUNDANT)]))
            return
        withdrawal = group.running[place] = Withdrawal()
        self._running_tasks[key] = group.task
        for part in partial_turns:
            self._on_part(part)
        env_lane = nullcontext() if self._env_lane is None else self._env_lane
        with self._state.board.requesting("rollout", "an episode", provider="engine or environment"), env_lane:
            episode = await self._run_episode(key, group.task, withdrawal, partial_turns)
        del group.running[place], self._running_tasks[key]
        self._state.metrics.episode_ended(episode, start_s, self._state.parts.clock.now())
        if episode.status is EpisodeStatus.FINISHED:
            group.record_finished(episode)
        await self._finished.put((group, [episode]))

    async def _run_together(self, group: OpenGroup, run_group: RunGroup) -> None:
        """Run all episodes of ``group`` with one call of ``run_group``, and put episodes that end together into the
        queue together."""
        state = self._state
        start_s = state.parts.clock.now()
        keys = [EpisodeKey(group.number, place) for place in range(group.size)]
        self._running_tasks.update(dict.fromkeys(keys, group.task))

        async def pass_on(ended: Sequence[EpisodeGraph]) -> None:
            """Record episodes that have ended together, and put them into the queue."""
            end_s = state.parts.clock.now()
            for episode in ended:
                state.metrics.episode_ended(episode, start_s, end_s)
                if episode.status is EpisodeStatus.FINISHED:
                    group.record_finished(episode)
            await self._finished.put((group, ended))

        with state.board.requesting("rollout", f"the {group.size} answers of a group", provider="engine"):
            await run_group(group.number, group.size, group.task, pass_on)
        for key in keys:
            del self._running_tasks[key]


def _has_other_prompt(ended: Sequence[EpisodeGraph], task: Task) -> bool:
    """Return whether an episode in ``ended``, the episodes that ended before a restart, began with another prompt than
    ``task`` has now."""
    first_turns = [episode.turns[0] for episode in ended if episode.turns]
    prompts = [turn.tokens.ids_T for turn in first_turns if turn.author == "task"]
    return any(not np.array_equal(ids_T, task.prompt_ids_T) for ids_T in prompts)
