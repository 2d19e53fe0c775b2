"""A pool of worker processes: it distributes calls to its workers, watches the workers, and replaces workers that end.

Two pools derive from it: scoring.py calls reward functions, and environment.py runs episodes. Each of them defines its
calls, how a hang is detected, and what an answer means.

The life of a worker:

    begin ──▶ starting ──Ready──▶ up, with calls ──────▶ ended ──▶ another one is started in its slot
                 │                  ├─ its process dies: any of its calls may be the cause
                 │                  ├─ watch() sees that it makes no progress: it is killed
                 │                  ├─ replace(): it is killed because of one of its calls
                 │                  └─ retire(): it gets no more calls, and is killed when its last one has ended
                 └─ not ready within start_timeout_s, or MAX_IDLE_DEATHS in a row: the run ends with that cause

The life of a call:

    waits until the pool has capacity ──▶ attempt in the shared worker that has the fewest calls ──▶ answer
                                             ▲                │ its worker ended
                                             └── INNOCENT ────┤
                                                              └── DIED, CROWDED: the policy for suspects (suspects.py)
                                                                  tries it again until there is an answer, or until
                                                                  it is the CULPRIT, which ends every worker it is in
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from headrace.base.errors import EnvError
from headrace.base.tasks import task_group
from headrace.launch.clients.peer import Peer

MAX_IDLE_DEATHS = 8
"""Number of consecutive workers that may die without a call that could be the cause."""


class WorkerProcess(Protocol):
    """The process of a worker, with its peer, as the pool uses it."""

    peer: Peer
    """The controller's client of the process."""

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used or waited for; 0 if they cannot be
        determined."""
        ...

    async def halt_reason(self) -> str:
        """Return why the operating system does not run the process, in words such as ``is stopped (SIGSTOP)``; empty if
        it runs, as far as is known."""
        ...

    async def wait_for_death(self) -> str:
        """Wait for the end of the process, and return the cause in words."""
        ...

    async def kill(self) -> None:
        """Kill the process now."""
        ...

    def close(self) -> None:
        """Release the resources of the process after its end, and cancel all expected answers."""
        ...


class MachineGone(Exception):
    """A worker cannot be started because its machine has left the run or is lost."""


class CallLoss(Enum):
    """The reason why a call has no answer after its worker has ended. The reason determines how the call is
    repeated."""

    INNOCENT = auto()
    """The worker was ended because of another call, or was stopped from outside: the call is not the cause."""
    DIED = auto()
    """The worker died: any of its calls may be the cause."""
    CROWDED = auto()
    """The worker was replaced because a call was late, and any of the calls that had begun there may be the cause."""
    CULPRIT = auto()
    """The worker ended while the call was its only call: the call is the cause."""


@dataclass(slots=True, eq=False)
class PoolCall:
    """One call (a reward to compute, or an episode to run), over all attempts in workers. Pools derive their calls from
    this class."""

    deaths: int = 0
    """Number of workers that died while they executed this call."""
    cause: str = ""
    """The cause of the latest of these deaths."""


C = TypeVar("C", bound=PoolCall)
A = TypeVar("A")
W = TypeVar("W", bound="Worker[Any]")


@dataclass(slots=True, eq=False)
class Worker(ABC, Generic[C]):
    """One worker process as the pool sees it, from its start to its end. ``C`` is the class of its calls."""

    process: WorkerProcess
    """The process with its peer."""
    group: WorkerGroup
    """The group of the worker: all workers of the pool on the same machine."""
    calls: dict[int, C] = field(default_factory=dict)
    """The current calls of the worker, by number."""
    startup_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker has become ready, or has ended before it was ready."""
    slot_freed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker's slot is free, because the worker has ended or receives no more calls."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker has no call, after its first call."""
    replaced: bool = False
    """Whether the pool has ended the worker, because of one of its calls or because of its machine."""
    cause: str = ""
    """The cause of the worker's end, in one line."""

    @abstractmethod
    def count_death(self) -> int:
        """Count the worker's death if none of its calls can be the cause, and return the number of consecutive such
        deaths on its machine. After :data:`MAX_IDLE_DEATHS` of them the run ends."""

    async def replace(self) -> None:
        """Kill the worker because of one of its calls, or because it is not needed any more. Its other calls are
        repeated in other workers."""
        self.replaced = True
        await self.process.kill()

    async def retire(self) -> None:
        """Assign no more calls to the worker, and kill it when its last call has ended."""
        self.slot_freed.set()
        if self.calls:
            await self.idle.wait()
        await self.replace()


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """All workers of a pool on one machine, and the function that starts them."""

    start_worker: Callable[[], Awaitable[WorkerProcess]]
    """Starts a worker. Raises :class:`MachineGone` if the machine has left the run or is lost."""
    num_workers: int
    """The number of workers that the pool keeps on the machine."""
    tasks: asyncio.TaskGroup | None = None
    """The task group of the workers while the machine belongs to a pool; ``None`` before that."""
    workers: set[Worker[Any]] = field(default_factory=set)
    """The workers that have not ended."""
    idle_deaths: int = 0
    """Number of consecutive workers that have died without a call that could be the cause."""
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more workers and calls may begin on the machine."""

    def lose(self) -> None:
        """Record that the machine is lost with all its processes. No worker is started on it any more, and the end of
        its workers is blamed on none of their calls."""
        self.leaving.set()
        for worker in self.workers:
            worker.replaced = True


@dataclass(slots=True, eq=False)
class WorkerSlot(Generic[W]):
    """A place for one worker on the machine of ``group``. The slot is empty while a new worker starts."""

    group: WorkerGroup
    """The group of the machine."""
    worker: W | None = None
    """The worker in the slot; ``None`` while the slot is empty."""
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the slot needs a worker."""

    @property
    def up(self) -> bool:
        """Whether the slot contains a worker that accepts calls."""
        worker = self.worker
        return worker is not None and not (worker.replaced or worker.slot_freed.is_set())


