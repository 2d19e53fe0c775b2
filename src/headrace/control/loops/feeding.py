"""The feeder of the learner: it takes batches from the flow and orders their steps ahead of time, so that the learner
does not wait between steps.

To *order* a step is to queue its work in the learner: train, copy the weights and, if a checkpoint is due, save.
"""

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
from headrace.control.metrics.batch import BatchStats, batch_stats
from headrace.control.saving import Saver, Saving
from headrace.control.state import RunState
from headrace.flow import TakenBatch
from headrace.flow.policies import STALE
from headrace.learner.base import Publication

UNTAUGHT = "untaught"
"""The reason under which a token is counted that carries no loss because no teacher has scored it, although teachers
have scored other tokens of the batch."""
ORDERED_AHEAD = 2
"""Greatest number of ordered steps: the step that the learner works on, and the next step."""


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
    batch: Batch
    """The batch before stale tokens and tokens without a teacher's score were masked."""
    ages: dict[int, int]
    """Number of tokens that carry loss, by age in versions."""
    masked: dict[str, int]
    """Number of tokens that were masked when the batch was built, by reason."""
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
        self._orders: asyncio.Queue[OrderedStep | None] = asyncio.Queue(maxsize=ORDERED_AHEAD + 1)
        self._has_waiter = False

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
        async with asyncio.TaskGroup() as orders:
            while True:
                await self._orders_allowed.acquire()
                batch = await self._next_batch()
                if batch is None:
                    break
                await self._orders.put(await self._order(batch, orders))
            await self._orders.put(None)

    async def _next_batch(self) -> TakenBatch | None:
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

    async def _order(self, taken: TakenBatch, orders: asyncio.TaskGroup) -> OrderedStep:
        """Lay out the batch ``taken``, order its step, and return the ordered step. The tasks of the step are created
        in the group ``orders``. Tasks start in the order of their creation, so the learner receives its orders in this
        order."""
        state = self._state
        step = taken.step
        with state.board.requesting(
            "learner", f"an entry in the ledger that step {step} is taken", provider="the disk"
        ):
            flushed_s = state.parts.clock.now()
            await state.flow.flush()  # a batch must be recorded as taken before it is trained
            state.span("ledger", "flush", flushed_s, step)
        credits = state.parts.advantages(taken.groups)
        collated = collate(step, taken.groups, credits, state.parts.agents.adapters)
        stats = batch_stats(taken.groups)  # computed here because the episodes are in the processor's caches
        batch, untaught = without_untaught(collated)
        batch, stale = without_stale(batch, taken.oldest_version)
        ages, counts = np.unique(batch.ages(), return_counts=True)
        self._refuse_too_old(taken)
        await self._sleep_engine()
        ordered_s = state.parts.clock.now()
        state.flow.ordered(step)
        trained = orders.create_task(self._train(batch))
        # the learner trains now, and the waiting loop receives the step only at the end of this method
        if self._has_waiter:
            state.board.working("learner", f"step {step}")
        with state.board.requesting("learner", "a free weight buffer", provider="sync"):
            slot = await self._sync.free_slot()
        slot_s = state.parts.clock.now()
        snapshot = orders.create_task(self._snapshot(step + 1, slot))
        saves_checkpoint = (step + 1) % state.run.checkpoint_every == 0
        return OrderedStep(
            step=step,
            groups=taken.groups,
            stats=stats,
            batch=collated,
            masked={**num_untrained(taken.groups), **untaught, **stale},
            ages={int(age): int(count) for age, count in zip(ages, counts, strict=True)},
            ordered_s=ordered_s,
            trained=trained,
            slot_s=slot_s,
            snapshot=snapshot,
            saving=self._saver.begin(step + 1, orders) if saves_checkpoint else None,
        )

    async def _sleep_engine(self) -> None:
        """With ``sync.interrupt = "sleep"``, let the engine release its cache memory while the learner trains;
        otherwise do nothing."""
        if self._state.parts.interrupt is Interrupt.SLEEP:
            with self._state.board.requesting("sync", "the engine to fall asleep", provider="engine"):
                await self._state.parts.engine.pause(release=True)

    def _refuse_too_old(self, taken: TakenBatch) -> None:
        """Raise :class:`~headrace.base.errors.RunError` if the batch contains a token older than the staleness bound.
        The policy ensures the bound, so this can only happen to a group that was admitted before a restart, under other
        settings."""
        flow = self._state.flow.state
        # tokens of versions before `floor` are masked, so their age does not count
        floor = -1 if taken.oldest_version is None else taken.oldest_version
        oldest_versions = {flow.groups[group.number].oldest_version for group in taken.groups}
        for version in {max(old, floor) for old in oldest_versions if old is not None}:
            age, allowed = taken.step - version, flow.allowed_age(version)
            if age > allowed:
                raise RunError(
                    f"step {taken.step} would train a token of age {age}, and flow.max_age={allowed}",
                    remedy=f"set flow.max_age={age}, then --resume",
                )

    async def _train(self, batch: Batch) -> tuple[StepReport, float]:
        """Let the learner train on ``batch``. Return its report, and the time at which the report arrived, in seconds
        on the clock."""
        with self._state.board.requesting("learner", f"step {batch.step}", provider="the learner"):
            report = await self._state.parts.learner.train(batch)
        return report, self._state.parts.clock.now()

    async def _snapshot(self, version: int, slot: int) -> Publication:
        """Let the learner copy its weights, whose version is ``version``, into the buffer ``slot``, and return the
        snapshot."""
        with self._state.board.requesting("learner", f"a copy of version {version}", provider="the learner"):
            return await self._state.parts.learner.snapshot(version, slot)


def collate(
    step: int, groups: Sequence[ScoredGroup], advantages: Sequence[Credit], agents: Sequence[str] = ()
) -> Batch:
    """Return the batch of ``step`` with the trained episodes of ``groups``. ``advantages`` contains the credit of each
    episode that counts in a baseline, in order; ``agents`` are the names of the roles that train their own adapters in
    addition to the policy's."""
    episodes = [episode for group in groups for episode in group.counted]
    credited = zip(episodes, advantages, strict=True)
    trained = EpisodeStatus.SCORED
    samples = [paths(episode, credit) for episode, credit in credited if episode.status is trained]
    return Batch.collate(step, [sample for episode_samples in samples for sample in episode_samples], agents)


def without_stale(batch: Batch, oldest_version: int | None) -> tuple[Batch, dict[str, int]]:
    """Return a copy of the batch in which tokens of versions before ``oldest_version`` are masked (``None``: no
    tokens), and the number of masked tokens by reason, empty if there are none."""
    if oldest_version is None:
        return batch, {}
    stale_N = batch.mask_N & (oldest(batch.versions_N) < oldest_version)
    count = int(stale_N.sum())
    if not count:
        return batch, {}
    return msgspec.structs.replace(batch, mask_N=batch.mask_N & ~stale_N), {STALE: count}


def without_untaught(batch: Batch) -> tuple[Batch, dict[str, int]]:
    """Return a copy of the batch in which tokens without a teacher's score are masked, and the number of masked tokens
    by reason, empty if there are none. A batch without any teacher's score is returned unchanged. Such tokens were
    recorded before a resumed run had teachers, for example."""
    if batch.teacher_scores is None:
        return batch, {}
    mask_N = batch.mask_N & batch.teacher_scores.known_T
    count = int(batch.mask_N.sum()) - int(mask_N.sum())
    return (msgspec.structs.replace(batch, mask_N=mask_N), {UNTAUGHT: count}) if count else (batch, {})
