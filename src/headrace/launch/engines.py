"""The supervisor of a run's engines: it starts and watches them, and starts an engine that died again while the budget
of restarts allows.

    start ──▶ loading ──ready──▶ joins the fleet ──the newest weights──▶ serves
      ▲                                                                     │ it dies; or it is silent and is killed
      └─────────── within launch.engine_restarts ───────────────────────────┘ beyond: the run ends, resumable

An engine is silent when it has sequences and sends nothing, or when it is stopped (SIGSTOP, a debugger) and owes the
answer to an order; either is allowed for ``launch.engine_silence_s``.

The sequences of a dead engine continue on other engines, or wait for its restart, and the learner notices nothing. If
the first start of an engine fails with an error report, this is a problem of the settings and ends the run with that
error. If a signal killed it before it was ready, it could not report an error and is started again. An engine that
lives but does not receive new weights is left alone: it finishes its sequences, and serves again when a later version
has reached it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, DeadlineError, EngineUnfit
from headrace.base.types.observation import Recovery
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.fleet import Fleet
from headrace.engine.fleet.member import TICK_S
from headrace.launch.child import Child
from headrace.launch.clients import EngineClient

RESTART_WINDOW_S = 600.0
"""The time, in seconds, within which restarts are counted against the budget."""
LAST_MESSAGES_S = 0.05
"""Seconds to wait for the last messages of an engine after its death is known."""
DEATH_KNOWN_S = 3.0
"""Seconds after which it is known whether an engine that weights did not reach is dead."""
REMEDY = "fix the cause, then --resume: nothing that was finished is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionConfig:
    """The limits within which a run's engines are supervised, from the settings ``launch`` and ``sync``."""

    rolling: int | None
    """Number of engines that may commit at the same time; ``None``: as many as the commit needs."""
    restarts: int
    """Number of restarts within :data:`RESTART_WINDOW_S`; 0: the first death ends the run."""
    start_timeout_s: float
    """Seconds that an engine may take to become ready."""
    silence_s: float
    """Seconds for which an engine with sequences may send nothing, and for which one that owes an answer may be
    stopped."""
    version: int = NOT_SAMPLED
    """The version of the weights that an engine has when it is ready; ``NOT_SAMPLED``: none, the learner sends them."""


@dataclass(slots=True, kw_only=True)
class _Outage:
    """The time in which an engine does not serve, from its death or a version that did not reach it until it serves
    again."""

    cause: str
    """The reason in words."""
    since_s: float
    """The time at which it began, on the clock of :class:`Engines`."""
    carried_over: int
    """Number of its sequences that continue on other engines."""


def engine_names(count: int) -> tuple[str, ...]:
    """Return the names of a run's ``count`` engines, by which their processes and log files are known.

    >>> engine_names(1), engine_names(2)
    (('engine',), ('engine-0', 'engine-1'))
    """
    return ("engine",) if count == 1 else tuple(f"engine-{place}" for place in range(count))


