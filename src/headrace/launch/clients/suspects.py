"""Policies for calls whose worker has died: they find the call that kills its workers.

Most deaths have an outside cause: a kill, a machine without memory. So all calls of a worker that died are made again
in the shared workers. Calls that lose a second worker there are suspects, which are tried apart from other calls:

    OneByOne   short calls, such as a reward: each alone, one after the other, in one additional worker
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
"""Number of calls that ``OneByOne`` makes once more in the shared workers at the same time, after their worker died."""
TRIALS = 4
"""Number of trials of ``ByHalves`` at the same time, each with one worker beyond those of the settings."""


class OneByOne:
    """Make calls whose worker died once more in the shared workers, a few at a time, and then each alone."""

    def __init__(self) -> None:
        self._few = asyncio.Semaphore(SUSPECTS)
        self._alone = asyncio.Semaphore(1)
        self._slot: WorkerSlot[Any] | None = None

    def stays(self, call: PoolCall, loss: CallLoss) -> bool:
        return loss is CallLoss.INNOCENT

    def died(self, pool: WorkerPool[Any, Any, Any], slot: WorkerSlot[Any], worker: Worker[Any]) -> None:
        if slot is self._slot and worker.settled.is_set():  # else a call still waits for one that starts
            slot.needed.clear()

    async def clear(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, loss: CallLoss) -> Any:
        """Make a lost call again among few others, and then, if that is lost too, in a worker where it runs alone.
        Return its answer; ``CULPRIT`` if its worker died there as well."""
        found: Any = loss
        if found is CallLoss.DIED:
            async with self._few:
                found = await pool.in_shared(call)
        if isinstance(found, CallLoss):
            async with self._alone:
                found = await self._make_alone(pool, call)
        return CallLoss.CULPRIT if isinstance(found, CallLoss) else found

    def forget(self, call: PoolCall) -> None:
        pass

    async def _make_alone(self, pool: WorkerPool[Any, Any, Any], call: PoolCall) -> Any:
        """Make a call in a worker that runs nothing else, until it is answered or known to have ended its worker."""
        if self._slot is None:
            self._slot = WorkerSlot(await pool.some_group())
            pool.in_background(pool.keep_filled(self._slot))
        found: Any = CallLoss.INNOCENT
        while found is CallLoss.INNOCENT:
            self._slot.needed.set()
            found = await pool.attempt_in(await pool.worker(self._slot), call)
        return found


@dataclass(slots=True, eq=False)
class SuspectTrial:
    """A set of suspected calls that are made together, in a worker that no other call uses."""

    num_suspects: int
    """Number of calls that were assigned to the trial and have not left it."""
    worker: asyncio.Future[Worker[Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The worker, when it is ready."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when none of its calls needs the worker any more."""

    def leave(self) -> None:
        """Note that one of its calls has ended, or has lost the worker."""
        self.num_suspects -= 1
        if not self.num_suspects:
            self.ended.set()


class ByHalves:
    """Make calls whose worker died again in the shared workers. Calls whose second worker dies are divided into halves,
    each of which is tried in a worker of its own."""

    def __init__(self) -> None:
        self._trials = asyncio.Semaphore(TRIALS)
        self._assigned: dict[PoolCall, SuspectTrial] = {}
        """The trial in which the next attempt at each suspect is made."""
        self._alone: set[PoolCall] = set()
        """The suspects that have a worker of their own."""

    def stays(self, call: PoolCall, loss: CallLoss) -> bool:
        return loss is CallLoss.INNOCENT or (loss is CallLoss.DIED and call not in self._assigned)

    def died(self, pool: WorkerPool[Any, Any, Any], slot: WorkerSlot[Any], worker: Worker[Any]) -> None:
        """Divide the suspects of a worker that died into halves, and start a worker for each, in which its half begins
        again."""
        suspects = [call for call in worker.calls.values() if call.deaths and call not in self._alone]
        if len(suspects) > 1:
            pool.warn(
                f"episodes were in a second {pool.worker_name} that died ({len(suspects)} of them; {worker.cause}): "
                "they begin again by halves, in workers of their own, until the one that ends its worker is found, "
                f"after {(len(suspects) - 1).bit_length()} more deaths; the other episodes continue meanwhile"
            )
        for trial in self._divide(suspects):
            pool.in_background(self._hold_worker(pool, trial))

    def _divide(self, suspects: Sequence[PoolCall]) -> list[SuspectTrial]:
        """Assign suspects to two trials, half of them to each. A single suspect gets a trial of its own."""
        middle = (len(suspects) + 1) // 2
        halves = [half for half in (suspects[:middle], suspects[middle:]) if half]
        trials = [SuspectTrial(len(half)) for half in halves]
        for half, trial in zip(halves, trials, strict=True):
            self._assigned.update(dict.fromkeys(half, trial))
        return trials

    async def clear(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, loss: CallLoss) -> Any:
        """Make a lost call again, in the worker of its half if it is a suspect, until it is answered or found to be the
        cause."""
        found: Any = loss
        while found in (CallLoss.INNOCENT, CallLoss.DIED):
            trial = self._assigned.pop(call, None)
            found = await (pool.in_shared(call) if trial is None else self._in_trial(pool, call, trial))
        return found

    def forget(self, call: PoolCall) -> None:
        if trial := self._assigned.pop(call, None):  # it was cancelled before it could begin there
            trial.leave()

    async def _in_trial(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, trial: SuspectTrial) -> Any:
        """Make one suspected call in the worker of its trial."""
        if trial.num_suspects == 1:
            self._alone.add(call)
        try:
            await asyncio.wait([trial.worker])  # unlike awaiting it, this does not cancel it for the others
            found = await pool.attempt_in(trial.worker.result(), call)
            return CallLoss.CULPRIT if found is CallLoss.DIED and call in self._alone else found
        finally:
            self._alone.discard(call)
            trial.leave()

    async def _hold_worker(self, pool: WorkerPool[Any, Any, Any], trial: SuspectTrial) -> None:
        """Keep a worker for a trial, from the time when one more may be started until none of its calls needs it."""
        async with self._trials:
            while not trial.ended.is_set():
                with suppress(MachineGone):
                    await self._serve(pool, trial, WorkerSlot(await pool.some_group()))

    async def _serve(self, pool: WorkerPool[Any, Any, Any], trial: SuspectTrial, slot: WorkerSlot[Any]) -> None:
        """Start one worker for a trial, and keep it until its calls need no worker any more. Return early if the worker
        died before it was ready."""
        worker = await pool.begin(slot)
        try:
            await worker.settled.wait()
            if slot.up:
                trial.worker.set_result(worker)
                await trial.ended.wait()
        finally:
            await worker.replace()
