"""The feeder of the learner: it takes batches from the flow and orders their steps ahead of time, so that the learner
does not wait between steps.

To *order* a step is to queue its work in the learner: train, copy the weights and, if a checkpoint is due, save.
"""

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
from headrace.flow import GroupBatch
from headrace.flow.layout import make_outline
from headrace.learner.base import Publication

ORDERED_AHEAD = 2
"""Maximum number of ordered steps: the step that the learner works on, and the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedStep:
    """One step that was ordered: the learner trains it, copies the new weights and, if a checkpoint is due, saves the
    checkpoint, in this order."""

    step: int
    """The number of the step."""
    groups: list[ScoredGroup]
    """The groups that the step trains."""
    stats: BatchStats
    """Statistics of the episodes in these groups."""
    untrained: dict[str, int]
    """Number of sampled tokens in turns that carry no loss, by reason."""
    ordered_s: float
    """The time at which the batch was sent to the learner, in seconds on the clock."""
    trained: asyncio.Task[tuple[StepReport, float]]
    """The task that returns the step's report and the time at which the report arrived, in seconds on the clock."""
    slot_s: float
    """The time at which a weight buffer for the snapshot was free, in seconds on the clock."""
    snapshot: asyncio.Task[Publication]
    """The task that returns the snapshot of the new weights, which is published to the engines."""
    saving: Saving | None
    """The checkpoint that is written after the step; ``None`` if no checkpoint is due."""


class Feeder:
    """A queue of ordered steps. It takes each batch from the flow as soon as the batch is ready, and orders its step.
    The learning loop owns the feeder and completes the steps."""

    def __init__(self, state: RunState, sync: SyncLoop, saver: Saver) -> None:
        """Create a feeder without ordered steps. ``state`` contains the flow and the learner, ``sync`` provides the
        weight buffers, and ``saver`` writes the checkpoints that are due."""
        self._state = state
        self._sync = sync
        self._saver = saver
        self._orders_allowed = asyncio.Semaphore(ORDERED_AHEAD)
        """A semaphore with the number of further steps that may be ordered now."""
        self._orders: asyncio.Queue[OrderedStep | None] = asyncio.Queue(maxsize=ORDERED_AHEAD + 1)
        """The ordered steps that :meth:`next` has not returned; ``None`` follows the last step."""
        self._has_waiter = False
        """Whether the learning loop waits in :meth:`next`."""

    async def next(self) -> OrderedStep | None:
        """Wait for the next ordered step and return it; return ``None`` after the last step."""
        self._has_waiter = True
        try:
            return await self._orders.get()
        finally:
            self._has_waiter = False

    def done(self) -> None:
        """Record that a step is complete, so that one more step may be ordered."""
        self._orders_allowed.release()

    async def run(self) -> None:
        """Order steps until the last step, until no further batch is possible, or until the run is requested to
        stop."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._orders_allowed.acquire()
                batch = await self._next_batch()
                if batch is None:
                    break
                await self._orders.put(await self._order(batch, tasks))
            await self._orders.put(None)

    async def _next_batch(self) -> GroupBatch | None:
        """Wait for a batch of the flow and return it; return ``None`` if there will be no further batch."""
        state = self._state
        while not (state.stop_requested or state.flow.finished):
            batch = state.flow.take()
            if batch is not None:
                return batch
            if state.flow.used_up:
                break
            await state.flow.changed.wait()
        return None

    async def _order(self, batch: GroupBatch, tasks: asyncio.TaskGroup) -> OrderedStep:
        """Order the step of ``batch`` from the learner, and return the ordered step. The tasks of the step are created
        in the group ``tasks``. They start in the order of their creation, so the learner receives its requests in this
        order."""
        state = self._state
        step = batch.step
        with state.board.requesting(
            "learner", f"an entry in the ledger that step {step} is taken", provider="the disk"
        ):
            flushed_s = state.parts.clock.now()
            await state.flow.flush()  # a batch must be recorded as taken before it is trained
            state.span("ledger", "flush", flushed_s, step)
        credits = state.parts.advantages(batch.groups)
        outline = make_outline(
            step, batch.groups, credits, agents=state.parts.agents.adapters, oldest_version=batch.oldest_version
        )
        stats = batch_stats(batch.groups)  # computed here because the episodes are in the processor's caches
        self._refuse_too_old(batch)
        await self._sleep_engine()
        ordered_s = state.parts.clock.now()
        state.flow.record_batch_sent(step)
        trained = tasks.create_task(self._train(outline))
        # the learner trains now, and the waiting loop receives the step only at the end of this method
        if self._has_waiter:
            state.board.set_working("learner", f"step {step}")
        with state.board.requesting("learner", "a free weight buffer", provider="sync"):
            slot = await self._sync.free_slot()
        slot_s = state.parts.clock.now()
        snapshot = tasks.create_task(self._snapshot(step + 1, slot))
        saves_checkpoint = (step + 1) % state.run.checkpoint_every == 0
        return OrderedStep(
            step=step,
            groups=batch.groups,
            stats=stats,
            untrained=num_untrained(batch.groups),
            ordered_s=ordered_s,
            trained=trained,
            slot_s=slot_s,
            snapshot=snapshot,
            saving=self._saver.begin(step + 1, tasks) if saves_checkpoint else None,
        )

    async def _sleep_engine(self) -> None:
        """With ``sync.interrupt = "sleep"``, let the engine release its cache memory while the learner trains;
        otherwise do nothing."""
        if self._state.parts.interrupt is Interrupt.SLEEP:
            with self._state.board.requesting("sync", "the engine to fall asleep", provider="engine"):
                await self._state.parts.engine.pause(release=True)

    def _refuse_too_old(self, batch: GroupBatch) -> None:
        """Raise :class:`~headrace.base.errors.RunError` if the batch contains a token older than the staleness bound.
        The policy ensures the bound, so this can only happen to a group that was admitted before a restart, under other
        settings."""
        flow = self._state.flow.state
        # tokens of versions before `floor` are masked, so their age does not count
        floor = -1 if batch.oldest_version is None else batch.oldest_version
        oldest_versions = {flow.groups[group.number].oldest_version for group in batch.groups}
        for version in {max(old, floor) for old in oldest_versions if old is not None}:
            age, allowed = batch.step - version, flow.allowed_age(version)
            if age > allowed:
                raise RunError(
                    f"step {batch.step} would train a token of age {age}, and flow.max_age={allowed}",
                    remedy=f"set flow.max_age={age}, then --resume",
                )

    async def _train(self, outline: BatchOutline) -> tuple[StepReport, float]:
        """Let the learner train on the batch of ``outline``. Return its report, and the time at which the report
        arrived, in seconds on the clock."""
        with self._state.board.requesting("learner", f"step {outline.step}", provider="the learner"):
            report = await self._state.parts.learner.step(outline)
        return report, self._state.parts.clock.now()

    async def _snapshot(self, version: int, slot: int) -> Publication:
        """Let the learner copy its weights, whose version is ``version``, into the buffer ``slot``, and return the
        snapshot."""
        with self._state.board.requesting("learner", f"a copy of version {version}", provider="the learner"):
            return await self._state.parts.learner.snapshot(version, slot)