class Engines:
    """The supervisor of the engine processes ``names`` of a run. ``start`` starts the process of a name. Through
    :attr:`fleet` the rest of the controller uses the engines as one."""

    def __init__(
        self, start: Callable[[str], Awaitable[Child]], names: Sequence[str], config: SupervisionConfig, clock: Clock
    ) -> None:
        """Make the supervisor; no process is started yet. The arguments are described at the class; ``clock`` measures
        outages and the window of restarts."""
        self._start, self._names, self._config, self._clock = start, tuple(names), config, clock
        self._children: dict[str, Child] = {}
        self._kill_ordered = {name: asyncio.Event() for name in names}
        self._why: dict[str, str] = {}
        self._deaths: deque[float] = deque(maxlen=config.restarts or None)
        self.restarts = Counter[str]()
        """Number of times that each engine was started again."""
        self._on_recovery: Callable[[Recovery], None] = lambda _: None
        end = self._order_kill if config.restarts else None
        self.fleet = Fleet(clock, size=len(self._names), rolling=config.rolling, end=end)

    def send_recoveries_to(self, on_recovery: Callable[[Recovery], None]) -> None:
        """Call ``on_recovery`` for every later death that does not end the run and for every engine that new weights do
        not reach; and again when such an engine serves."""
        self._on_recovery = on_recovery

    async def start(self) -> None:
        """Start all engines; they have not loaded anything yet when this returns."""
        for name in self._names:
            await self._start_one(name)

    async def run(self) -> None:
        """Supervise the engines. This ends only by cancellation, or with a :class:`~headrace.base.errors.HeadraceError`
        when an engine is lost for good."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._keep_running(name))
            if self._config.restarts:
                group.create_task(self.fleet.watch(self._config.silence_s))

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the present engines to which a learner sends weights; none if the engines fetch
        them."""
        return self.fleet.addresses(self.fleet.names)

    def lacking(self, version: int) -> tuple[str, ...]:
        """Return the addresses to which weights are sent of the engines that have not staged ``version``."""
        return self.fleet.addresses(self.fleet.lacking(version))

    def in_step(self) -> dict[str, str]:
        """Return the engines to which the learner may announce its next version directly, because they use the newest
        one: for each, the address at which it receives orders on this machine, and the address to which weights are
        sent to it. Engines on other machines are left out."""
        peers = [_engine(self._children[name].peer) for name in self.fleet.in_step()]
        return {peer.orders_address: peer.weights_address for peer in peers if peer.orders_address}

    async def _start_one(self, name: str) -> None:
        """Start the process of the engine ``name``, which has not loaded anything yet then."""
        child = self._children[name] = await self._start(name)
        child.peer.waits_while_halted = len(self._names) == 1 or not self._config.restarts

    async def _keep_running(self, name: str) -> None:
        """Wait until the engine ends, and start it again; repeat this until it is cancelled, or until a death ends the
        run."""
        outage: _Outage | None = None
        while True:
            child = self._children[name]
            cause = await self._run_until_death(child, outage)
            outage = self._record_death(child, cause, outage)
            child.close()
            self._kill_ordered[name].clear()
            await self._start_one(name)

    async def _run_until_death(self, child: Child, outage: _Outage | None) -> str:
        """Supervise one process of an engine until its end, and return why it ended. ``outage`` is the one that this
        process is to end; ``None`` at the first start."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(child.peer.listen()),
                group.create_task(self._serve_when_ready(child, outage)),
                group.create_task(self._kill_when_ordered(child)),
            ]
            if self._config.restarts:
                tasks.append(group.create_task(self._give_up_when_stopped(child)))
            cause = await child.died()
            await asyncio.sleep(LAST_MESSAGES_S)
            for task in tasks:
                task.cancel()
        return self._why.pop(child.role, "") or cause

    async def _serve_when_ready(self, child: Child, outage: _Outage | None) -> None:
        """Let the engine of a new process join the fleet when it is ready, then report each time it misses a version
        and serves again. ``outage`` is the one that this process is to end; ``None`` at the first start. An engine that
        is not ready in time ends the run at the first start, and is killed later."""
        limit_s = self._config.start_timeout_s
        await asyncio.wait([child.peer.ready], timeout=limit_s)
        if not child.peer.ready.done() and outage is None:
            halted = child.peer.halted and f"; it {child.peer.halted}"
            raise DeadlineError(
                f"{child.role} did not start within {limit_s:g} s{halted}",
                remedy="look at its log in the run directory; raise launch.start_timeout_s for a large model",
            )
        if not child.peer.ready.done():
            self._order_kill(child.role, f"{child.role} (pid {child.pid}) did not start within {limit_s:g} s")
            return
        engine = _engine(child.peer)
        self.fleet.join(child.role, engine, version=self._config.version, address=engine.weights_address)
        while True:
            why, since_s = await self.fleet.wait_until_settled(child.role), self._clock.now()
            if why:
                await asyncio.sleep(DEATH_KNOWN_S)  # a dead engine would be reported as one that lives
                why = await self.fleet.wait_until_settled(child.role)
            if why:
                outage = self._record_missed_version(child.role, why, since_s, outage)
                await self.fleet.wait_until_serving(child.role)
            if outage is not None:
                self._on_recovery(
                    Recovery(
                        part=child.role,
                        cause=outage.cause,
                        seconds=self._clock.now() - outage.since_s,
                        carried_over=outage.carried_over,
                    )
                )
                outage = None
            await self.fleet.wait_until_missed(child.role)

    def _record_missed_version(self, name: str, why: str, since_s: float, outage: _Outage | None) -> _Outage:
        """Report that new weights do not reach the engine ``name``, for the reason ``why``, since ``since_s``. Return
        ``outage``, if one had not ended yet, else a new one."""
        cause, load = f"{name} gets no new weights: {why}", self.fleet.load(name)
        self._on_recovery(Recovery(part=name, cause=cause, seconds=None, carried_over=load, lives=True))
        return outage or _Outage(cause=cause, since_s=since_s, carried_over=load)

    def _order_kill(self, name: str, why: str) -> None:
        """Let the task that supervises the engine ``name`` kill its process; ``why`` becomes the cause of its end."""
        self._why[name] = f"{why}: it was ended"
        self._kill_ordered[name].set()

    async def _kill_when_ordered(self, child: Child) -> None:
        """Wait until :meth:`_order_kill` is called for this engine, and kill its process."""
        await self._kill_ordered[child.role].wait()
        await child.kill()

    async def _give_up_when_stopped(self, child: Child) -> None:
        """Order the kill of an engine's process that has been stopped for ``silence_s`` while it owes an answer.

        Nothing else notices it: the fleet watches only engines that have sequences, and if a run has one engine only,
        the deadline of an answer does not run while the process is stopped.
        """
        stopped_s = 0.0
        while stopped_s < self._config.silence_s:
            # counted in ticks, so that time in which this machine was suspended does not count
            await asyncio.sleep(TICK_S)
            stopped_s = stopped_s + TICK_S if child.peer.halted and child.peer.awaits_answer else 0.0
        why = f"{child.role} (pid {child.pid}) {child.peer.halted}, and has owed an answer for {stopped_s:g} s"
        self._order_kill(child.role, why)

    def _record_death(self, child: Child, cause: str, outage: _Outage | None) -> _Outage:
        """Count the death of ``child`` against the budget of restarts, report it, and return the outage that begins, or
        the one before that goes on. Raises the error that ends the run if the engine is not to be started again."""
        carried_over, now_s = self.fleet.leave(child.role), self._clock.now()
        words = child.peer.reported_error
        accident = words is None and child.killed
        unready = outage is None and not child.peer.ready.done() and not accident
        if not self._config.restarts or unready or isinstance(words, EngineUnfit):
            raise words or ComponentDied(cause, remedy=REMEDY)
        # The deque holds as many deaths as the budget, so its first entry is the oldest that counts.
        if len(self._deaths) == self._config.restarts and now_s - self._deaths[0] < RESTART_WINDOW_S:
            problem = cause if words is None else words.problem
            minutes = RESTART_WINDOW_S / 60
            raise ComponentDied(
                f"{problem}\n  launch.engine_restarts={self._config.restarts} in {minutes:g} minutes are used up",
                remedy=REMEDY,
            )
        self._deaths.append(now_s)
        self.restarts[child.role] += 1
        brief = (cause if words is None else words.problem).partition("\n")[0]
        outage_now = _Outage(cause=brief, since_s=now_s, carried_over=carried_over)
        if outage is not None and outage.carried_over:
            outage_now.since_s, outage_now.carried_over = outage.since_s, outage.carried_over
        self._on_recovery(Recovery(part=child.role, cause=brief, seconds=None, carried_over=outage_now.carried_over))
        return outage_now


def _engine(peer: object) -> EngineClient:
    """Return the peer of an engine's process with its type: it is always an engine client."""
    assert isinstance(peer, EngineClient)
    return peer