class Capacity:
    """A counter that limits the number of concurrent calls in the shared workers. The limit changes when machines join
    and leave."""

    def __init__(self) -> None:
        """Create a counter with a limit of 0."""
        self.free = 0
        """Number of calls that may begin now. It is negative if more calls are running than allowed, because a machine
        has left."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """The futures of the waiting calls, in the order in which they begin."""

    def add(self, num_calls: int) -> None:
        """Raise the limit by ``num_calls`` calls, or lower it if ``num_calls`` is negative. Running calls continue
        until they end or lose their worker."""
        self.free += num_calls
        while self.free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self.free -= 1
                turn.set_result(None)

    @asynccontextmanager
    async def reserve(self, *, first: bool = False) -> AsyncIterator[None]:
        """Wait until one more call may run, and reserve its place within the context. With ``first``, the call goes
        before all other waiting calls, because it has lost its place when a worker ended."""
        if self.free > 0:
            self.free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            (self._waiting.appendleft if first else self._waiting.append)(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self.add(1)
                raise
        try:
            yield
        finally:
            self.add(1)


class SuspectPolicy(Protocol[C]):
    """A policy for calls whose worker has ended: it decides how they are repeated until the call that kills its workers
    (the culprit) is known. A pool has one policy."""

    def may_repeat(self, call: C, loss: CallLoss) -> bool:
        """Return whether a call that was lost for the reason ``loss`` is repeated in the shared workers. If not, the
        pool calls :meth:`resolve`."""
        ...

    def record_death(self, pool: WorkerPool[Any, C, Any], slot: WorkerSlot[Any], worker: Worker[C]) -> None:
        """Record that ``worker``, which was in ``slot``, has died with its calls. The pool calls this before the calls
        end as lost."""
        ...

    async def resolve(self, pool: WorkerPool[Any, C, Any], call: C, loss: CallLoss) -> Any:
        """Repeat a suspected call, which was lost for the reason ``loss``, until it has an answer, and return the
        answer. If the call is found to end its workers, return :attr:`CallLoss.CULPRIT`."""
        ...

    def forget(self, call: C) -> None:
        """Delete the records of a call that has an answer or was abandoned."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The number of workers of a pool, and the time limit of their start."""

    num_workers: int
    """Number of workers on this machine; 0 means that all workers are on other machines."""
    concurrency: int
    """Number of calls that each worker executes at the same time."""
    start_timeout_s: float
    """Seconds that a worker may take to start."""


