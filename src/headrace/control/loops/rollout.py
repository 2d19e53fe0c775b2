"""Starts groups as the flow admits them, and runs their episodes."""

from __future__ import annotations

import asyncio

from headrace.control.board import LoopContract
from headrace.control.groups import OpenGroup
from headrace.control.state import RunState
from headrace.flow import Admission
from headrace.rollout import EpisodeRunner
from headrace.types.episode import Episode, EpisodeKey

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
        async with asyncio.TaskGroup() as episodes:
            while not state.flow.finished:
                while admissions := state.flow.admit():  # what cannot start makes room at once
                    for admission in admissions:
                        self._start(admission, episodes)
                held = state.flow.state.num_held
                with state.board.waiting("rollout", f"a free slot ({held} groups hold one)", on="learner, sync"):
                    await state.flow.changed.wait()

    def _start(self, admission: Admission, episodes: asyncio.TaskGroup) -> None:
        state = self._state
        task = state.parts.tasks[admission.row]
        length = len(task.prompt_ids_T) + state.parts.sampling.max_new_tokens
        if length > state.parts.max_context:
            state.warn(
                f"row {admission.row + 1}: {len(task.prompt_ids_T)} prompt tokens, {length} with the answer, do not "
                f"fit the context of {state.parts.max_context}: dropped"
            )
            state.flow.drop(admission.number, "prompt_too_long")
            return
        group = OpenGroup(number=admission.number, task=task, size=state.flow_config.group_size)
        state.flow.start(group.number)
        ended = {episode.key.index for episode in admission.ended}
        for episode in admission.ended:
            episodes.create_task(self._finished.put((group, episode)))
        for index in range(group.size):
            if index not in ended:
                episodes.create_task(self._run(group, index))

    async def _run(self, group: OpenGroup, index: int) -> None:
        start_s = self._state.parts.clock.now()
        episode = await self._runner.run(EpisodeKey(group.number, index), group.task)
        self._state.span("rollout", "episode", start_s)
        await self._finished.put((group, episode))
