"""Scoring workers: processes that call the user's reward function, replaced when it hangs or kills them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace.base.clock import being_cancelled
from headrace.base.errors import EnvError
from headrace.base.types.messages.controller import Scored, Started
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.base.types.task import Task
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.rollout.scoring import NO_CONTEXT, Scores, ScoringContext

SUSPECTS = 16
"""Calls whose worker has died that are made again at the same time."""
METERED = 16
"""How often a worker's processor time is read, at most, in the time that a call may take."""
MAX_DEATHS = 8
"""Workers that may die one after the other while no call has begun there, and without a single score between them."""


class ScoringProcess(Protocol):
    """A scoring process."""

    peer: Peer

    async def computed_s(self) -> float:
        """Processor time that it has used, or waited for; 0 where nobody can tell any more."""
        ...

    async def halted(self) -> str:
        """What keeps it from going on, as in ``is stopped (SIGSTOP)``; empty where nothing does, or nobody can
        tell."""
        ...

    async def died(self) -> str:
        """Wait for its end; why, in words."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    def close(self) -> None:
        """Let go of it after its end; whoever still waits for an answer of it is cancelled."""
        ...


class _Meter:
    """Processor time of a worker. It is read once in ``every_s`` at most: reading costs as much as a short call."""

    def __init__(self, worker: ScoringProcess, every_s: float) -> None:
        self._worker, self._every_s = worker, every_s
        self._read_s, self._computed_s = -math.inf, 0.0

    async def recent_s(self, now_s: float) -> float:
        """What it was a moment ago."""
        if now_s - self._read_s >= self._every_s:
            self._read_s = now_s
            self._computed_s = await self.read_s()
        return self._computed_s

    async def read_s(self) -> float:
        """What it is now."""
        return await self._worker.computed_s()


@dataclass(slots=True, eq=False)
class _ScoringWorker:
    """One worker, from its start to its end."""

    worker: ScoringProcess
    meter: _Meter
    begun: int = 0
    """Calls whose turn has come and that have not returned."""
    waiting: int = 0
    """Calls whose turn has not come."""
    num_begun: int = 0
    """Calls whose turn has come since it started."""
    answered: bool = False
    """Whether any call ever returned: what one has left behind may end the worker later."""
    replaced: bool = False
    """Whether we ended it, because one of its calls did not return."""
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when, after ``replaced``, ``crowded`` is known."""
    crowded: bool = False
    """Whether it was computing all the while, so that any of its calls may have kept the others from returning."""
    frozen: bool = False
    """Whether it was ended because it was stopped from outside, or had not begun with a call for long: none of its
    calls is to blame."""


@dataclass(slots=True, eq=False)
class _ScoringSlot:
    """Where a worker stands; empty while it is replaced."""

    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a worker is to be kept here."""
    shift: _ScoringWorker | None = None
    load: int = 0

    @property
    def up(self) -> bool:
        return self.shift is not None and not self.shift.replaced


class _Lost(Enum):
    """Why a call came to nothing."""

    INNOCENT = auto()
    """Its worker was replaced for the sake of another call."""
    DIED = auto()
    """Its worker died: any of its calls may be the cause."""
    CROWDED = auto()
    """Its worker was replaced, and any of the calls that had begun there may be the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerPoolConfig:
    """On which scoring workers are kept."""

    num_workers: int
    concurrency: int
    """Calls at once in each."""
    timeout_s: float
    """Longest that a call may take from when it begins."""
    start_timeout_s: float
    """Longest that a worker may take to start."""


