"""Puts batches together and orders their steps ahead of time: the learner finds the next where the last one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import Credit, ScoredGroup, num_untrained, paths
from headrace.base.types.versions import oldest
from headrace.base.types.weights import Interrupt
from headrace.control.loops.syncing import SyncLoop
from headrace.control.saving import Saver, Saving
from headrace.control.seen import BatchStats, look_at
from headrace.control.state import RunState
from headrace.flow import TakenBatch
from headrace.flow.policies import STALE
from headrace.learner.base import Publication

UNTAUGHT = "untaught"
"""Why a token carries no loss that a teacher had nothing to say of, where others were taught."""
ORDERED_AHEAD = 2
"""Steps that the learner knows of: the one it is at, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """One step that the learner was told to make: train, snapshot and, where it is due, save, in this order."""

    step: int
    groups: list[ScoredGroup]
    seen: BatchStats
    """What their episodes come to."""
    batch: Batch
    """With the loss of every token that could have carried one."""
    ages: dict[int, int]
    """Tokens that carry loss, by age in versions."""
    masked: dict[str, int]
    """Tokens that lost their loss when the batch was put together, by reason."""
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
                taken = await self._next_batch()
                if taken is None:
                    break
                await self._orders.put(await self._order(taken, orders))
            await self._orders.put(None)

    async def _next_batch(self) -> TakenBatch | None:
        state = self._state
        while not (state.stop_asked or state.flow.finished):
            taken = state.flow.take()
            if taken is not None:
                return taken
            if state.flow.used_up:
                break
            await state.flow.changed.wait()
        return None

    async def _order(self, taken: TakenBatch, orders: asyncio.TaskGroup) -> Ordered:
        """Tasks begin in the order they are made, so the learner gets its orders in this one."""
        state = self._state
        step = taken.step
        with state.board.asking("learner", f"an entry in the ledger that step {step} is taken", of="the disk"):
            flushed_s = state.parts.clock.now()
            await state.flow.flush()  # what is trained must be known to have been taken
            state.span("ledger", "flush", flushed_s, step)
        credits = state.parts.advantages(taken.groups)
        collated = collate(step, taken.groups, credits, state.parts.agents.adapters)
        seen = look_at(taken.groups)  # now that they are in the processor's caches
        batch, untaught = without_untaught(collated)
        batch, stale = without_stale(batch, taken.oldest_version)
        ages, counts = np.unique(batch.ages(), return_counts=True)
        self._refuse_too_old(taken)
        await self._lull()
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
            groups=taken.groups,
            seen=seen,
            batch=collated,
            masked={**num_untrained(taken.groups), **untaught, **stale},
            ages={int(age): int(count) for age, count in zip(ages, counts, strict=True)},
            ordered_s=ordered_s,
            trained=trained,
            slot_s=slot_s,
            snapshot=snapshot,
            saving=self._saver.begin(step + 1, orders) if due else None,
        )

    async def _lull(self) -> None:
        """With ``sync.interrupt = "sleep"`` the engine gives its cache back while the learner has steps to make."""
        if self._state.parts.interrupt is Interrupt.SLEEP:
            with self._state.board.asking("sync", "the engine to fall asleep", of="engine"):
                await self._state.parts.engine.pause(release=True)

    def _refuse_too_old(self, taken: TakenBatch) -> None:
        """The policy keeps the bound; a group that breaks it was admitted under other settings."""
        flow = self._state.flow.state
        floor = -1 if taken.oldest_version is None else taken.oldest_version
        oldest_versions = [old for group in taken.groups if (old := group.oldest_version()) is not None]
        for version in {max(old, floor) for old in oldest_versions}:
            age, allowed = taken.step - version, flow.allowed_age(version)
            if age > allowed:
                raise RunError(
                    f"step {taken.step} would train a token of age {age}, and flow.max_age={allowed}",
                    remedy=f"set flow.max_age={age}, then --resume",
                )

    async def _train(self, batch: Batch) -> tuple[StepReport, float]:
        with self._state.board.asking("learner", f"step {batch.step}", of="the learner"):
            report = await self._state.parts.learner.train(batch)
        return report, self._state.parts.clock.now()

    async def _snapshot(self, version: int, slot: int) -> Publication:
        with self._state.board.asking("learner", f"a copy of version {version}", of="the learner"):
            return await self._state.parts.learner.snapshot(version, slot)


def collate(
    step: int, groups: Sequence[ScoredGroup], advantages: Sequence[Credit], agents: Sequence[str] = ()
) -> Batch:
    """The batch of a step. ``advantages``: one for each episode that counts in a baseline, in order. ``agents``: roles
    that train adapters of their own."""
    episodes = [episode for group in groups for episode in group.counted]
    credited = zip(episodes, advantages, strict=True)
    trained = EpisodeStatus.SCORED
    samples = [paths(episode, credit) for episode, credit in credited if episode.status is trained]
    return Batch.collate(step, [sample for of_episode in samples for sample in of_episode], agents)


def without_stale(batch: Batch, oldest_version: int | None) -> tuple[Batch, dict[str, int]]:
    """The batch with the loss taken from tokens of versions before ``oldest_version``, and how many these were."""
    if oldest_version is None:
        return batch, {}
    stale_N = batch.mask_N & (oldest(batch.versions_N) < oldest_version)
    count = int(stale_N.sum())
    if not count:
        return batch, {}
    return msgspec.structs.replace(batch, mask_N=batch.mask_N & ~stale_N), {STALE: count}


def without_untaught(batch: Batch) -> tuple[Batch, dict[str, int]]:
    """The batch with the loss taken from tokens that teachers said nothing of, and how many these were: those that were
    scored before there were any, in a run that was resumed. Where none was taught, it is as it was."""
    if batch.taught is None:
        return batch, {}
    mask_N = batch.mask_N & batch.taught.known_T
    count = int(batch.mask_N.sum()) - int(mask_N.sum())
    return (msgspec.structs.replace(batch, mask_N=mask_N), {UNTAUGHT: count}) if count else (batch, {})
