"""Policies for calls whose worker has died. They find the call that kills its workers.

Most deaths have an external cause, such as a signal or lack of memory. Therefore all calls of a dead worker are first
repeated in the shared workers. Calls that lose a second worker there are *suspects*, which are tried separately from
other calls:

    OneByOne   short calls, such as a reward: each alone, sequentially, in one additional worker
    ByHalves   long calls, such as an episode: two halves, each in a worker of its own. The half that kills its
               worker is divided again until one call is left; among 64 calls it is found after six divisions

All other calls continue in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.launch.clients.pool import CallLoss, MachineGone, PoolCall, Worker, WorkerPool, WorkerSlot

SUSPECTS = 16
"""Number of calls that ``OneByOne`` repeats in the shared workers at the same time after their worker has died."""
TRIALS = 4
"""Number of concurrent trials of ``ByHalves``. Each uses one worker in addition to the number of workers in the
settings."""


class OneByOne:
    """The policy for short calls, such as rewards. Calls whose worker has died are repeated once in the shared workers,
    a few at a time. If that worker dies too, each call is tried alone in one additional worker."""

    def __init__(self) -> None:
        """Create the policy. The additional worker is started when a call first needs it."""
        self._shared_repeats = asyncio.Semaphore(SUSPECTS)
        """A semaphore that limits the repetitions in the shared workers."""
        self._alone = asyncio.Semaphore(1)
        """A semaphore that is held by the call in the additional worker."""
        self._slot: WorkerSlot[Any] | None = None
        """The slot of the additional worker; ``None`` until a call needs it."""

    def may_repeat(self, call: PoolCall, loss: CallLoss) -> bool:
        """Return whether ``call`` is repeated in the shared workers without further checks. This is the case only if it
        cannot be the cause of the death."""
        return loss is CallLoss.INNOCENT

    def record_death(self, pool: WorkerPool[Any, Any, Any], slot: WorkerSlot[Any], worker: Worker[Any]) -> None:
        """If the additional worker has died after it was ready, do not start another one until a call needs it."""
        if slot is self._slot and worker.startup_over.is_set():  # otherwise a call still waits for it
            slot.needed.clear()

    async def resolve(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, loss: CallLoss) -> Any:
        """Repeat a lost call in the shared workers, together with few others. If it is lost again, execute it alone in
        the additional worker. Return its answer, or ``CULPRIT`` if the worker died there as well."""
        outcome: Any = loss
        if outcome is CallLoss.DIED:
            async with self._shared_repeats:
                outcome = await pool.run_in_shared(call)
        if isinstance(outcome, CallLoss):
            async with self._alone:
                outcome = await self._make_alone(pool, call)
        return CallLoss.CULPRIT if isinstance(outcome, CallLoss) else outcome

    def forget(self, call: PoolCall) -> None:
        """Do nothing: this policy stores no records of calls."""

    async def _make_alone(self, pool: WorkerPool[Any, Any, Any], call: PoolCall) -> Any:
        """Execute ``call`` alone in the additional worker. Return the answer, or the reason of the loss if the worker
        has ended because of the call."""
        if self._slot is None:
            self._slot = WorkerSlot(await pool.wait_for_group())
            pool.run_in_background(pool.keep_filled(self._slot))
        outcome: Any = CallLoss.INNOCENT
        while outcome is CallLoss.INNOCENT:
            self._slot.needed.set()
            outcome = await pool.attempt_in(await pool.wait_for_worker(self._slot), call)
        return outcome


@dataclass(slots=True, eq=False)
class SuspectTrial:
    """A set of suspects that are executed together in a worker that no other call uses."""

    num_suspects: int
    """Number of suspects that are assigned to the trial and have not left it."""
    worker: asyncio.Future[Worker[Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The future of the trial's worker, which is set when the worker is ready."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no suspect needs the worker any more."""

    def release(self) -> None:
        """Record that one suspect does not need the trial's worker any more, because it has ended, has lost the worker,
        or will not be executed. The trial ends when the last suspect leaves."""
        self.num_suspects -= 1
        if not self.num_suspects:
            self.ended.set()


