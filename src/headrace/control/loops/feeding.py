"""Puts batches together and orders their steps ahead of time: the learner finds the next where the last one ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from headrace.control.board import LEARNER_MAY_TAKE_S
from headrace.control.loops.syncing import SyncLoop
from headrace.control.saving import Saver, Saving
from headrace.control.state import RunState
from headrace.errors import RunError
from headrace.learner.base import Publication
from headrace.types.batch import Batch
from headrace.types.messages.controller import StepReport
from headrace.types.scored import ScoredGroup, paths

ORDERED_AHEAD = 2
"""Steps that the learner knows of: the one it is at, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """One step that the learner was told to make: train, snapshot and, where it is due, save, in this order."""

    step: int
    groups: list[ScoredGroup]
    ages: dict[int, int]
    """Tokens that carry loss, by age in versions."""
    ordered_s: float
    """When the batch was given, on the clock."""
    trained: asyncio.Task[tuple[StepReport, float]]
    """What the step did, and when it was done, on the clock."""
    slot_s: float
    """When there was a free weight buffer, on the clock."""
    snapshot: asyncio.Task[Publication]
    saving: Saving | None
    """The snapshot of the step; ``None`` where none is due."""


class Feeder:
    """Takes batches from the flow as soon as there are any, and orders their steps."""

    def __init__(self, state: RunState, sync: SyncLoop, saver: Saver) -> None:
        self._state = state
        self._sync = sync
        self._saver = saver
        self._room = asyncio.Semaphore(ORDERED_AHEAD)
        self._orders: asyncio.Queue[Ordered | None] = asyncio.Queue(maxsize=ORDERED_AHEAD + 1)
        self._awaited = False

    async def next(self) -> Ordered | None:
        """The next step that was ordered; ``None`` after the last."""
        self._awaited = True
        try:
            return await self._orders.get()
        finally:
            self._awaited = False

    def done(self) -> None:
        """A step is over: one more may be ordered."""
        self._room.release()

    async def run(self) -> None:
        """Until the last step, or until the run was asked to stop."""
        async with asyncio.TaskGroup() as orders:
            while True:
                await self._room.acquire()
                groups = await self._next_batch()
                if groups is None:
                    break
                await self._orders.put(await self._order(groups, orders))
            await self._orders.put(None)

    async def _next_batch(self) -> list[ScoredGroup] | None:
        state = self._state
        while not (state.stop_asked or state.flow.finished):
            groups = state.flow.take()
            if groups is not None:
                return groups
            await state.flow.changed.wait()
        return None

    async def _order(self, groups: list[ScoredGroup], orders: asyncio.TaskGroup) -> Ordered:
        """Tasks begin in the order they are made, so the learner gets its orders in this one."""
        state = self._state
        step = state.flow.state.next_step - 1
        with state.board.asking("learner", f"an entry in the ledger that step {step} is taken", of="the disk"):
            await state.flow.flush()  # what is trained must be known to have been taken
        batch = self._collate(step, groups)
        ages, counts = np.unique(batch.ages(), return_counts=True)
        oldest = int(ages.max(initial=0))
        if oldest > state.flow_config.max_age:
            raise RunError(
                f"step {step} would train a token of age {oldest}, and flow.max_age={state.flow_config.max_age}",
                remedy=f"set flow.max_age={oldest}, then --resume",
            )
        ordered_s = state.parts.clock.now()
        trained = orders.create_task(self._train(batch))
        if self._awaited:  # the learner is at it, while the step cannot be handed on yet
            state.board.working("learner", f"step {step}")
        with state.board.asking("learner", "a free weight buffer", of="sync"):
            slot = await self._sync.free_slot()
        slot_s = state.parts.clock.now()
        snapshot = orders.create_task(self._snapshot(step + 1, slot))
        due = (step + 1) % state.run.checkpoint_every == 0
        return Ordered(
            step=step,
            groups=groups,
            ages={int(age): int(count) for age, count in zip(ages, counts, strict=True)},
            ordered_s=ordered_s,
            trained=trained,
            slot_s=slot_s,
            snapshot=snapshot,
            saving=self._saver.begin(step + 1, orders) if due else None,
        )

    async def _train(self, batch: Batch) -> tuple[StepReport, float]:
        with self._state.board.asking("learner", f"step {batch.step}", of="the learner", may_take_s=LEARNER_MAY_TAKE_S):
            report = await self._state.parts.learner.train(batch)
        return report, self._state.parts.clock.now()

    async def _snapshot(self, version: int, slot: int) -> Publication:
        with self._state.board.asking(
            "learner", f"a copy of version {version}", of="the learner", may_take_s=LEARNER_MAY_TAKE_S
        ):
            return await self._state.parts.learner.snapshot(version, slot)

    def _collate(self, step: int, groups: list[ScoredGroup]) -> Batch:
        episodes = [episode for group in groups for episode in group.scored]
        credited = self._state.parts.advantages(groups)
        samples = [paths(episode, float(credit)) for episode, credit in zip(episodes, credited, strict=True)]
        return Batch.collate(step, [sample for of_episode in samples for sample in of_episode])
