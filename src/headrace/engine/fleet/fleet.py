"""Several engines behind the :class:`~headrace.engine.Engine` contract, on this machine or on others.

    generate ──▶ router: which engine? ──▶ that engine's stream ──▶ chunks, under one request number
                     ▲                          │ the engine dies, or is full
                     └── continue after the tokens ┘
    stage  ──▶ every engine that lacks the version, at once
    commit ──▶ on some engines at a time (``rolling``), while the others serve; done when every engine that is present
               uses it
    add ──▶ the engine waits for the newest version, then serves      remove ──▶ its sequences move to other engines
    retire ──▶ the engine ends the sequences that it has, and gets no new ones, until it leaves
    an engine misses a version ──▶ it ends its sequences, and serves again when a later version reaches it

An engine is removed when its process has died, or when it is silent for too long while it has requests. The launcher,
which owns the processes, calls ``add`` and ``remove`` when engines come and go, and ends an engine on request. An
engine *lacks* a version that it has not staged yet, and *misses* one that cannot reach it at all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, DeadlineError, EngineFull, NeedsFull, RequestError
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import PLAIN, RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import NO_TOKENS, FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.base import EndEngine, Engine, OnSiblingChunks, SiblingRequest
from headrace.engine.fleet.member import TICK_S, FleetCounters, Member, StickyRoutes, combine_reports, gather_all
from headrace.engine.fleet.routed import MAX_DEATHS_WITHOUT_TOKEN, RoutedRequest
from headrace.engine.fleet.router import EngineState, Router

A = TypeVar("A")


class Fleet:
    """An :class:`~headrace.engine.Engine` over all engines that are present, its members. The controller generates
    and distributes weights through it as if there were one engine.

    ``size`` is the intended number of engines. ``rolling`` is how many may commit at once; ``None``: one by one where
    the commit stops generation, all where it does not. ``end`` is called with the name of an engine to end, the
    reason and the remedy; without it, the failure of an engine is raised to the caller.
    """

    def __init__(
        self, clock: Clock, *, size: int = 1, rolling: int | None = None, end: EndEngine | None = None
    ) -> None:
        """Make a fleet without members; engines are added by :meth:`add`. The arguments are described at the class."""
        self._clock, self._rolling, self._end = clock, rolling, end
        self._router = Router()
        self._members: dict[str, Member] = {}
        self._lost_sequences: dict[str, int] = {}
        """The number of sequences that each removed engine had, by its name, until :meth:`remove` returns it."""
        self._counters = FleetCounters(size)
        self._numbers = itertools.count()
        self._routes = StickyRoutes()
        self._update: WeightUpdate | None = None
        """The newest update of the weights, which late engines get; ``None`` before the first."""
        self._paused: bool | None = None
        """The argument ``release`` of the pause that is in effect; ``None`` if the fleet is not paused."""
        self._changed = asyncio.Event()
        """The event that is set, and replaced by a new one, whenever an engine or its state has changed."""
        self._on_member: Callable[[str], None] = lambda _: None
        self._mirrored = False
        """Whether other processes send requests to the engines, too, so that their load is read from their counters."""
        self.version = NOT_SAMPLED
        """The newest version that all engines use, except engines that have missed it."""

    # -- membership -------------------------------------------------------------------------------------------------

    def add(self, name: str, engine: Engine, *, version: int = NOT_SAMPLED, address: str = "") -> None:
        """Add ``engine`` under ``name``. It uses the weights ``version`` already, or has none (``NOT_SAMPLED``) and
        gets requests once it has the newest version. ``address`` is where weights are sent to it; empty where the
        engine fetches them."""
        self._members[name] = Member(name=name, engine=engine, address=address, version=version, staged_version=version)
        self._router.add(name)
        if version != NOT_SAMPLED:
            self._router.use(name, version)
            self.version = max(self.version, version)
        self._on_member(name)
        self._notify()

    def follow(self, on_member: Callable[[str], None]) -> None:
        """Call ``on_member`` from now on with the name of an engine whenever the engine has joined, has left, or its
        state (:meth:`get_state`) has changed. The caller updates copies of this fleet in other processes."""
        self._on_member, self._mirrored = on_member, True

    def get_state(self, name: str) -> tuple[EngineState, int, bool] | None:
        """Return the state of the engine ``name``, the version that it uses, and whether it is paused; ``None`` if it
        is absent."""
        state = self._router.state(name)
        return None if state is None else (state, self._members[name].version, self._paused is not None)

    def mirror(self, name: str, state: EngineState, version: int, *, paused: bool) -> None:
        """Copy to the engine ``name`` the state that it has in another fleet, which commits versions to it and may
        pause it (``paused``). Nothing happens if the engine is absent."""
        member = self._members.get(name)
        if member is None:
            return
        self._paused = False if paused else None
        member.version, member.leaving = version, state is EngineState.LEAVING
        self.version = max(self.version, version)
        if not state.takes_sequences:
            self._router.set_aside(name)
        else:
            self._router.use(name, version)
            (self._router.hold if state is EngineState.HELD else self._router.release)(name)
        self._notify()

    def retire(self, name: str) -> None:
        """Give the engine ``name``, which is about to be removed, no new requests; nothing happens if it is absent. It
        ends those that it has, and commits new weights meanwhile, as long as it is present."""
        if name in self._members:
            self._members[name].leaving = True
            self._router.retire(name)
            self._on_member(name)

    def resize(self, size: int) -> None:
        """Change the intended number of engines to ``size``."""
        self._counters.resize(size, (member.engine.stats() for member in self._members.values()))
        self._notify()

    def remove(self, name: str) -> int:
        """Remove an engine whose process has ended, and return how many sequences it had; 0 for an unknown name. The
        sequences continue on other engines once its streams have ended with
        :class:`~headrace.base.errors.ComponentDied`."""
        member = self._members.get(name)
        if member is not None:
            self._drop(member)
        return self._lost_sequences.pop(name, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the engines that are present, including those without weights."""
        return tuple(self._members)

    def addresses(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the addresses to which the weights of the engines ``names`` are sent. Engines that fetch their weights
        have no address and are left out."""
        return tuple(address for name in names if (address := self._members[name].address))

    async def wait_until_serving(self, name: str) -> None:
        """Wait until the engine ``name`` has weights and accepts requests."""
        await self._wait_until(lambda: self.serves(name))

    async def wait_until_settled(self, name: str) -> str:
        """Wait until the engine ``name`` accepts requests, or has missed the newest version. Return the reason why it
        missed the version; empty if it serves."""
        await self._wait_until(lambda: self.serves(name) or bool(self.miss_reason(name)))
        return self.miss_reason(name)

    async def wait_until_missed(self, name: str) -> None:
        """Wait until the engine ``name`` has missed a version, which could not reach it."""
        await self._wait_until(lambda: bool(self.miss_reason(name)))

    def load(self, name: str) -> int:
        """Return the number of sequences that the engine ``name`` serves now. With requests of other processes, it is
        at least the number that the engine has reported."""
        load = self._router.load(name)
        if not self._mirrored or name not in self._members:
            return load
        stats = self._members[name].engine.stats()
        return max(load, stats.running + stats.waiting)

    async def wait_until_complete(self) -> None:
        """Wait until as many engines have joined as the fleet is intended to have (``size``)."""
        await self._wait_until(lambda: len(self._members) >= self._counters.size)

    async def wait_for_any(self) -> None:
        """Wait until an engine is present that has not missed the newest version, or until all engines are present."""
        await self._wait_until(lambda: len(self._members) >= self._counters.size or bool(self._reached()))

    async def wait_for_lagging(self) -> None:
        """Wait until an engine is present that lacks the version in use and has not missed it."""
        await self._wait_until(lambda: any(each.version < self.version for each in self._reached()))

    def engines_without(self, version: int) -> tuple[str, ...]:
        """Return the names of the engines that have not staged ``version`` and have not missed it."""
        return tuple(each.name for each in self._reached() if each.staged_version < version)

    def engines_in_step(self) -> tuple[str, ...]:
        """Return the names of the engines that use the newest version, where the next one may be staged at any time."""
        return tuple(each.name for each in self._reached() if each.version == self.version)

    def _reached(self) -> list[Member]:
        """Return the members that have not missed the newest version."""
        return [each for each in self._members.values() if not each.missed_reason]

    def commits_when_staged(self, mode: Interrupt) -> bool:
        """Return whether each engine may commit a version in ``mode`` as soon as it has staged it, without an order
        from the controller: there is one engine, or all may commit at once without stopping generation. It is false for
        ``Interrupt.SLEEP``, because the commit wakes engines that sleep, and the controller decides when."""
        alone = self._counters.size == 1
        return mode is not Interrupt.SLEEP and (alone or (self._rolling is None and not mode.stops_generation))

    def drop_lagging(self, version: int, why: str) -> bool:
        """Mark the engines that lack ``version`` as having missed it for the reason ``why``, if another engine has
        staged it. Return whether another engine has."""
        if not self._is_staged_anywhere(version):
            return False
        for name in self.engines_without(version):
            self._mark_missed(self._members[name], why)
        return True

    async def watch(self, silence_s: float) -> None:
        """End every engine that has sequences and has sent no new statistics for ``silence_s`` seconds; runs until
        cancelled. Time is counted in ticks of this loop, so that time in which this machine stood still does not
        count."""
        while True:
            await asyncio.sleep(TICK_S)
            for member in list(self._members.values()):
                load = 0 if self._paused is not None else self.load(member.name)
                member.check_silence(load)
                if member.silent_s >= silence_s:
                    self._remove_silent(member, member.silence_error(load))

    def _remove_silent(self, member: Member, error: DeadlineError) -> None:
        """Remove an engine that has been silent for too long, and let the launcher end its process, with the texts
        of ``error``. Without a launcher (``end`` is ``None``), raise ``error``."""
        if self._end is None:
            raise error
        if self._members.get(member.name) is member:  # and not a successor of the same name
            self._drop(member)
            self._end(member.name, error.problem, error.remedy)

    def _drop(self, member: Member) -> None:
        """Remove a member that has died: no more requests are routed to it, and its counters stay in the fleet's
        statistics. Nothing happens if it has been removed before, even if a successor has its name."""
        if self._members.get(member.name) is not member:
            return
        lost = self.load(member.name)
        del self._members[member.name]
        self._router.remove(member.name)
        member.has_left = True
        self._lost_sequences[member.name] = lost
        self._counters.record_departure(member.engine.stats())
        self._on_member(member.name)
        self._notify()

    def serves(self, name: str) -> bool:
        """Return whether the engine ``name`` is present and has weights, so that it accepts requests."""
        return self._router.takes_sequences(name)

    def miss_reason(self, name: str) -> str:
        """Return why the newest version cannot reach the engine ``name``; empty if it can or the engine is absent."""
        return self._members[name].missed_reason if name in self._members else ""

    def _is_staged_anywhere(self, version: int) -> bool:
        """Return whether any engine has staged ``version``."""
        return any(member.staged_version >= version for member in self._members.values())

    def _mark_missed(self, member: Member, why: str) -> None:
        """Record why the newest version cannot reach ``member``, which gets no new requests before a later version."""
        member.missed_reason = why
        self._router.set_aside(member.name)
        self._on_member(member.name)
        self._notify()

    def _notify(self) -> None:
        """Let every task in :meth:`_wait_until` check its condition again, because something in the fleet has
        changed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` is true; it is checked now and after every change in the fleet (:meth:`_notify`)."""
        while not condition():
            await self._changed.wait()

    # -- requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample an answer to ``prompt_ids_T`` on one of the engines, as :meth:`headrace.engine.Engine.generate` does.
        If the engine dies, another one continues; the caller gets one uninterrupted answer."""
        async with aclosing(self._stream(self._new_request(prompt_ids_T, sampling, options))) as stream:
            async for chunk in stream:
                yield chunk

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        """Sample several answers to the prompt ``prompt_ids_T``, and pass their chunks to ``on_chunks``; see
        :class:`~headrace.engine.SiblingSource`. The siblings that are routed to one engine are sent to it in one call.
        If the engine dies, its siblings continue one by one on other engines."""
        routed = [self._new_request(prompt_ids_T, sampling, options) for sampling, options in siblings]
        try:
            parts: dict[Member, list[int]] = {}
            for index, each in enumerate(routed):
                parts.setdefault(await self._assign(each), []).append(index)
            if len(parts) == 1:
                await self._siblings_on(next(iter(parts)), dict(enumerate(routed)), on_chunks)
                return
            async with asyncio.TaskGroup() as group:
                for member, places in parts.items():
                    part = {index: routed[index] for index in places}
                    group.create_task(self._siblings_on(member, part, on_chunks))
        finally:
            for each in routed:
                self._router.end(each.number)

    async def _siblings_on(self, member: Member, routed: dict[int, RoutedRequest], on_chunks: OnSiblingChunks) -> None:
        """Sample the siblings ``routed``, given by their indices, on their engine ``member``, for ``on_chunks``. If it
        cannot sample siblings together, is full or dies, the unfinished siblings are sampled one by one."""
        places = list(routed)

        async def pass_on(arrived: Sequence[tuple[int, TokenChunk]]) -> None:
            """Record the chunks ``arrived`` of the engine, and pass them on with the indices of the caller. A request
            that the engine refused because it is full is not reported: it is sent to another engine later."""
            passed_on = []
            for at, chunk in arrived:
                index = places[at]
                if chunk.error_kind == EngineFull.__name__:
                    routed[index].avoid.add(member.name)
                else:
                    passed_on.append((index, self._on_chunk(routed[index], member, chunk)))
            await on_chunks(passed_on)

        death: ComponentDied | None = None
        if member.siblings is not None:
            prompt_ids_T = routed[places[0]].prompt_ids_T
            requests = [SiblingRequest(each.sampling, each.options) for each in routed.values()]
            try:
                await member.siblings.generate_siblings(prompt_ids_T, requests, pass_on)
            except ComponentDied as error:
                self._drop(member)
                death = error
            except EngineFull:
                pass  # sent one by one, some may fit, on this engine or another
        left = {index: each for index, each in routed.items() if not each.ended}
        if left:
            async with asyncio.TaskGroup() as group:
                for index, each in left.items():
                    alone = self._sibling_alone(index, each, on_chunks, death, removed=member.leaving)
                    group.create_task(alone)

    async def _sibling_alone(
        self,
        index: int,
        routed: RoutedRequest,
        on_chunks: OnSiblingChunks,
        death: ComponentDied | None,
        *,
        removed: bool,
    ) -> None:
        """Sample the sibling ``index``, the request ``routed``, to its end by a call of its own, and pass its chunks to
        ``on_chunks``. ``death`` is the error of the engine that served it before and died or was ``removed``; ``None``
        if no engine did. An error of the request becomes its last chunk."""
        self._router.end(routed.number)
        try:
            if death is not None:
                routed.on_engine_death(death, removed=removed)
            async with aclosing(self._stream(routed)) as stream:
                async for chunk in stream:
                    await on_chunks([(index, chunk)])
        except RequestError as error:
            await on_chunks([(index, TokenChunk(request_id=routed.number, tokens=NO_TOKENS).with_error(error))])

    def _new_request(self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions) -> RoutedRequest:
        """Return the record of a new request, which is not assigned to an engine yet."""
        return RoutedRequest(
            number=next(self._numbers),
            prompt_ids_T=prompt_ids_T,
            sampling=sampling,
            options=options,
            arrived_s=self._clock.now(),
        )

    async def _stream(self, routed: RoutedRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of the request to its end. If its engine dies, another engine continues it."""
        part: Any = None
        try:
            while not routed.ended:
                part = self._stream_from_one(routed)
                async for chunk in part:
                    yield chunk
        finally:
            if part is not None:
                await part.aclose()
            self._router.end(routed.number)

    async def _stream_from_one(self, routed: RoutedRequest) -> AsyncIterator[TokenChunk]:
        """Yield the chunks that one engine returns for the request ``routed``, until the request ends or the engine
        dies. If it dies or is full, the request is prepared for another engine, and the caller tries again. Raises
        :class:`~headrace.base.errors.EngineFull` if every engine that could serve the request is full."""
        fork = routed.options.fork
        parent_engine, fork = (None, None) if fork is None else self._routes.find_parent(fork)
        member = await self._assign(routed, parent_engine)
        stream: Any = member.engine.generate(  # the contract requires an async generator
            routed.prompt_ids_T, routed.sampling, routed.next_options(self._clock.now(), fork)
        )
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    yield self._on_chunk(routed, member, chunk)
        except ComponentDied as death:
            self._drop(member)
            self._router.end(routed.number)
            routed.on_engine_death(death, removed=member.leaving)
        except EngineFull:
            self._router.end(routed.number)
            routed.avoid.add(member.name)
            if parent_engine is not None or routed.avoid >= self._members.keys():
                raise

    def _on_chunk(self, routed: RoutedRequest, member: Member, chunk: TokenChunk) -> TokenChunk:
        """Record a chunk that ``member`` sent for a request, and return the chunk that the caller of the fleet
        receives. When the request has ended, the router is notified."""
        self._routes.record(routed.number, member, chunk.request_id)
        passed_on = routed.on_chunk(chunk)
        if routed.ended:
            self._router.end(routed.number)  # at once: the reader may consume the last chunk late
        return passed_on

    async def _assign(self, routed: RoutedRequest, parent_engine: Member | None = None) -> Member:
        """Wait for an engine that can serve the request ``routed``, assign the request to it, and return it.
        ``parent_engine`` is the only engine that can serve a fork; ``None`` for other requests. If only engines are
        left that the request avoids, because they refused it as full, it avoids them no more. Raises
        :class:`~headrace.base.errors.SequenceFailed` for a request that is bound to weights or to an engine that no
        serving engine has any more."""
        # hashing a long prompt is slow, and the engine of the request's session has its prefix in the cache anyway
        by_prefix = len(self._members) > 1 and not self._router.has_session(routed.options.session)
        route = routed.route_request("" if parent_engine is None else parent_engine.name, by_prefix=by_prefix)
        while (name := self._router.assign(routed.number, route, routed.avoid)) is None:
            if self._router.has_serving_engine and not routed.avoid:
                raise routed.pinned_error()
            routed.avoid.clear()
            await self._changed.wait()
        return self._members[name]

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the logprob of each of ``tokens`` at ``temperature`` under the weights in use, computed by one of the
        engines; 0 for the first token."""
        return await self._score_on_any(lambda engine: engine.score(tokens, temperature=temperature))

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the logprobs of ``tokens`` at ``temperature`` and the ``num`` likeliest entries with ids below
        ``below`` (0: all) at each position, computed by one of the engines."""
        return await self._score_on_any(lambda one: one.top_scores(tokens, num, below=below, temperature=temperature))

    async def _score_on_any(self, score: Callable[[Engine], Awaitable[A]]) -> A:
        """Call ``score`` on one engine and return its result. If the engine dies, try another, up to
        ``MAX_DEATHS_WITHOUT_TOKEN`` engines in all; the last death is raised."""
        for left in itertools.count(MAX_DEATHS_WITHOUT_TOKEN - 1, -1):
            number = next(self._numbers)
            while (name := self._router.assign(number)) is None:
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
        """Stage ``update`` on every engine that lacks it, and return the seconds that it took. If no engine is present,
        wait for one. Raises :class:`~headrace.base.errors.NeedsFull` if an engine needs a full update; engines that
        have staged this one keep it."""
        self._set_newest(update)
        start_s = self._clock.now()
        while self.engines_without(update.version) or not self._is_staged_anywhere(update.version):
            await self._wait_until(lambda: bool(self.engines_without(update.version)))
            lacking = [self._members[name] for name in self.engines_without(update.version)]
            for refusal in await gather_all(self._stage_on(member, update) for member in lacking):
                if refusal is not None:
                    raise refusal
        return self._clock.now() - start_s

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Commit ``version`` in the mode ``mode`` on every engine that has staged it, some at a time, and return one
        report for all. If all engines that had staged it have died, stage it on other engines first."""
        done: list[SwapReport] = []
        if mode is Interrupt.SLEEP:  # this commit wakes each engine
            self._set_paused(None)
        while True:
            able = [member for member in self._members.values() if member.version < version == member.staged_version]
            gate = asyncio.Semaphore(self._max_parallel_commits(mode))
            reports = await gather_all(self._commit_on(member, version, mode, gate) for member in able)
            done += [report for report in reports if report is not None]
            if any(member.version == version for member in self._members.values()):
                break
            assert self._update is not None
            await self.stage(self._update)
        if mode is Interrupt.SLEEP:
            await gather_all(self._pause_or_resume(each, None) for each in self._members.values() if each.missed_reason)
        self.version = version
        self._notify()
        return combine_reports(version, mode, done)

    async def pause(self, *, release: bool = False) -> None:
        """Stop all engines between two steps; with ``release``, they free the memory of their caches. Engines that join
        later are paused as well."""
        self._set_paused(release)
        await gather_all(self._pause_or_resume(each, release) for each in self._members.values())

    async def resume(self) -> None:
        """Let all engines continue after :meth:`pause`."""
        self._set_paused(None)
        await gather_all(self._pause_or_resume(each, None) for each in self._members.values())

    def stats(self) -> EngineStats:
        """Return the counters of all engines together, including engines that have left."""
        here = (member.engine.stats() for member in self._members.values())
        return self._counters.total(here, self.version)

    def _set_newest(self, update: WeightUpdate) -> None:
        """Record ``update`` as the newest version. A later version may reach an engine that missed the version before,
        so only the engines named in ``update.missed_by`` count as having missed this one."""
        is_new = self._update is None or self._update.version < update.version
        self._update = update
        for member in self._members.values():
            member.missed_reason = "" if is_new else member.missed_reason
            if why := update.missed_by.get(member.address):
                self._mark_missed(member, why)

    def _set_paused(self, paused: bool | None) -> None:
        """Record that the engines are paused, with (true) or without (false) the memory of their caches released;
        ``None``: they are resumed."""
        self._paused = paused
        for name in self._members:
            self._on_member(name)

    def _max_parallel_commits(self, mode: Interrupt) -> int:
        """Return how many engines may commit at the same time in ``mode``: as many as ``rolling`` sets; unset, all if
        the mode does not stop generation, else one."""
        if self._rolling is not None:
            return self._rolling
        return 1 if mode.stops_generation else max(1, len(self._members))

    @contextmanager
    def _tolerating_loss(self, member: Member) -> Iterator[None]:
        """Return a context in which the death or the silence of ``member`` removes the engine from the fleet and raises
        no error."""
        try:
            yield
        except ComponentDied:
            self._drop(member)
        except DeadlineError as late:
            self._remove_silent(member, late)

    async def _pause_or_resume(self, member: Member, release: bool | None) -> None:
        """Pause an engine, which frees its memory if ``release`` is true; or resume it if ``release`` is ``None``. An
        engine that dies meanwhile is removed without an error."""
        with self._tolerating_loss(member):
            await (member.engine.resume() if release is None else member.engine.pause(release=release))

    async def _stage_on(self, member: Member, update: WeightUpdate) -> NeedsFull | None:
        """Stage ``update`` on one engine. Return the refusal of an engine that needs the whole version instead of a
        difference; ``None`` if the version is staged or the engine was lost."""
        with self._tolerating_loss(member):
            try:
                await member.engine.stage(update)
            except NeedsFull as refusal:
                words = refusal.problem if self._counters.size == 1 else f"{member.name}: {refusal.problem}"
                return NeedsFull(words, remedy=refusal.remedy)
            member.staged_version = update.version
        return None

    async def _commit_on(
        self, member: Member, version: int, mode: Interrupt, gate: asyncio.Semaphore
    ) -> SwapReport | None:
        """Commit ``version`` in the mode ``mode`` on the engine ``member``, which gets no new requests meanwhile.
        Return its report, or ``None`` if the engine was lost. ``gate`` limits how many engines commit at once."""
        async with gate:
            if self._members.get(member.name) is not member:
                return None
            self._router.hold(member.name)
            self._on_member(member.name)
            report = None
            try:
                with self._tolerating_loss(member):
                    report = await member.engine.commit(version, mode)
                if report is not None and self._paused is not None:
                    await self._pause_or_resume(member, self._paused)
            finally:
                self._router.release(member.name)
                self._on_member(member.name)
        if report is None:
            return None
        member.version = version
        if self._members.get(member.name) is member:
            self._router.use(member.name, version)
            self._on_member(member.name)
            self._notify()
        return report
