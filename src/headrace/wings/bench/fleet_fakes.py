"""Engines that only count, for the fleet's benchmark: so many sequences at once, a token of each every so often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from headrace.base.errors import ComponentDied
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.sampling import Sampling
from headrace.base.types.taught import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, Manifest, SwapReport, WeightUpdate
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.engine.fleet import Fleet

TOKEN_S = 0.01


@dataclass(slots=True, kw_only=True)
class Counting:
    """An engine without a model, in which every sequence is one of ``places`` or waits for one."""

    name: str
    flush: int
    """Tokens of a chunk."""
    places: int = 1 << 30
    token_s: float = TOKEN_S
    commit_s: float = 0.0
    """How long a commit stops it."""
    asked: Callable[[int], None] = lambda _: None
    """Hears the seed of every request, at once."""
    made: int = 0
    """Tokens, those that died with it included."""
    version: int = NOT_SAMPLED
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    _going: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.places)
        self._going.set()

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self.asked(sampling.seed)
        done, total = 0 if options.answer_ids_T is None else len(options.answer_ids_T), sampling.max_new_tokens
        async with self._room:
            while done < total:
                size = min(self.flush, total - done)
                await self._compute(size)
                done += size
                yield TokenChunk(
                    tokens=_tokens(self.version, size), stop_reason=StopReason.LENGTH if done == total else None
                )

    async def _compute(self, size: int) -> None:
        await self._going.wait()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            async with asyncio.timeout(size * self.token_s):
                await self.dead.wait()
        except TimeoutError:
            self.made += size
            return
        self.made += int((loop.time() - start_s) / self.token_s)
        raise ComponentDied(f"{self.name} was killed", remedy="another goes on")

    async def stage(self, update: WeightUpdate) -> float:
        return 0.0

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        self._going.clear()
        await asyncio.sleep(self.commit_s)
        self._going.set()
        self.version = version
        return SwapReport(version=version, gap_s=self.commit_s, carried_over=0, restarted=0, mode=mode)

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        return tokens.logprobs_T

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        ids_TK = np.zeros((len(tokens), num), np.int32)
        return TopScores(logprobs_T=tokens.logprobs_T, ids_TK=ids_TK, logs_TK=ids_TK.astype(np.float32))

    async def pause(self, *, release: bool = False) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    def stats(self) -> EngineStats:
        return EngineStats(version=self.version, generated_tokens=self.made)


def _tokens(version: int, size: int) -> Tokens:
    return Tokens(
        ids_T=np.zeros(size, np.int32),
        logprobs_T=np.zeros(size, np.float32),
        versions_T=np.full(size, version, np.int32),
    )


async def bring(fleet: Fleet, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
    """The weights that they count under."""
    await fleet.stage(
        WeightUpdate(version=version, slot=0, path="", manifest=Manifest(entries=(), total_bytes=0), checksums=())
    )
    await fleet.commit(version, mode)
