"""Fake engines that die, stand still or are full, and whose tokens say which place of which sequence they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import ComponentDied, EngineFull, NeedsFull
from headrace.base.types.episode import StopReason
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import NO_TOKENS, IntColumn, Tokens
from headrace.base.types.weights import Interrupt, Manifest, SwapReport, WeightUpdate
from headrace.engine import PLAIN, RequestOptions, SiblingRequest, TokenChunk
from headrace.engine.base import OnSiblingChunks
from headrace.engine.fleet import Fleet
from headrace.testing import FakeEngine

PROMPT = np.array([1, 2, 3], np.int32)
FLUSH = 8
"""Tokens of a chunk."""
TOKEN_S = 0.01


def expected(seed: int, count: int) -> list[int]:
    """The answer of that seed."""
    return [(seed * 7919 + place) % 50_021 for place in range(count)]


def update(version: int, *, base: int | None = None, missed_by: str = "") -> WeightUpdate:
    """``missed_by``: the engine that it does not reach."""
    return WeightUpdate(
        version=version,
        slot=version % 2,
        path="",
        manifest=Manifest(entries=(), total_bytes=0),
        checksums=(version,),
        base=base,
        missed_by={missed_by: f"version {version} could not be uploaded to {missed_by}"} if missed_by else {},
    )


class Mortal(FakeEngine):
    """Dies on demand: whoever waits for it hears of it, as of a process."""

    def __init__(
        self,
        name: str = "engine",
        *,
        pace: float = 1.0,
        room: int = 10**9,
        commit_s: float = 0.0,
        length: Callable[[int], int] = lambda _: 10**9,
    ) -> None:
        super().__init__(token_s=TOKEN_S, length=length)
        self.name = name
        self.pace = pace
        self.room = room
        self.commit_s = commit_s
        self.dead = asyncio.Event()
        self.made = 0
        """Tokens, those that nobody got included."""
        self.asked: list[RequestOptions] = []
        self.running = 0
        self.committing = False
        self.staged: list[int] = []

    def die(self) -> None:
        self.dead.set()

    def _death(self) -> ComponentDied:
        return ComponentDied(f"{self.name} was killed by SIGKILL", remedy="look at its log")

    async def _pass(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.dead.wait()
        except TimeoutError:
            return
        raise self._death()

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        if self.dead.is_set():
            raise self._death()
        self.asked.append(options)
        if self.running >= self.room:
            raise EngineFull(f"{self.name} is full", remedy="later")
        request_id, self.running = len(self.asked) - 1, self.running + 1
        answer = expected(sampling.seed, min(self._length(sampling.seed), sampling.max_new_tokens))
        done = 0 if options.answer_ids_T is None else len(options.answer_ids_T)
        assert options.answer_ids_T is None or options.answer_ids_T.tolist() == answer[:done]
        try:
            while done < len(answer):
                size = min(FLUSH, len(answer) - done)
                version = self.stats().version
                assert version >= 0, "it has no weights"
                await self._pass(size * TOKEN_S * self.pace)
                done += size
                self.made += size
                self._count(generated_tokens=size, steps=size)
                tokens = Tokens(
                    ids_T=np.array(answer[done - size : done], np.int32),
                    logprobs_T=np.full(size, -1.0, np.float32),
                    versions_T=np.full(size, version, np.int32),
                )
                stop = StopReason.LENGTH if done == len(answer) else None
                yield TokenChunk(tokens=tokens, stop_reason=stop, request_id=request_id)
        finally:
            self.running -= 1

    async def stage(self, update: WeightUpdate) -> float:
        await self._pass(TOKEN_S)
        if update.base is not None and update.base != self.stats().version:
            raise NeedsFull(f"version {update.version} is a difference from {update.base}", remedy="send it whole")
        seconds = await super().stage(update)
        self.staged.append(update.version)
        return seconds

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        self.committing = True
        await self._pass(self.commit_s)
        self.committing = False
        return await super().commit(version, mode)


class TogetherMortal(Mortal):
    """Samples siblings in one call; a request that finds no room ends with the chunk of a full engine."""

    num_calls = 0

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        if self.dead.is_set():
            raise self._death()
        self.num_calls += 1

        async def one(index: int, sibling: SiblingRequest) -> None:
            try:
                async for chunk in self.generate(prompt_ids_T, sibling.sampling, sibling.options):
                    await on_chunks([(index, chunk)])
            except EngineFull as error:
                await on_chunks([(index, TokenChunk(tokens=NO_TOKENS).with_error(error))])

        try:
            async with asyncio.TaskGroup() as group:
                for index, sibling in enumerate(siblings):
                    group.create_task(one(index, sibling))
        except* ComponentDied as deaths:
            raise deaths.exceptions[0] from None


async def sample_siblings(fleet: Fleet, seeds: Sequence[int], count: int = 40, session: str = "") -> None:
    """All answers of a group, each of which must be that of its seed, and end once."""
    parts: list[list[TokenChunk]] = [[] for _ in seeds]

    async def take(arrived: Sequence[tuple[int, TokenChunk]]) -> None:
        for index, chunk in arrived:
            chunk.raise_error()
            parts[index].append(chunk)

    requests = [
        SiblingRequest(Sampling(max_new_tokens=count, seed=seed), RequestOptions(session=session)) for seed in seeds
    ]
    await fleet.generate_siblings(PROMPT, requests, take)
    for seed, chunks in zip(seeds, parts, strict=True):
        assert Tokens.concat([chunk.tokens for chunk in chunks]).ids_T.tolist() == expected(seed, count)
        assert [chunk.ended for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert len({chunk.request_id for chunk in chunks}) == 1


def make_fleet(*names: str, kind: type[Mortal] = Mortal, **settings: Any) -> tuple[Fleet, dict[str, Any]]:
    fleet, engines = Fleet(VirtualClock(), size=len(names), **settings), {name: kind(name) for name in names}
    for name, engine in engines.items():
        fleet.add(name, engine, address=name)
    return fleet, engines


async def bring(fleet: Fleet, version: int, mode: Interrupt = Interrupt.INFLIGHT, *, missed_by: str = "") -> None:
    await fleet.stage(update(version, missed_by=missed_by))
    await fleet.commit(version, mode)


async def sample(fleet: Fleet, seed: int, count: int = 40, options: RequestOptions = PLAIN) -> list[TokenChunk]:
    """All chunks of one answer, which must be that of its seed."""
    sampling = Sampling(max_new_tokens=count, seed=seed)
    prompt = np.zeros(0, np.int32) if options.fork is not None else PROMPT
    chunks = [chunk async for chunk in fleet.generate(prompt, sampling, options)]
    before = 0 if options.answer_ids_T is None else len(options.answer_ids_T)
    tokens = Tokens.concat([chunk.tokens for chunk in chunks])
    assert tokens.ids_T.tolist() == expected(seed, count)[before:], "each token once, in its place"
    assert [chunk.stop_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert len({chunk.request_id for chunk in chunks}) == 1
    return chunks


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(**given: Any) -> None:
        run_virtual(test(**given))

    run.__doc__ = test.__doc__
    run.__name__ = test.__name__
    return run


def kill(fleet: Fleet, engine: Mortal) -> int:
    engine.die()
    return fleet.remove(engine.name)