class ScorerPool:
    """Grades one component of the reward in worker processes.

    The time of a call runs from when its worker begins with it. One that has not returned by its deadline costs its own
    episode: its worker is killed and replaced, and the other calls that worker had are made again. Where it cannot be
    told which call kept the others from returning, or killed the worker, each is tried alone, in a worker of its own.
    """

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[ScoringProcess]],
        terms: ScorerPoolConfig,
        *,
        warn: Callable[[str], None],
    ) -> None:
        self.by_group = False
        self.wants: frozenset[str] = frozenset()
        self._warn = warn
        self._start_worker = start_worker
        self._terms = terms
        self._places = [_ScoringSlot() for _ in range(terms.num_workers)]
        for place in self._places:
            place.wanted.set()
        self._apart = _ScoringSlot()
        self._came = asyncio.Condition()
        self._all = asyncio.Semaphore(terms.num_workers * terms.concurrency)
        self._suspects = asyncio.Semaphore(SUSPECTS)
        self._alone = asyncio.Semaphore(1)
        self._deaths = 0

    def send_warnings_to(self, warn: Callable[[str], None]) -> None:
        """From now on, tell ``warn`` what people should know."""
        self._warn = warn

    async def run(self) -> None:
        """Keep every place filled; ends only by cancellation, or when workers die one after the other or do not start
        in time."""
        async with asyncio.TaskGroup() as group:
            for place in (*self._places, self._apart):
                group.create_task(self._keep(place))

    async def started(self) -> None:
        """Until every worker is there."""
        async with self._came:
            await self._came.wait_for(lambda: all(place.up for place in self._places))

    async def score(self, task: Task, completions: tuple[str, ...], context: ScoringContext = NO_CONTEXT) -> Scores:
        return await self._answer(self._request(task, completions, context))

    async def score_turn(
        self, task: Task, text: str, history: str, turn: int, *, context: ScoringContext = NO_CONTEXT
    ) -> Scores:
        """Score one turn of an episode, from its text and all that the model had read."""
        request = self._request(task, (text,), context)
        return await self._answer(msgspec.structs.replace(request, history=history, turn=turn))

    def _request(self, task: Task, completions: tuple[str, ...], context: ScoringContext) -> ScoreCompletions:
        request = ScoreCompletions(call=0, prompt=task.prompt, completions=completions, row=task.row)
        if "completion_ids" in self.wants:
            request = msgspec.structs.replace(request, completion_ids=context.completion_ids)
        return msgspec.structs.replace(request, trainer=context.trainer) if "trainer" in self.wants else request

    async def _answer(self, request: ScoreCompletions) -> Scores:
        async with self._all:
            outcome = await self._call(self._places, request)
        if outcome is _Lost.DIED:
            async with self._suspects:
                outcome = await self._call(self._places, request)
        if isinstance(outcome, _Lost):
            async with self._alone:
                self._apart.wanted.set()
                outcome = await self._call([self._apart], request)
        if isinstance(outcome, _Lost):
            return Scores(rewards=(), failure="reward_crashed: the process that computed it died, alone too")
        return outcome

    async def _call(self, places: list[_ScoringSlot], request: ScoreCompletions) -> Scores | _Lost:
        """One call, made again where its worker is replaced for another's sake."""
        while True:
            place = min(places, key=lambda place: (not place.up, place.load))
            if place.shift is None or not place.up:
                async with self._came:
                    await self._came.wait_for(lambda: any(place.up for place in places))
                continue
            place.load += 1
            try:
                outcome = await self._attempt(place.shift, request)
            finally:
                place.load -= 1
            if outcome is not _Lost.INNOCENT:
                return outcome

    async def _attempt(self, shift: _ScoringWorker, request: ScoreCompletions) -> Scores | _Lost:
        """One call of one worker."""
        peer = shift.worker.peer
        call = peer.next_call()
        begun, scored = peer.expect(call, Started), peer.expect(call, Scored)
        scored.add_done_callback(partial(_end, begun))
        try:
            peer.send(msgspec.structs.replace(request, call=call))
            shift.waiting += 1
            try:
                await begun
            finally:
                shift.waiting -= 1
            shift.begun, shift.num_begun = shift.begun + 1, shift.num_begun + 1
            try:  # most rewards come with the word that they were begun: no timer is made for them
                answer = scored.result() if scored.done() else await self._in_time(shift, scored)
            finally:
                shift.begun -= 1
        except TimeoutError:
            if shift.frozen:
                return _Lost.INNOCENT
            if shift.crowded:
                return _Lost.CROWDED
            return Scores(rewards=(), failure=f"reward_timeout: no reward for {self._terms.timeout_s:g} s")
        except asyncio.CancelledError:
            if not scored.cancelled() or being_cancelled():
                raise
            if shift.frozen:
                return _Lost.INNOCENT
            if not shift.replaced:
                return _Lost.DIED
            return _Lost.CROWDED if shift.crowded and not begun.cancelled() else _Lost.INNOCENT
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            return Scores(rewards=(), failure=f"reward_error: the row cannot travel: {error!a}")
        finally:
            begun.cancel()
            scored.cancel()
        self._deaths, shift.answered = 0, True
        return Scores(rewards=answer.rewards, failure=answer.error, metrics=answer.metrics, extra=answer.extra)

    async def _in_time(self, shift: _ScoringWorker, scored: asyncio.Future[Scored]) -> Scored:
        """The answer; where it does not come, the worker is ended and ``TimeoutError`` raised."""
        before_s = await shift.meter.recent_s(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self._terms.timeout_s):
                return await scored
        except TimeoutError:
            try:
                await self._judge(shift, before_s)
            finally:
                await shift.worker.kill()
            raise

    async def _watch(self, shift: _ScoringWorker) -> None:
        """End a worker that has calls waiting for their turn, none under way, and begins with none for as long as a
        call may take. That time is counted in looks: where this loop stood still itself, that is one look."""
        quiet_looks, num_begun = 0, 0
        while quiet_looks < METERED:
            await asyncio.sleep(self._terms.timeout_s / METERED)
            idle = shift.begun or not shift.waiting or shift.num_begun != num_begun
            quiet_looks, num_begun = 0 if idle else quiet_looks + 1, shift.num_begun
        if not shift.replaced:
            shift.frozen = True
            self._warn(
                f"a scoring worker has begun with no call for {self._terms.timeout_s:g} s ({shift.worker.peer.name} "
                f"{await shift.worker.halted() or 'does not answer'}): it is replaced, its calls are made again"
            )
            await shift.worker.kill()

    async def _judge(self, shift: _ScoringWorker, before_s: float) -> None:
        """A call has not returned: may another one be why? Told before the worker is ended, which alone knows."""
        if shift.replaced:
            await shift.judged.wait()
            return
        shift.replaced = True
        try:
            halted = await shift.worker.halted()
            shift.frozen = bool(halted)
            computed_s = await shift.meter.read_s() - before_s
            shift.crowded = shift.begun > 1 and computed_s > self._terms.timeout_s / 2
        finally:
            shift.judged.set()
        told = f"for {self._terms.timeout_s:g} s: its worker is replaced"
        if halted:
            told += f", and its calls are made again, for its process {halted}"
        self._warn(f"a reward has not returned {told}")

    async def _keep(self, place: _ScoringSlot) -> None:
        while True:
            await place.wanted.wait()
            worker = await self._start_worker()
            shift = _ScoringWorker(worker, _Meter(worker, self._terms.timeout_s / METERED))
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(worker.peer.listen())
                dying = group.create_task(worker.died())
                await self._arrival(place, shift, dying)
                watching = group.create_task(self._watch(shift))
                cause = await dying
                watching.cancel()
                if place is self._apart and place.up:  # else a call still waits for one
                    place.wanted.clear()
                place.shift = None
                listening.cancel()
            worker.close()
            if not shift.replaced:
                talked = isinstance(worker.peer, ForeignPeer) and bool(worker.peer.nonsense)
                self._count_death(worker.peer, cause, by_call=shift.begun > 0 or shift.answered or talked)

    async def _arrival(self, place: _ScoringSlot, shift: _ScoringWorker, dying: asyncio.Future[str]) -> None:
        """Until the worker is ready, and calls can be made in its place, or it has died."""
        peer = shift.worker.peer
        if await peer.arrives(dying, self._terms.start_timeout_s, "is the reward's file slow to import?"):
            facts = peer.ready.result().facts
            self.by_group, self.wants = bool(facts["by_group"]), frozenset(str(facts["wants"]).split())
            place.shift = shift
            async with self._came:
                self._came.notify_all()

    def _count_death(self, peer: Peer, cause: str, *, by_call: bool) -> None:
        if peer.last_words is not None:
            raise peer.last_words
        self._deaths += not by_call  # one of its calls may be to blame: each will be tried alone
        if self._deaths >= MAX_DEATHS:
            raise EnvError(
                f"{self._deaths} scoring workers died one after the other; the last: {cause}",
                remedy=f"the reward function kills its process: look at logs/{peer.name}.log in the run directory",
            )
        self._warn(f"a scoring worker died ({cause}); its calls are made again")


def _end(begun: asyncio.Future[Any], _: asyncio.Future[Any]) -> None:
    """What is done was begun, whether that was said or not."""
    if not begun.done():
        begun.set_result(None)
