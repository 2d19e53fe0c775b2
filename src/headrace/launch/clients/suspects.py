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
    """The policy for short calls, such as rewards: calls whose worker died are made once more in the shared workers, a
    few at a time, and then, if that worker dies too, each alone in one additional worker."""

    def __init__(self) -> None:
        self._few = asyncio.Semaphore(SUSPECTS)
        self._alone = asyncio.Semaphore(1)
        self._slot: WorkerSlot[Any] | None = None

    def stays(self, call: PoolCall, loss: CallLoss) -> bool:
        """Return whether ``call`` is simply made again in the shared workers: only if it cannot be to blame."""
        return loss is CallLoss.INNOCENT

    def died(self, pool: WorkerPool[Any, Any, Any], slot: WorkerSlot[Any], worker: Worker[Any]) -> None:
        """If the additional worker has died after it was ready, start no other one in its slot until a call needs
        it."""
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
        pass  # this policy keeps no records of single calls

    async def _make_alone(self, pool: WorkerPool[Any, Any, Any], call: PoolCall) -> Any:
        """Make ``call`` in the additional worker, where it runs alone, and return the answer, or the loss if the worker
        ended because of the call."""
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
        """Record that one of the trial's calls no longer needs its worker: it has ended, has lost the worker, or will
        not be made. After the last call, the trial is over."""
        self.num_suspects -= 1
        if not self.num_suspects:
            self.ended.set()


class ByHalves:
    """The policy for long calls, such as episodes: calls whose worker died are made again in the shared workers. Calls
    that lose a second worker are suspects; they are divided into halves, and each half gets a *trial*: its calls are
    made in a worker of their own."""

    def __init__(self) -> None:
        self._trials = asyncio.Semaphore(TRIALS)
        self._assigned: dict[PoolCall, SuspectTrial] = {}
        """The trial in which the next attempt at each suspect is made."""
        self._alone: set[PoolCall] = set()
        """The suspects that have a worker of their own."""

    def stays(self, call: PoolCall, loss: CallLoss) -> bool:
        """Return whether ``call`` is simply made again in the shared workers: if it cannot be to blame, or if its
        worker died and it is no suspect yet."""
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
        cause. Return the answer or :attr:`CallLoss.CULPRIT`; another loss ends the attempts too."""
        found: Any = loss
        while found in (CallLoss.INNOCENT, CallLoss.DIED):
            trial = self._assigned.pop(call, None)
            found = await (pool.in_shared(call) if trial is None else self._in_trial(pool, call, trial))
        return found

    def forget(self, call: PoolCall) -> None:
        """Note that ``call`` has ended, with or without an answer. If it is assigned to a trial in which it has not
        begun, it is removed from that trial, which then does not wait for it."""
        if trial := self._assigned.pop(call, None):  # the call was cancelled before it began in the trial
            trial.leave()

    async def _in_trial(self, pool: WorkerPool[Any, Any, Any], call: PoolCall, trial: SuspectTrial) -> Any:
        """Make one suspected call in the worker of its trial. Return the answer or the loss: ``CULPRIT`` if the worker
        died and the call was alone there."""
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
        """Keep a worker for ``trial`` until none of its calls needs it: wait until one more trial may run, start a
        worker, and start another if it dies before it is ready or its machine leaves."""
        async with self._trials:
            while not trial.ended.is_set():
                with suppress(MachineGone):
                    await self._serve(pool, trial, WorkerSlot(await pool.some_group()))

    async def _serve(self, pool: WorkerPool[Any, Any, Any], trial: SuspectTrial, slot: WorkerSlot[Any]) -> None:
        """Start one worker in ``slot`` for the calls of ``trial``, and keep it until they need no worker any more.
        Return early if the worker died before it was ready."""
        worker = await pool.begin(slot)
        try:
            await worker.settled.wait()
            if slot.up:
                trial.worker.set_result(worker)
                await trial.ended.wait()
        finally:
            await worker.replace()
