"""The supervision of processes of one kind, engines or rollout shards. A supervisor starts and watches the processes,
and restarts a process that dies, as long as the number of restarts allows it.

    start ──▶ loading ──ready──▶ serves ──▶ it dies; or it is stopped or silent for too long, and is killed
      ▲                                        │
      ├──── within launch.engine_restarts ─────┘ beyond: the run ends, resumable
      └──▶ cannot be started again ──▶ lost, or the run ends

If a process reports an error during its first start, the settings are wrong, and the run ends with that error. If a
signal killed the process before it was ready, it could not report an error, and it is started again.

Processes can be added and removed during the run. If an added process ends before it has served for the first time, it
is removed again, and the run continues. A process that is being removed may end at any time, and is not started again.
A process that cannot be started again, because its node is gone and no other has room, is forgotten if the other
processes suffice (:meth:`Supervisor.can_spare`), and otherwise ends the run.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, DeadlineError, EngineUnfit, HeadraceError
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.observation import Recovery
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.fleet.member import TICK_S
from headrace.launch.child import Child

RESTART_WINDOW_S = 600.0
"""The time, in seconds, in which the number of restarts is limited."""
LAST_MESSAGES_S = 0.05
"""Seconds to wait for the last messages of a process after its death was detected."""
REMEDY = "fix the cause, then --resume: nothing that was finished is lost"
"""The remedy in the error that ends a run because of a dead process. A remedy for the cause may follow it."""
LOG_REMEDY = "look at its log in the run directory"
"""The remedy in the error about a dead process, if nothing better is known."""
START_REMEDY = f"{LOG_REMEDY}; raise launch.start_timeout_s for a large model"
"""The remedy in the error about a process that does not become ready in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """The limits for the supervision of processes, from the settings ``launch`` and ``sync``."""

    rolling: int | None = None
    """Number of engines that may commit at the same time; ``None`` means no limit."""
    restarts: int
    """Number of restarts within :data:`RESTART_WINDOW_S`. With 0, the first death ends the run."""
    start_timeout_s: float
    """Seconds that a process may take to become ready."""
    silence_s: float
    """Seconds for which an engine with sequences may send nothing. Also the seconds for which a process that has not
    answered an order may be stopped."""
    version: int = NOT_SAMPLED
    """The version of the weights that an engine has when it is ready; ``NOT_SAMPLED`` if the learner has to send the
    weights."""


@dataclass(slots=True, kw_only=True)
class Outage:
    """A time during which a process does not serve. It begins with the death of the process, or with a version that the
    process did not receive, and ends when the process serves again."""

    cause: str
    """The cause in words."""
    since_s: float
    """The time at which the outage began, on the clock of the supervisor."""
    carried_over: int
    """Number of the process's sequences or episodes that continue elsewhere."""


def describe_loss(name: str, error: HeadraceError) -> str:
    """Return the sentence that the process ``name`` is lost because of ``error``, with which it could not be started
    again."""
    brief = error.problem.partition("\n")[0]
    return f"{name} is lost, since it could not be started again: {brief}"


