"""Starts groups as the flow admits them, and runs their episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from headrace.control.board import LoopContract
from headrace.control.groups import OpenGroup
from headrace.control.state import RunState
from headrace.errors import DataError
from headrace.flow import Admission
from headrace.rollout import EpisodeRunner
from headrace.types.episode import Episode, EpisodeKey
from headrace.types.task import Task

FinishedEpisodes = asyncio.Queue[tuple[OpenGroup, Episode]]


class RolloutLoop:
    """Slots in, finished episodes out."""

    contract = LoopContract(
        name="rollout",
        consumes="slots of the flow, tasks",
        produces="finished episodes",
        waits_for="a free slot; the engine's tokens",
        unblocked_by="sync (a commit frees slots), engine",
    )

    def __init__(self, state: RunState, finished: FinishedEpisodes) -> None:
        self._state = state
        self._finished = finished
        self._runner = EpisodeRunner(
            engine=state.parts.engine,
            env=state.parts.env,
            sampling=state.parts.sampling,
            run_seed=state.run.seed,
            on_tokens=lambda _: state.board.progress(),
        )

    async def run(self) -> None:
        """Until the last step has taken its batch."""
        state = self._state
        if not any(self._length(task) <= state.parts.max_context for task in state.parts.tasks):
            raise DataError(
                f"no row fits the context of {state.parts.max_context} tokens with an answer of "
                f"{state.parts.sampling.max_new_tokens}",
                remedy="raise the context, lower engine.max_new_tokens, or give rows with shorter prompts",
            )
        async with asyncio.TaskGroup() as episodes:
            while not state.flow.finished:
                self._start_admitted(episodes)
                held = state.flow.state.num_held
                with state.board.waiting("rollout", f"a free slot ({held} groups hold one)", on="learner, sync"):
                    await state.flow.changed.wait()

    def _start_admitted(self, episodes: asyncio.TaskGroup) -> None:
        while admissions := self._state.flow.admit():  # what cannot start makes room at once
            for admission in admissions:
                self._start(admission, episodes)

    def _start(self, admission: Admission, episodes: asyncio.TaskGroup) -> None:
        state = self._state
        if admission.row >= len(state.parts.tasks):
            state.warn(f"row {admission.row + 1} is not in the dataset any more: dropped")
            state.flow.drop(admission.number, "row_gone")
            return
        task = state.parts.tasks[admission.row]
        length = self._length(task)
        if length > state.parts.max_context:
            state.warn(
                f"row {admission.row + 1}: {len(task.prompt_ids_T)} prompt tokens, {length} with the answer, do not "
                f"fit the context of {state.parts.max_context}: dropped"
            )
            state.flow.drop(admission.number, "prompt_too_long")
            return
        if _other_prompt(admission.ended, task):
            state.warn(
                f"row {admission.row + 1} has another prompt than before the restart: its group, half done, is dropped"
            )
            state.flow.drop(admission.number, "row_changed")
            return
        group = OpenGroup(number=admission.number, task=task, size=state.flow_config.group_size)
        state.flow.start(group.number)
        ended = {episode.key.place for episode in admission.ended}
        for episode in admission.ended:
            episodes.create_task(self._finished.put((group, episode)))
        for place in range(group.size):
            if place not in ended:
                episodes.create_task(self._run(group, place))

    def _length(self, task: Task) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(task.prompt_ids_T) + self._state.parts.sampling.max_new_tokens

    async def _run(self, group: OpenGroup, place: int) -> None:
        start_s = self._state.parts.clock.now()
        with self._state.board.asking("rollout", "an episode", of="engine"):
            episode = await self._runner.run(EpisodeKey(group.number, place), group.task)
        self._state.span("rollout", "episode", start_s)
        await self._finished.put((group, episode))


def _other_prompt(ended: Sequence[Episode], task: Task) -> bool:
    """Whether one of the episodes began with another prompt than that of ``task``."""
    first = [episode.turns[0] for episode in ended if episode.turns]
    prompts = [turn.tokens.ids_T for turn in first if turn.author == "task"]
    return any(not np.array_equal(ids_T, task.prompt_ids_T) for ids_T in prompts)
