"""The engines of a run: started, watched, and started again when one dies, as often as the budget allows.

    start ──▶ loading ──ready──▶ joins the fleet ──the newest weights──▶ serves
      ▲                                                                     │ it dies; it is silent: it is killed
      └─────────── within launch.engine_restarts ───────────────────────────┘ beyond: the run ends, resumable

The sequences of a dead engine go on elsewhere, or wait for it, and the learner notices nothing. A first start that
fails with a word is no accident: it ends the run with what the engine said. One that a signal has ended meanwhile said
nothing, and is started again as later. One that lives, and that new weights do not reach, is left alone: it ends its
sequences, and serves again when a later version has reached it.
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
from headrace.launch.child import Child
from headrace.launch.clients import EngineClient

WITHIN_S = 600.0
"""In which time the budget of restarts counts."""
AFTERGLOW_S = 0.05
"""What a process said last may still be on its way when it is known to be dead."""
SURE_S = 3.0
"""By then it is known of an engine that was not reached whether it is dead."""
REMEDY = "mend the cause, then --resume: nothing that was finished is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """On which engines are kept."""

    rolling: int | None
    """How many may commit at once; ``None``: as the commit needs it."""
    restarts: int
    """How many may be started again within :data:`WITHIN_S`; 0: the first death ends the run."""
    start_timeout_s: float
    """Longest that one may take to be ready."""
    silence_s: float
    """Longest that one with sequences may say nothing."""
    version: int = NOT_SAMPLED
    """The weights that an engine has when it is ready."""


@dataclass(slots=True, kw_only=True)
class _Absence:
    """From the death of an engine, or from a version that missed it, until it serves again."""

    cause: str
    since_s: float
    carried_over: int


def engine_names(count: int) -> tuple[str, ...]:
    """What the engines of a run are called.

    >>> engine_names(1), engine_names(2)
    (('engine',), ('engine-0', 'engine-1'))
    """
    return ("engine",) if count == 1 else tuple(f"engine-{place}" for place in range(count))


class Engines:
    """The processes behind a :class:`~headrace.engine.fleet.Fleet`."""

    def __init__(
        self, start: Callable[[str], Awaitable[Child]], names: Sequence[str], terms: EngineTerms, clock: Clock
    ) -> None:
        self._start, self._names, self._terms, self._clock = start, tuple(names), terms, clock
        self._children: dict[str, Child] = {}
        self._condemned = {name: asyncio.Event() for name in names}
        self._why: dict[str, str] = {}
        self._deaths: deque[float] = deque(maxlen=terms.restarts or None)
        self.restarts = Counter[str]()
        """How often each was started again."""
        self._tell: Callable[[Recovery], None] = lambda _: None
        end = self._condemn if terms.restarts else None
        self.fleet = Fleet(clock, size=len(self._names), rolling=terms.rolling, end=end)

    def send_recoveries_to(self, tell: Callable[[Recovery], None]) -> None:
        """From now on, ``tell`` hears of every death that does not end the run, and of every engine that new weights do
        not reach; and again when it serves."""
        self._tell = tell

    async def start(self) -> None:
        """Start them all; they have not loaded anything yet when this returns."""
        for name in self._names:
            self._children[name] = await self._start(name)

    async def run(self) -> None:
        """Keep them; ends only by cancellation, or with :class:`~headrace.base.errors.HeadraceError` where one is lost
        for
        good."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._keep(name))
            if self._terms.restarts:
                group.create_task(self.fleet.watch(self._terms.silence_s))

    def addresses(self) -> tuple[str, ...]:
        """Where a learner can send weights to, of those that are there; none where they fetch them."""
        return self.fleet.addresses(self.fleet.names)

    def lacking(self, version: int) -> tuple[str, ...]:
        """The same, of those that have not brought ``version``."""
        return self.fleet.addresses(self.fleet.lacking(version))

    async def _keep(self, name: str) -> None:
        absence: _Absence | None = None
        while True:
            child = self._children[name]
            cause = await self._life(child, absence)
            absence = self._mourn(child, cause, absence)
            child.close()
            self._condemned[name].clear()
            self._children[name] = await self._start(name)

    async def _life(self, child: Child, absence: _Absence | None) -> str:
        """From its start to its end; why it ended, in words."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(child.peer.listen()),
                group.create_task(self._arrive(child, absence)),
                group.create_task(self._kill_if_condemned(child)),
            ]
            cause = await child.died()
            await asyncio.sleep(AFTERGLOW_S)
            for task in tasks:
                task.cancel()
        return self._why.pop(child.role, "") or cause

    async def _arrive(self, child: Child, absence: _Absence | None) -> None:
        limit_s = self._terms.start_timeout_s
        await asyncio.wait([child.peer.ready], timeout=limit_s)
        if not child.peer.ready.done() and absence is None:
            halted = child.peer.halted and f"; it {child.peer.halted}"
            raise DeadlineError(
                f"{child.role} did not start within {limit_s:g} s{halted}",
                remedy="look at its log in the run directory; raise launch.start_timeout_s for a large model",
            )
        if not child.peer.ready.done():
            self._condemn(child.role, f"{child.role} (pid {child.pid}) did not start within {limit_s:g} s")
            return
        engine = _engine(child.peer)
        self.fleet.join(child.role, engine, version=self._terms.version, address=engine.weights_address)
        while True:
            why, since_s = await self.fleet.settled(child.role), self._clock.now()
            if why:
                await asyncio.sleep(SURE_S)  # one that has died would be told of as one that lives
                why = await self.fleet.settled(child.role)
            if why:
                absence = self._miss(child.role, why, since_s, absence)
                await self.fleet.serving(child.role)
            if absence is not None:
                self._tell(
                    Recovery(
                        part=child.role,
                        cause=absence.cause,
                        seconds=self._clock.now() - absence.since_s,
                        carried_over=absence.carried_over,
                    )
                )
                absence = None
            await self.fleet.unsettled(child.role)

    def _miss(self, name: str, why: str, since_s: float, absence: _Absence | None) -> _Absence:
        """New weights do not reach it; ``absence``: nor did it serve before."""
        cause, load = f"{name} gets no new weights: {why}", self.fleet.load(name)
        self._tell(Recovery(part=name, cause=cause, seconds=None, carried_over=load, lives=True))
        return absence or _Absence(cause=cause, since_s=since_s, carried_over=load)

    def _condemn(self, name: str, why: str) -> None:
        self._why[name] = f"{why}: it was ended"
        self._condemned[name].set()

    async def _kill_if_condemned(self, child: Child) -> None:
        await self._condemned[child.role].wait()
        await child.kill()

    def _mourn(self, child: Child, cause: str, absence: _Absence | None) -> _Absence:
        """Raises where it is not to be started again."""
        carried_over, now_s = self.fleet.leave(child.role), self._clock.now()
        words = child.peer.last_words
        accident = words is None and child.killed
        unready = absence is None and not child.peer.ready.done() and not accident
        if not self._terms.restarts or unready or isinstance(words, EngineUnfit):
            raise words or ComponentDied(cause, remedy=REMEDY)
        if len(self._deaths) == self._terms.restarts and now_s - self._deaths[0] < WITHIN_S:
            problem = cause if words is None else words.problem
            raise ComponentDied(
                f"{problem}\n  launch.engine_restarts={self._terms.restarts} in {WITHIN_S / 60:g} minutes are used up",
                remedy=REMEDY,
            )
        self._deaths.append(now_s)
        self.restarts[child.role] += 1
        brief = (cause if words is None else words.problem).partition("\n")[0]
        gone = _Absence(cause=brief, since_s=now_s, carried_over=carried_over)
        if absence is not None and absence.carried_over:
            gone.since_s, gone.carried_over = absence.since_s, absence.carried_over
        self._tell(Recovery(part=child.role, cause=brief, seconds=None, carried_over=gone.carried_over))
        return gone


def _engine(peer: object) -> EngineClient:
    assert isinstance(peer, EngineClient)
    return peer
