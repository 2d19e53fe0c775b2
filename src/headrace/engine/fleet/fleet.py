"""Several engines as one, wherever they run: whoever holds the :class:`~headrace.engine.Engine` sees no difference.

    generate ──▶ router: which engine? ──▶ that engine's stream ──▶ chunks, under one name for good
                     ▲                          │ the engine dies, or is full
                     └──── from what was streamed ┘
    stage  ──▶ every engine that lacks the version, at once
    commit ──▶ k at a time, while the others serve; done when every engine that is there uses it
    join ──▶ it waits for the newest version, then serves            leave ──▶ its sequences find another place
    a version misses it ──▶ it ends what it has, and serves again when a later one reaches it

An engine is judged by its own requests: it dies, or it says nothing for too long while it has some. Whoever keeps the
processes tells of their coming and going, and is told whom to end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, DeadlineError, EngineFull, NeedsFull
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.sampling import Sampling
from headrace.base.types.taught import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.base import PLAIN, Engine, RequestOptions, TokenChunk
from headrace.engine.fleet.journey import MAX_FRUITLESS, RoutedRequest
from headrace.engine.fleet.member import TICK_S, Member, StickyRoutes
from headrace.engine.fleet.router import Router, SeatState
from headrace.engine.fleet.totals import combined, total

A = TypeVar("A")

GOES_ON = frozenset({Interrupt.INFLIGHT, Interrupt.STREAM})
"""Commits that do not stop generation: unless told otherwise all engines commit at once."""


class Fleet:
    """The :class:`~headrace.engine.Engine` contract over the engines that are there.

    ``size`` is how many there should be. ``rolling``: how many may commit at once; ``None``: one by one where the
    commit stops generation, all where it does not. ``end`` is told which engine to end, and why; without it, what is
    wrong with an engine is the caller's error.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        size: int = 1,
        rolling: int | None = None,
        end: Callable[[str, str], None] | None = None,
    ) -> None:
        self._clock, self._size, self._rolling, self._end = clock, size, rolling, end
        self._router = Router()
        self._members: dict[str, Member] = {}
        self._left: dict[str, int] = {}
        self._gone = EngineStats()
        self._numbers = itertools.count()
        self._homes = StickyRoutes()
        self._update: WeightUpdate | None = None
        self._paused: bool | None = None  # with release or without; None: it goes on
        self._changed = asyncio.Event()
        self.version = NOT_SAMPLED
        """The newest that every engine uses, but for those that it has missed."""

    # -- who is there -----------------------------------------------------------------------------------------------

    def join(self, name: str, engine: Engine, *, version: int = NOT_SAMPLED, address: str = "") -> None:
        """``engine`` is there, with the weights ``version``; without any it serves when it has got the newest, which
        may be sent to ``address``."""
        self._members[name] = Member(name=name, engine=engine, address=address, version=version, staged=version)
        self._router.join(name)
        if version != NOT_SAMPLED:
            self._router.use(name, version)
            self.version = max(self.version, version)
        self._ring()

    def leave(self, name: str) -> int:
        """It is gone; how many sequences it had. They go on elsewhere when its streams end with
        :class:`~headrace.base.errors.ComponentDied`."""
        member = self._members.get(name)
        if member is not None:
            self._drop(member)
        return self._left.pop(name, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Who is there, those without weights included."""
        return tuple(self._members)

    def addresses(self, names: Iterable[str]) -> tuple[str, ...]:
        """Where weights can be sent to; none where they are fetched."""
        return tuple(address for name in names if (address := self._members[name].address))

    async def serving(self, name: str) -> None:
        """Until it serves."""
        await self._until(lambda: self._serves(name))

    async def settled(self, name: str) -> str:
        """Until it serves, or the newest version does not reach it: why not; empty where it serves."""
        await self._until(lambda: self._serves(name) or self._misses(name))
        return self._members[name].missed

    async def unsettled(self, name: str) -> None:
        """Until a version does not reach it."""
        await self._until(lambda: self._misses(name))

    def load(self, name: str) -> int:
        """How many sequences it has."""
        return self._router.load(name)

    async def complete(self) -> None:
        """Until as many engines are there as should be."""
        await self._until(lambda: len(self._members) >= self._size)

    async def manned(self) -> None:
        """Until an engine is there that the newest version has not missed, or all are there."""
        members = self._members
        await self._until(lambda: len(members) >= self._size or not all(each.missed for each in members.values()))

    async def behind(self) -> None:
        """Until an engine is there that lacks the version that the others use, or that they used when they were there,
        and that it has not missed."""
        members = self._members
        await self._until(lambda: any(each.version < self.version and not each.missed for each in members.values()))

    def lacking(self, version: int) -> tuple[str, ...]:
        """The engines that have not brought ``version``, but for those that it has missed."""
        return tuple(each.name for each in self._members.values() if each.staged < version and not each.missed)

    def spare(self, version: int, why: str) -> bool:
        """Go on without the engines that lack ``version``, until a later one reaches them, if others have brought it;
        whether others have."""
        if not self._brought(version):
            return False
        for name in self.lacking(version):
            self._set_aside(self._members[name], why)
        return True

    async def watch(self, silence_s: float) -> None:
        """Have an engine ended that has sequences and says nothing for ``silence_s``; until cancelled.

        The time of a machine that stood still itself does not count.
        """
        while True:
            await asyncio.sleep(TICK_S)
            for member in list(self._members.values()):
                load = 0 if self._paused is not None else self._router.load(member.name)
                member.listen(load)
                if member.silent_s >= silence_s:
                    self._give_up(member, member.too_silent(load))

    def _give_up(self, member: Member, error: DeadlineError) -> None:
        if self._end is None:
            raise error
        if self._members.get(member.name) is member:  # not its successor
            self._drop(member)
            self._end(member.name, error.problem)

    def _drop(self, member: Member) -> None:
        if self._members.get(member.name) is not member:
            return
        del self._members[member.name]
        member.gone = True
        self._left[member.name] = len(self._router.leave(member.name))
        self._gone = total([member.engine.stats()], self._gone, version=NOT_SAMPLED, size=1)
        self._ring()

    def _serves(self, name: str) -> bool:
        return self._router.state(name) not in (None, SeatState.JOINING)

    def _misses(self, name: str) -> bool:
        return name in self._members and bool(self._members[name].missed)

    def _brought(self, version: int) -> bool:
        """Whether any engine has."""
        return any(member.staged >= version for member in self._members.values())

    def _set_aside(self, member: Member, why: str) -> None:
        member.missed = why
        self._router.set_aside(member.name)
        self._ring()

    def _ring(self) -> None:
        """Whoever waits looks again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, so: Callable[[], bool]) -> None:
        while not so():
            await self._changed.wait()

    # -- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        journey = RoutedRequest(
            number=next(self._numbers),
            prompt_ids_T=prompt_ids_T,
            sampling=sampling,
            options=options,
            arrived_s=self._clock.now(),
        )
        leg: Any = None
        try:
            while not journey.over:
                leg = self._leg(journey)
                async for chunk in leg:
                    yield chunk
        finally:
            if leg is not None:
                await leg.aclose()
            self._router.end(journey.number)

    async def _leg(self, journey: RoutedRequest) -> AsyncIterator[TokenChunk]:
        """What one engine makes of it: all of it, or until that engine is gone."""
        fork = journey.options.fork
        home, fork = (None, None) if fork is None else self._homes.of(fork)
        member = await self._place(journey, home)
        stream: Any = member.engine.generate(  # a generator, as all that follow the contract
            journey.prompt_ids_T, journey.sampling, journey.asked(self._clock.now(), fork)
        )
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    yield self._took(journey, member, chunk)
        except ComponentDied as death:
            self._drop(member)
            self._router.end(journey.number)
            journey.strand(death)
        except EngineFull:
            self._router.end(journey.number)
            journey.avoid.add(member.name)
            if home is not None or journey.avoid >= self._members.keys():
                raise

    def _took(self, journey: RoutedRequest, member: Member, chunk: TokenChunk) -> TokenChunk:
        self._homes.put(journey.number, member, chunk.request_id)
        passed_on = journey.took(chunk)
        if journey.over:
            self._router.end(journey.number)  # its reader may take its time
        return passed_on

    async def _place(self, journey: RoutedRequest, home: Member | None = None) -> Member:
        wish = journey.wish("" if home is None else home.name, alone=len(self._members) == 1)
        while (name := self._router.place(journey.number, wish, journey.avoid)) is None:
            if self._router.serves and not journey.avoid:
                raise journey.refused()
            journey.avoid.clear()
            await self._changed.wait()
        return self._members[name]

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        return await self._scored(lambda engine: engine.score(tokens, temperature=temperature))

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        return await self._scored(lambda one: one.top_scores(tokens, num, below=below, temperature=temperature))

    async def _scored(self, score: Callable[[Engine], Awaitable[A]]) -> A:
        """What one engine says; another, where it dies of it."""
        for left in itertools.count(MAX_FRUITLESS - 1, -1):
            number = next(self._numbers)
            while (name := self._router.place(number)) is None:
                await self._changed.wait()
            member = self._members[name]
            try:
                return await score(member.engine)
            except ComponentDied:
                self._drop(member)
                if not left:
                    raise
            finally:
                self._router.end(number)
        raise AssertionError("the last death is raised")

    # -- weights ----------------------------------------------------------------------------------------------------

    async def stage(self, update: WeightUpdate) -> float:
        """Every engine that lacks it brings it; where none is there, it waits for one.

        :class:`~headrace.base.errors.NeedsFull` where one needs it sent again; those that have it keep it.
        """
        self._expect(update)
        start_s = self._clock.now()
        while self.lacking(update.version) or not self._brought(update.version):
            await self._until(lambda: bool(self.lacking(update.version)))
            lacking = [self._members[name] for name in self.lacking(update.version)]
            for refusal in await self._all(self._stage(member, update) for member in lacking):
                if refusal is not None:
                    raise refusal
        return self._clock.now() - start_s

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Every engine that has it staged uses it, some at a time; where all of those have ended, others bring it
        first."""
        done: list[SwapReport] = []
        if mode is Interrupt.SLEEP:  # which wakes each of them
            self._paused = None
        while True:
            able = [member for member in self._members.values() if member.version < version == member.staged]
            gate = asyncio.Semaphore(self._at_once(mode))
            reports = await self._all(self._commit(member, version, mode, gate) for member in able)
            done += [report for report in reports if report is not None]
            if any(member.version == version for member in self._members.values()):
                break
            assert self._update is not None
            await self.stage(self._update)
        if mode is Interrupt.SLEEP:
            await self._all(self._stand_still(each, None) for each in self._members.values() if each.missed)
        self.version = version
        self._ring()
        return combined(version, mode, done)

    async def pause(self, *, release: bool = False) -> None:
        self._paused = release
        await self._all(self._stand_still(each, release) for each in self._members.values())

    async def resume(self) -> None:
        self._paused = None
        await self._all(self._stand_still(each, None) for each in self._members.values())

    def stats(self) -> EngineStats:
        here = (member.engine.stats() for member in self._members.values())
        return total(here, self._gone, version=self.version, size=self._size)

    def _expect(self, update: WeightUpdate) -> None:
        """A version that is new may reach those that the one before has missed."""
        is_new = self._update is None or self._update.version < update.version
        self._update = update
        for member in self._members.values():
            member.missed = "" if is_new else member.missed
            if why := update.missed.get(member.address):
                self._set_aside(member, why)

    def _at_once(self, mode: Interrupt) -> int:
        if self._rolling is not None:
            return self._rolling
        return max(1, len(self._members)) if mode in GOES_ON else 1

    async def _all(self, work: Iterable[Awaitable[A]]) -> list[A]:
        """The results, when all have come; the first error then."""
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    @contextmanager
    def _outlived(self, member: Member) -> Iterator[None]:
        """Within this its end, or its silence, is that of one engine: the others go on."""
        try:
            yield
        except ComponentDied:
            self._drop(member)
        except DeadlineError as late:
            self._give_up(member, late)

    async def _stand_still(self, member: Member, release: bool | None) -> None:
        with self._outlived(member):
            await (member.engine.resume() if release is None else member.engine.pause(release=release))

    async def _stage(self, member: Member, update: WeightUpdate) -> NeedsFull | None:
        with self._outlived(member):
            try:
                await member.engine.stage(update)
            except NeedsFull as refusal:
                words = refusal.problem if self._size == 1 else f"{member.name}: {refusal.problem}"
                return NeedsFull(words, remedy=refusal.remedy)
            member.staged = update.version
        return None

    async def _commit(
        self, member: Member, version: int, mode: Interrupt, gate: asyncio.Semaphore
    ) -> SwapReport | None:
        async with gate:
            if self._members.get(member.name) is not member:
                return None
            self._router.hold(member.name)
            report = None
            try:
                with self._outlived(member):
                    report = await member.engine.commit(version, mode)
                if report is not None and self._paused is not None:
                    await self._stand_still(member, self._paused)
            finally:
                self._router.release(member.name)
        if report is None:
            return None
        member.version = version
        if self._members.get(member.name) is member:
            self._router.use(member.name, version)
            self._ring()
        return report
