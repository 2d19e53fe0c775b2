"""The feeder of the learner: it takes batches from the flow and orders their steps ahead of time, so that the learner
need not wait between steps. To *order* a step is to queue its work in the learner: train, copy the weights and, if a
checkpoint is due, save."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace.base.errors import RunError
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline
from headrace.base.types.scored import ScoredGroup, num_untrained
from headrace.base.types.weights import Interrupt
from headrace.control.loops.syncing import SyncLoop
from headrace.control.metrics.batch import BatchStats, batch_stats
from headrace.control.saving import Saver, Saving
from headrace.control.state import RunState
from headrace.flow import TakenBatch
from headrace.flow.layout import outline_of
from headrace.learner.base import Publication

ORDERED_AHEAD = 2
"""Greatest number of steps that are ordered at a time: the one that the learner works on, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedStep:
    """One step that was ordered from the learner: to train, to take a snapshot and, if one is due, to save a
    checkpoint, in this order."""

    step: int
    """The number of the step."""
    groups: list[ScoredGroup]
    """The groups that it trains."""
    stats: BatchStats
    """Statistics of the episodes in these groups."""
    untrained: dict[str, int]
    """Number of sampled tokens in turns that carry no loss, by reason."""
    ordered_s: float
    """The time at which the batch was given to the learner, on the clock."""
    trained: asyncio.Task[tuple[StepReport, float]]
    """The task that returns the step's report and the time at which it came, on the clock."""
    slot_s: float
    """The time at which a weight buffer was free, on the clock."""
    snapshot: asyncio.Task[Publication]
    """The task that returns the snapshot of the new weights, to be published to the engines."""
    saving: Saving | None
    """The checkpoint that is written after the step; ``None``: none is due."""


class Feeder:
    """Takes batches from the flow as soon as they are ready, and orders their steps. The learning loop owns it and
    completes the steps."""

    def __init__(self, state: RunState, sync: SyncLoop, saver: Saver) -> None:
        """Take batches from the flow of ``state``. ``sync`` provides the weight buffers, and ``saver`` writes the
        checkpoints that are due."""
        self._state = state
        self._sync = sync
        self._saver = saver
        self._orders_allowed = asyncio.Semaphore(ORDERED_AHEAD)
        self._orders: asyncio.Queue[OrderedStep | None] = asyncio.Queue(maxsize=ORDERED_AHEAD + 1)
        self._awaited = False

    async def next(self) -> OrderedStep | None:
        """Wait for the next step that was ordered, and return it; ``None`` after the last."""
        self._awaited = True
        try:
            return await self._orders.get()
        finally:
            self._awaited = False

    def done(self) -> None:
        """Note that a step is complete, so that one more may be ordered."""
        self._orders_allowed.release()

    async def run(self) -> None:
        """Order steps until the last one, until no further batch can come, or until the run is to stop."""
        async with asyncio.TaskGroup() as orders:
            while True:
                await self._orders_allowed.acquire()
                taken = await self._next_batch()
                if taken is None:
                    break
                await self._orders.put(await self._order(taken, orders))
            await self._orders.put(None)

    async def _next_batch(self) -> TakenBatch | None:
        """Wait for a batch of the flow and return it; ``None`` if there will be no more."""
        state = self._state
        while not (state.stop_requested or state.flow.finished):
            taken = state.flow.take()
            if taken is not None:
                return taken
            if state.flow.used_up:
                break
            await state.flow.changed.wait()
        return None

    async def _order(self, taken: TakenBatch, orders: asyncio.TaskGroup) -> OrderedStep:
        """Order the step of the batch that was taken from the learner, and return the ordered step. ``orders`` is
        the group of its tasks; tasks begin in the order in which they are created, so the learner gets its orders in
        this order."""
        state = self._state
        step = taken.step
        with state.board.requesting(
            "learner", f"an entry in the ledger that step {step} is taken", provider="the disk"
        ):
            flushed_s = state.parts.clock.now()
            await state.flow.flush()  # the ledger must know a batch as taken before it is trained
            state.span("ledger", "flush", flushed_s, step)
        credits = state.parts.advantages(taken.groups)
        outline = outline_of(
            step,
            taken.groups,
            credits,
            agents=state.parts.agents.adapters,
            oldest_version=taken.oldest_version,
        )
        stats = batch_stats(taken.groups)  # read here because the episodes are in the processor's caches
        self._refuse_too_old(taken)
        await self._sleep_engine()
        ordered_s = state.parts.clock.now()
        state.flow.ordered(step)
        trained = orders.create_task(self._train(outline))
        if self._awaited:  # the learner trains already, and the step is returned only below
            state.board.working("learner", f"step {step}")
        with state.board.requesting("learner", "a free weight buffer", provider="sync"):
            slot = await self._sync.free_slot()
        slot_s = state.parts.clock.now()
        snapshot = orders.create_task(self._snapshot(step + 1, slot))
        due = (step + 1) % state.run.checkpoint_every == 0
        return OrderedStep(
            step=step,
            groups=taken.groups,
            stats=stats,
            untrained=num_untrained(taken.groups),
            ordered_s=ordered_s,
            trained=trained,
            slot_s=slot_s,
            snapshot=snapshot,
            saving=self._saver.begin(step + 1, orders) if due else None,
        )

    async def _sleep_engine(self) -> None:
        """Let the engine release its cache memory while the learner trains, with ``sync.interrupt = "sleep"``."""
        if self._state.parts.interrupt is Interrupt.SLEEP:
            with self._state.board.requesting("sync", "the engine to fall asleep", provider="engine"):
                await self._state.parts.engine.pause(release=True)

    def _refuse_too_old(self, taken: TakenBatch) -> None:
        """Raise :class:`~headrace.base.errors.RunError` if the batch would train a token older than the staleness
        bound. The policy keeps the bound, so such a group was admitted under other settings, before a restart."""
        flow = self._state.flow.state
        floor = -1 if taken.oldest_version is None else taken.oldest_version
        oldest_versions = {flow.groups[group.number].oldest_version for group in taken.groups}
        for version in {max(old, floor) for old in oldest_versions if old is not None}:
            age, allowed = taken.step - version, flow.allowed_age(version)
            if age > allowed:
                raise RunError(
                    f"step {taken.step} would train a token of age {age}, and flow.max_age={allowed}",
                    remedy=f"set flow.max_age={age}, then --resume",
                )

    async def _train(self, outline: BatchOutline) -> tuple[StepReport, float]:
        """Let the learner train on the batch of ``outline``. Return its report, and the time on the clock at which the
        report came."""
        with self._state.board.requesting("learner", f"step {outline.step}", provider="the learner"):
            report = await self._state.parts.learner.step(outline)
        return report, self._state.parts.clock.now()

    async def _snapshot(self, version: int, slot: int) -> Publication:
        """Let the learner copy its weights, which are ``version``, into the buffer ``slot``, and return the
        snapshot."""
        with self._state.board.requesting("learner", f"a copy of version {version}", provider="the learner"):
            return await self._state.parts.learner.snapshot(version, slot)