class ByHalves:
    """The policy for long calls, such as episodes. Calls whose worker has died are repeated in the shared workers.
    Calls that lose a second worker are suspects. They are divided into halves, and each half has a *trial*, in which
    its calls are executed in a separate worker."""

    def __init__(self) -> None:
        """Create the policy without suspects."""
        self._trials = asyncio.Semaphore(TRIALS)
        """A semaphore that limits the concurrent trials."""
        self._assigned: dict[PoolCall, SuspectTrial] = {}
        """The trial in which each suspect is executed next."""
        self._alone: set[PoolCall] = set()
        """The suspects that are alone in their worker."""

    def may_repeat(self, call: PoolCall, loss: CallLoss) -> bool:
        """Return whether ``call`` is repeated in the shared workers without further checks: if it cannot be the cause
        of the death, or if it is not a suspect yet."""
        return loss is CallLoss.INNOCENT or (loss is CallLoss.DIED and call not in self._assigned)

    def record_death(self, pool: WorkerPool[Any, Any, Any], slot: WorkerSlot[Any], worker: Worker[Any]) -> None:
        """Divide the suspects of a dead worker into halves, and start a worker for each half, in which its calls begin
        again."""
        suspects = [call for call in worker.calls.values() if call.deaths and call not in self._alone]
        if len(suspects) > 1:
            pool.warn(
                f"episodes were in a second {pool.worker_name} that died ({len(suspects)} of them; {worker.cause}): "
                "they begin again by halves, in workers of their own, until the one that ends its worker is found, "
                f"after {(len(suspects) - 1).bit_length()} more deaths; the other episodes continue meanwhile"
            )
        for trial in self._divide(suspects):
            pool.run_in_background(self._hold_worker(pool, trial))

    def _divide(self, suspects: Sequence[PoolCall]) -> list[SuspectTrial]:
        """Assign suspects to two trials, half of them to each. A single suspect has a trial of its own."""
        middle = (len(suspects) + 1) // 2
        halves = [half for half in (suspects[:middle], suspects[middle:]) if half]
        trials = [SuspectTrial(len(half)) for half in halves]
        for half, trial in zip(halves, trials, strict=True):
            self._assigned.update(dict.fromkeys(half, trial))
        return trials

    async def resolve(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, loss: CallLoss) -> Any:
        """Repeat a lost call, in the worker of its trial if it is a suspect, until it has an answer or is found to be
        the cause. Return the answer or :attr:`CallLoss.CULPRIT`. A loss for another reason ends the attempts and is
        returned, too."""
        outcome: Any = loss
        while outcome in (CallLoss.INNOCENT, CallLoss.DIED):
            trial = self._assigned.pop(call, None)
            outcome = await (pool.run_in_shared(call) if trial is None else self._make_in_trial(pool, call, trial))
        return outcome

    def forget(self, call: PoolCall) -> None:
        """Record that ``call`` has ended, with or without an answer. If it is assigned to a trial in which it has not
        begun, it leaves that trial, so that the trial does not wait for it."""
        if trial := self._assigned.pop(call, None):  # the call was cancelled before it began in the trial
            trial.release()

    async def _make_in_trial(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, trial: SuspectTrial) -> Any:
        """Execute one suspect in the worker of its trial. Return the answer or the reason of the loss. The reason is
        ``CULPRIT`` if the worker has died and the suspect was alone in it."""
        if trial.num_suspects == 1:
            self._alone.add(call)
        try:
            await asyncio.wait([trial.worker])  # awaiting the future itself would cancel it for the other suspects
            outcome = await pool.attempt_in(trial.worker.result(), call)
            return CallLoss.CULPRIT if outcome is CallLoss.DIED and call in self._alone else outcome
        finally:
            self._alone.discard(call)
            trial.release()

    async def _hold_worker(self, pool: WorkerPool[Any, Any, Any], trial: SuspectTrial) -> None:
        """Provide a worker for ``trial`` until no suspect needs it: wait until one more trial may run, start a worker,
        and start another worker if it dies before it is ready or its machine leaves."""
        async with self._trials:
            while not trial.ended.is_set():
                with suppress(MachineGone):
                    await self._serve(pool, trial, WorkerSlot(await pool.wait_for_group()))

    async def _serve(self, pool: WorkerPool[Any, Any, Any], trial: SuspectTrial, slot: WorkerSlot[Any]) -> None:
        """Start one worker in ``slot`` for the suspects of ``trial``, and keep it until they need no worker any more.
        Return early if the worker dies before it is ready."""
        worker = await pool.begin(slot)
        try:
            await worker.startup_over.wait()
            if slot.up:
                trial.worker.set_result(worker)
                await trial.ended.wait()
        finally:
            await worker.replace()