class WorkerPool(ABC, Generic[W, C, A]):
    """A pool of worker processes that execute calls. It keeps a worker in each slot, assigns each call to a worker, and
    repeats the call if the worker is lost. ``W`` is the class of its workers, ``C`` the class of its calls, and ``A``
    the class of their answers.

    ``start_worker`` starts a worker on this machine, ``suspects`` decides how lost calls are repeated, and ``warn``
    receives warnings for users.
    """

    worker_name: ClassVar[str]
    """The name of a worker in messages, as in ``scoring worker``."""
    lost_calls: ClassVar[str]
    """The part of a warning that says what happens to the ``{num}`` calls of a worker that has died."""
    slow_start: ClassVar[str]
    """A hint, as a question, about the reason why a worker has not started in time."""
    death_remedy: ClassVar[str] = "look at logs/{name}.log in the run directory"
    """The remedy in the error after too many idle deaths; ``{name}`` is the name of the latest worker."""

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[WorkerProcess]],
        config: PoolConfig,
        suspects: SuspectPolicy[C],
        *,
        warn: Callable[[str], None],
    ) -> None:
        """Create a pool whose workers are not started yet; :meth:`keep` starts them. The class describes the
        arguments."""
        self._pool_config = config
        self._suspects = suspects
        self._warn = warn
        self._own_group = WorkerGroup(start_worker, config.num_workers)
        """The workers on this machine."""
        self._slots: list[WorkerSlot[W]] = []
        """The slots of the shared workers on all machines."""
        self._capacity = Capacity()
        self._changed = asyncio.Event()
        """Set, and then replaced by a new event, when a worker becomes ready or a machine is added."""

    @abstractmethod
    def create_worker(self, process: WorkerProcess, group: WorkerGroup) -> W:
        """Return the worker record of ``process``, which was just started on the machine of ``group``."""

    @abstractmethod
    async def attempt(self, worker: W, call: C, number: int) -> A | CallLoss:
        """Send a call to ``worker`` as order ``number`` and wait for its answer. Return the answer, or the reason why
        the call was lost."""

    @abstractmethod
    async def watch(self, worker: W) -> str:
        """Wait until ``worker`` must be killed because it hangs, and return the warning about it, after which the pool
        kills the worker. Return an empty text if the worker is already being killed."""

    def on_ready(self, facts: dict[str, str | int | float]) -> None:
        """Handle the facts that a worker reports when it is ready, by name. By default they are ignored."""

    # -- for the users of a pool ------------------------------------------------------------------------------------

    @property
    def has_local_workers(self) -> bool:
        """Whether the pool has workers on this machine."""
        return self._own_group.num_workers > 0

    @property
    def num_ready(self) -> int:
        """The number of shared workers that accept calls."""
        return sum(slot.up for slot in self._slots)

    def send_warnings_to(self, warn: Callable[[str], None]) -> None:
        """Send all later warnings for users to ``warn``."""
        self._warn = warn

    def warn(self, text: str) -> None:
        """Send a warning for users."""
        self._warn(text)

    async def keep(self) -> None:
        """Keep a worker in every slot of this machine. This ends only by cancellation, or with an error that ends the
        run: workers do not start, or die repeatedly without a call that could be the cause."""
        async with asyncio.TaskGroup() as self._own_group.tasks:
            self._add_slots(self._own_group)
            await asyncio.Event().wait()

    async def wait_until_started(self) -> None:
        """Wait until every worker on this machine is ready for calls. If the pool has no workers on this machine, wait
        for a worker on another machine."""
        while not self._is_ready():
            await self._changed.wait()

    def _is_ready(self) -> bool:
        """Return whether the pool can accept calls: whether all workers of this machine are ready or, if it has none on
        this machine, whether any worker is."""
        if not self.has_local_workers:
            return any(slot.up for slot in self._slots)
        own = [slot for slot in self._slots if slot.group is self._own_group]
        return bool(own) and all(slot.up for slot in own)

    async def use_machine(self, group: WorkerGroup) -> None:
        """Use the workers of ``group``, which are on another machine, until the machine leaves or is lost. Return when
        the last of its workers has ended.

        Raises the :class:`~headrace.base.errors.HeadraceError` because of which the machine cannot be used.
        """
        try:
            async with task_group() as group.tasks:
                keeping = self._add_slots(group)
                await group.leaving.wait()
                self._remove_slots(group)
                if not self._slots:
                    self._warn(f"no {self.worker_name} is left: episodes wait until a machine joins")
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*(worker.retire() for worker in list(group.workers)))
        finally:
            self._remove_slots(group)
            group.lose()
            await asyncio.gather(*(worker.process.kill() for worker in group.workers))
            for worker in group.workers:
                worker.process.close()

    async def execute(self, call: C) -> A | CallLoss:
        """Execute ``call`` and return its answer. The call is repeated if its worker is lost. If the call is found to
        end its workers, return :attr:`CallLoss.CULPRIT`."""
        try:
            outcome = await self.run_in_shared(call)
            return await self._suspects.resolve(self, call, outcome) if isinstance(outcome, CallLoss) else outcome
        finally:
            self._suspects.forget(call)

    # -- for policies for suspects ------------------------------------------------------------------------------------

    async def run_in_shared(self, call: C) -> A | CallLoss:
        """Execute ``call`` in the shared workers, and repeat it as long as the policy for suspects allows that. Return
        the answer, or the reason why the call was last lost. The call keeps its place between attempts, so that calls
        that have not begun do not overtake it."""
        outcome: A | CallLoss | None = None
        while outcome is None or (isinstance(outcome, CallLoss) and self._suspects.may_repeat(call, outcome)):
            async with self._capacity.reserve(first=outcome is not None):
                outcome = await self._attempt_in_shared(call)
        return outcome

    def capacity_for_one(self) -> AbstractAsyncContextManager[None]:
        """Return a context that waits until one more call may run in the shared workers, and reserves its place."""
        return self._capacity.reserve()

    async def _attempt_in_shared(self, call: C) -> A | CallLoss:
        """Execute a call in a shared worker. Repeat it in another one if its worker ends and the policy for suspects
        allows that. Return the answer, or the reason why the call was lost."""
        while True:
            outcome = await self.attempt_in(await self.wait_for_worker(call=call), call)
            repeats = isinstance(outcome, CallLoss) and self._suspects.may_repeat(call, outcome)
            if not repeats or self._capacity.free < 0:  # too few workers are left after a machine has left
                return outcome

    async def wait_for_worker(self, slot: WorkerSlot[W] | None = None, *, call: C | None = None) -> W:
        """Wait until a worker accepts calls, and return it. With a ``slot``, this is the worker in the slot. Otherwise
        it is the shared worker that ``call`` prefers or, if it prefers none, the worker with the fewest calls."""
        slots = self._slots if slot is None else (slot,)
        while not (workers := [each.worker for each in slots if each.worker and each.up]):
            await self._changed.wait()
            slots = self._slots if slot is None else (slot,)
        preferred = None if call is None else self.preferred_worker(call)
        return preferred if preferred in workers else min(workers, key=lambda worker: len(worker.calls))

    def preferred_worker(self, call: C) -> W | None:
        """Return the worker in which ``call`` needs the least work; ``None`` if there is no difference. The worker may
        have ended."""
        return None

    async def attempt_in(self, worker: W, call: C) -> A | CallLoss:
        """Execute a call in ``worker`` once. Return the answer, or the reason why the call was lost. If the worker has
        died, its death is counted in the call."""
        number = worker.process.peer.next_call()
        worker.calls[number] = call
        worker.idle.clear()
        try:
            outcome = await self.attempt(worker, call, number)
        finally:
            del worker.calls[number]
            if not worker.calls:
                worker.idle.set()
        if outcome is CallLoss.DIED:
            call.deaths, call.cause = call.deaths + 1, worker.cause
        return outcome

    async def wait_for_group(self) -> WorkerGroup:
        """Wait until there is a machine on which workers can be started, and return its group of workers: the group of
        this machine if it may have workers, and otherwise the group of the first machine that has joined."""
        if self.has_local_workers:
            return self._own_group
        while not self._slots:
            await self._changed.wait()
        return self._slots[0].group

    async def begin(self, slot: WorkerSlot[W]) -> W:
        """Start a worker for ``slot``, and the task that supervises it. Return the worker, which is not ready yet.
        Raises :class:`MachineGone` if no worker can be started on the slot's machine any more."""
        group = slot.group
        worker = self.create_worker(await group.start_worker(), group)
        if not self.run_in_background(self._supervise(slot, worker), group):
            await worker.process.kill()
            worker.process.close()
            raise MachineGone
        group.workers.add(worker)
        return worker

    async def keep_filled(self, slot: WorkerSlot[W]) -> None:
        """Keep a worker in ``slot`` as long as the slot needs one, and start another worker when it has ended. Return
        when the slot's machine has left."""
        while not slot.group.leaving.is_set():
            await slot.needed.wait()
            try:
                worker = await self.begin(slot)
            except MachineGone:
                return
            await worker.slot_freed.wait()

    def run_in_background(
        self, work: Coroutine[Any, Any, None], group: WorkerGroup | None = None
    ) -> asyncio.Task[None] | None:
        """Start ``work`` as a task that ends with the workers of ``group``; ``None`` means the workers of this machine.
        Return the task, or ``None`` if the workers are already ending and no task may begin."""
        tasks = (group or self._own_group).tasks
        assert tasks is not None
        return create_task_if_open(tasks, work)

    # -- slots and workers --------------------------------------------------------------------------------------------

    def _add_slots(self, group: WorkerGroup) -> list[asyncio.Task[None]]:
        """Add empty slots for the workers of ``group``, and raise the limit of concurrent calls. Return the tasks that
        keep the slots filled."""
        assert group.tasks is not None
        slots: list[WorkerSlot[W]] = [WorkerSlot(group) for _ in range(group.num_workers)]
        self._slots += slots
        self._capacity.add(group.num_workers * self._pool_config.concurrency)
        for slot in slots:
            slot.needed.set()
        self._wake_waiting()  # :meth:`wait_for_group` may wait for a machine
        return [group.tasks.create_task(self.keep_filled(slot)) for slot in slots]

    def _remove_slots(self, group: WorkerGroup) -> None:
        """Remove the slots of a machine, so that no more calls and workers begin there."""
        remaining = [slot for slot in self._slots if slot.group is not group]
        self._capacity.add((len(remaining) - len(self._slots)) * self._pool_config.concurrency)
        self._slots = remaining

    def _wake_waiting(self) -> None:
        """Wake all tasks that wait for a worker or a machine."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _supervise(self, slot: WorkerSlot[W], worker: W) -> None:
        """Receive the messages of ``worker``, which is in ``slot``, and watch it, from its start to its end. Then
        record its end, notify the policy for suspects, and warn. When the worker's process is closed, its remaining
        calls end as lost."""
        process, peer = worker.process, worker.process.peer
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(peer.listen())
            death = tasks.create_task(process.wait_for_death())
            if await peer.wait_until_ready(death, self._pool_config.start_timeout_s, self.slow_start):
                self.on_ready(peer.ready.result().facts)
                slot.worker = worker
                worker.startup_over.set()
                self._wake_waiting()
            watching = tasks.create_task(self._kill_when_stuck(worker))
            death_cause = await death
            cause = peer.protocol_violation or death_cause
            worker.cause = cause.partition("\n")[0]
            if slot.worker is worker:  # the slot of a retired worker may contain another worker
                slot.worker = None
            watching.cancel()
            listening.cancel()
        num_lost = len(worker.calls)
        if not worker.replaced:
            self._suspects.record_death(self, slot, worker)
        process.close()
        worker.group.workers.discard(worker)
        worker.slot_freed.set()
        worker.startup_over.set()
        if not worker.replaced:
            self._report_death(worker, cause, num_lost)

    async def _kill_when_stuck(self, worker: W) -> None:
        """Wait until :meth:`watch` detects that the worker hangs, then warn and kill the worker."""
        if warning := await self.watch(worker):
            self._warn(warning)
            await asyncio.shield(worker.process.kill())  # the worker's end cancels this task

    def _report_death(self, worker: W, cause: str, num_lost: int) -> None:
        """Warn that a worker has died for the reason ``cause`` with ``num_lost`` calls. Raises the error that the
        worker has reported, if any, or an :class:`~headrace.base.errors.EnvError` if too many consecutive workers have
        died without a call that could be the cause."""
        if worker.process.peer.reported_error is not None:
            raise worker.process.peer.reported_error
        idle_deaths = worker.count_death()
        if idle_deaths >= MAX_IDLE_DEATHS:
            raise EnvError(
                f"{idle_deaths} {self.worker_name}s died one after the other; the last: {cause}",
                remedy=self.death_remedy.format(name=worker.process.peer.name),
            )
        article = "an" if self.worker_name[0] in "aeiou" else "a"
        self._warn(f"{article} {self.worker_name} died ({cause}); {self.lost_calls.format(num=num_lost)}")


def create_task_if_open(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Start ``work`` as a task in the group ``tasks``, and return the task. If the group is ending and accepts no more
    tasks, close ``work`` and return ``None``."""
    try:
        return tasks.create_task(work)
    except RuntimeError:
        work.close()
        return None