class Supervisor(ABC):
    """The supervisor of the processes ``names``, which are all of one kind. ``start`` starts the process with a given
    name. A subclass defines how a ready process is used, and what happens to the work of a dead process."""

    def __init__(
        self, start: Callable[[str], Awaitable[Child]], names: Sequence[str], config: SupervisionConfig, clock: Clock
    ) -> None:
        """Create the supervisor without starting a process. The class describes the arguments; ``clock`` measures
        outages and the window of restarts."""
        self._start, self.names, self._config, self.clock = start, tuple(names), config, clock
        self.children: dict[str, Child] = {}
        """The current process of each name."""
        self._kill_events = {name: asyncio.Event() for name in names}
        """For each process, the event that is set when its kill is requested."""
        self._kill_reasons: dict[str, ComponentDied] = {}
        """For each process whose kill was requested, the error with the reason."""
        self._deaths: deque[float] = deque(maxlen=config.restarts or None)
        """The times of the last deaths, as many as restarts are allowed."""
        self.restarts = Counter[str]()
        """The number of times that each process was started again, by name."""
        self._on_recovery: Callable[[Recovery], None] = lambda _: None
        """The callback for deaths and recoveries; see :meth:`send_recoveries_to`."""
        self._on_loss: Callable[[str, HeadraceError], None] = lambda _, __: None
        """The callback for processes that are forgotten; see :meth:`send_losses_to`."""
        self._tasks: asyncio.TaskGroup | None = None
        """The tasks that supervise one process each; ``None`` before :meth:`run`."""
        self._additions: dict[str, asyncio.Future[None]] = {}
        """For each process that was added and has not served yet: the future that is done when the process serves, or
        that receives the error with which the process ended."""
        self._removals: dict[str, asyncio.Future[int]] = {}
        """For each process that is being removed: the future that is done when the process has ended. Its result is the
        number of sequences of the process that continue elsewhere."""

    @abstractmethod
    async def serve(self, child: Child, outage: Outage | None) -> None:
        """Use the process ``child``, which has become ready, until this call is cancelled. ``outage`` is the outage
        that ends with it and must be reported with :meth:`report_recovery`; ``None`` at the first start."""

    @abstractmethod
    def stop_using(self, name: str) -> int:
        """Stop using the process ``name``, which has died, and return how many of its sequences or episodes continue
        elsewhere."""

    @abstractmethod
    async def wait_until_complete(self) -> None:
        """Wait until every process is ready and in use."""

    def can_spare(self, name: str) -> bool:
        """Return whether the run can go on without the process ``name``, which cannot be started again. The default is
        that it cannot."""
        return False

    async def watch(self) -> None:
        """Watch for processes that are alive but do not work. This ends only by cancellation. The default watches
        nothing."""
        await asyncio.Event().wait()

    def send_recoveries_to(self, on_recovery: Callable[[Recovery], None]) -> None:
        """Set the callback ``on_recovery``. It is called for every later death that does not end the run, for every
        engine that does not receive new weights, and again when such a process serves."""
        self._on_recovery = on_recovery

    def send_losses_to(self, on_loss: Callable[[str, HeadraceError], None]) -> None:
        """Set the callback ``on_loss``. It is called with the name of every later process that is forgotten because it
        could not be started again, and with the error of the attempt."""
        self._on_loss = on_loss

    async def start(self) -> None:
        """Start all processes. They have not loaded anything yet when this returns."""
        for name in self.names:
            await self._start_one(name)

    async def run(self) -> None:
        """Supervise the processes. This ends only by cancellation, or with a
        :class:`~headrace.base.errors.HeadraceError` if a process has died and must not be restarted."""
        async with asyncio.TaskGroup() as self._tasks:
            for name in self.names:
                self._tasks.create_task(self._keep_running(name))
            if self._config.restarts:
                self._tasks.create_task(self.watch())

    async def add(self, name: str) -> None:
        """Start one more process with the given ``name``, and wait until it serves. If it ends before that, raise the
        :class:`~headrace.base.errors.HeadraceError` with which it ended; the run continues without it."""
        assert self._tasks is not None
        self.names = (*self.names, name)
        self._kill_events[name] = asyncio.Event()
        served = self._additions[name] = asyncio.get_running_loop().create_future()
        try:
            await self._start_one(name)
        except BaseException:
            self._forget(name)
            raise
        self._tasks.create_task(self._keep_running(name))
        await served

    def begin_removal(self, name: str) -> asyncio.Future[int]:
        """Record that the process ``name`` is being removed: from now on it may end at any time, and is not started
        again. Return a future that is done when the process has ended. Its result is the number of sequences of the
        process that continue elsewhere."""
        removal = self._removals[name] = asyncio.get_running_loop().create_future()
        return removal

    def _record_serving(self, name: str) -> None:
        """Record that the process ``name`` serves. An added process is treated like all others from now on."""
        served = self._additions.pop(name, None)
        if served is not None and not served.done():
            served.set_result(None)

    def _forget(self, name: str, carried_over: int = 0) -> None:
        """Remove all records of the process ``name``, which has ended and is not started again. ``carried_over`` is the
        number of its sequences that continue elsewhere."""
        self.names = tuple(known for known in self.names if known != name)
        for records in (self.children, self._kill_events, self._kill_reasons, self._additions, self.restarts):
            records.pop(name, None)
        self._update_patience()
        removal = self._removals.pop(name, None)
        if removal is not None and not removal.done():
            removal.set_result(carried_over)

    def request_kill(self, name: str, reason: str, remedy: str = LOG_REMEDY) -> None:
        """Request that the task that supervises the process ``name`` kills it, and return at once. A process that is
        being removed is first told to shut down. ``reason`` becomes the cause of death in the error about the process,
        and ``remedy`` says what the user can do about it."""
        self._kill_reasons[name] = ComponentDied(f"{reason}: it was ended", remedy=remedy)
        self._kill_events[name].set()

    def report(self, recovery: Recovery) -> None:
        """Report the death or the recovery of a process."""
        self._on_recovery(recovery)

    def report_recovery(self, name: str, outage: Outage) -> None:
        """Report that the process ``name`` serves again, which ends ``outage``."""
        seconds = self.clock.now() - outage.since_s
        self.report(Recovery(part=name, cause=outage.cause, seconds=seconds, carried_over=outage.carried_over))

    async def _start_one(self, name: str) -> None:
        """Start the process ``name``. It has not loaded anything yet when this returns. Raises
        :class:`~headrace.base.errors.HeadraceError` if it cannot be started, or was removed before it was started: on a
        cluster, it may have to wait for a machine."""
        async with asyncio.TaskGroup() as group:
            start = group.create_task(self._start_or_error(name))
            removal = group.create_task(self._kill_events[name].wait())
            await asyncio.wait([start, removal], return_when=asyncio.FIRST_COMPLETED)
            start.cancel()
            removal.cancel()
        if start.cancelled():
            raise ComponentDied(f"{name} was removed before it was started", remedy="add another one")
        outcome = start.result()
        if isinstance(outcome, Exception):
            raise outcome
        self.children[name] = outcome
        self._update_patience()

    async def _start_or_error(self, name: str) -> Child | Exception:
        """Start the process ``name``, and return it, or the error with which it could not be started. An error that was
        raised in a task group would reach the caller in an exception group."""
        try:
            return await self._start(name)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            return error

    def _update_patience(self) -> None:
        """Set whether the controller waits for answers of a stopped process beyond their deadlines. It does so if there
        is only one process, or if processes are not restarted."""
        for child in self.children.values():
            child.peer.waits_while_halted = len(self.names) == 1 or not self._config.restarts

    async def _keep_running(self, name: str) -> None:
        """Wait until the process ``name`` ends, and start it again. Repeat this until this call is cancelled, until the
        process is removed, or until a death ends the run."""
        outage: Outage | None = None
        while True:
            child = self.children[name]
            death = await self._run_until_death(child, outage)
            if name in self._removals or name in self._additions:
                self._end_without_restart(child, death)
                return
            outage = self._record_death(child, death, outage)
            child.close()
            self._kill_events[name].clear()
            try:
                await self._start_one(name)
            except HeadraceError as error:
                is_removed = name in self._removals
                if not is_removed and not self.can_spare(name):
                    raise
                self._forget(name)
                if not is_removed:
                    self._on_loss(name, error)
                return

    def _end_without_restart(self, child: Child, death: ComponentDied) -> None:
        """Stop using the process ``child``, which has ended because it is being removed, or which was added and has
        ended before it served. In the latter case, the caller of :meth:`add` receives its error, or ``death`` if the
        process has reported none."""
        carried_over, served = self.stop_using(child.role), self._additions.get(child.role)
        child.close()
        self._forget(child.role, carried_over)
        if served is not None and not served.done():
            served.set_exception(child.peer.reported_error or death)

    async def _run_until_death(self, child: Child, outage: Outage | None) -> ComponentDied:
        """Supervise the process ``child`` until its end, and return the error that names the cause of its end.
        ``outage`` is the outage that this process will end; ``None`` at the first start."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(child.peer.listen()),
                group.create_task(self._serve_when_ready(child, outage)),
                group.create_task(self._kill_when_requested(child)),
            ]
            if self._config.restarts:
                tasks.append(group.create_task(self._request_kill_when_stopped(child)))
            cause = await child.wait_for_death()
            await asyncio.sleep(LAST_MESSAGES_S)
            for task in tasks:
                task.cancel()
        reason, gpus = self._kill_reasons.pop(child.role, None), child.peer.get_fact("place")
        if reason is None:
            return ComponentDied(cause, remedy=LOG_REMEDY)
        return ComponentDied(f"{reason.problem} ({gpus})", remedy=reason.remedy) if gpus else reason

    async def _serve_when_ready(self, child: Child, outage: Outage | None) -> None:
        """Use the new process ``child`` when it is ready. ``outage`` is the outage that it will end; ``None`` at the
        first start. If the process is not ready in time, the run ends at the first start, and the process is killed at
        a later start."""
        limit_s = self._config.start_timeout_s
        await asyncio.wait([child.peer.ready], timeout=limit_s)
        if not child.peer.ready.done() and outage is None and child.role not in self._additions:
            halted = child.peer.halted and f"; it {child.peer.halted}"
            raise DeadlineError(f"{child.role} did not start within {limit_s:g} s{halted}", remedy=START_REMEDY)
        if not child.peer.ready.done():
            reason = f"{child.role} (pid {child.pid}) did not start within {limit_s:g} s"
            self.request_kill(child.role, reason, START_REMEDY)
            return
        await self.serve(child, outage)

    async def _kill_when_requested(self, child: Child) -> None:
        """Wait until :meth:`request_kill` is called for the process ``child``, and kill it. A process that is being
        removed is first told to shut down."""
        await self._kill_events[child.role].wait()
        if child.role in self._removals:
            await child.shut_down(Shutdown())
        else:
            await child.kill()

    async def _request_kill_when_stopped(self, child: Child) -> None:
        """Request the kill of the process ``child`` when it was stopped for ``silence_s`` and has not answered an order
        in that time.

        No other check detects such a process: the fleet watches only engines that have sequences, and in a run with a
        single engine the deadline of an answer is suspended while the process is stopped.
        """
        stopped_s = 0.0
        while stopped_s < self._config.silence_s:
            # time is counted in ticks, so that time during which this machine was suspended is not counted
            await asyncio.sleep(TICK_S)
            stopped_s = stopped_s + TICK_S if child.peer.halted and child.peer.awaits_answer else 0.0
        reason = f"{child.role} (pid {child.pid}) {child.peer.halted}, and has owed an answer for {stopped_s:g} s"
        self.request_kill(child.role, reason)

    def _record_death(self, child: Child, death: ComponentDied, outage: Outage | None) -> Outage:
        """Count ``death``, the death of ``child``, as one of the allowed restarts, report it, and return the outage
        that begins, or the earlier ``outage`` that continues. Raises the error that ends the run if the process must
        not be started again."""
        carried_over, now_s = self.stop_using(child.role), self.clock.now()
        error = child.peer.reported_error
        problem, remedy = (error or death).problem, f"{REMEDY}; {(error or death).remedy}"
        is_killed = error is None and child.killed
        failed_first_start = outage is None and not child.peer.ready.done() and not is_killed
        if not self._config.restarts or failed_first_start or isinstance(error, EngineUnfit):
            raise error or ComponentDied(problem, remedy=remedy)
        # The length of the deque is the number of allowed restarts, so its first entry is the oldest relevant death.
        if len(self._deaths) == self._config.restarts and now_s - self._deaths[0] < RESTART_WINDOW_S:
            minutes = RESTART_WINDOW_S / 60
            raise ComponentDied(
                f"{problem}\n  launch.engine_restarts={self._config.restarts} in {minutes:g} minutes are used up",
                remedy=remedy,
            )
        self._deaths.append(now_s)
        self.restarts[child.role] += 1
        cause_line = problem.partition("\n")[0]
        new_outage = Outage(cause=cause_line, since_s=now_s, carried_over=carried_over)
        # the process died again before it served: the sequences of the first death are still waiting
        if outage is not None and outage.carried_over:
            new_outage.since_s, new_outage.carried_over = outage.since_s, outage.carried_over
        self.report(Recovery(part=child.role, cause=cause_line, seconds=None, carried_over=new_outage.carried_over))
        return new_outage
