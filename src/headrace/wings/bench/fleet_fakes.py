"""Engines without a model for the fleet benchmark, which sample one token per sequence in a fixed time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from headrace.base.errors import ComponentDied
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, Manifest, SwapReport, WeightUpdate
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.engine.fleet import Fleet

TOKEN_S = 0.01
"""Seconds for one token of a sequence, unless an engine says otherwise."""


@dataclass(slots=True, kw_only=True)
class CountingEngine:
    """An engine without a model, which samples zeros in a fixed time and counts them. It runs up to ``places``
    sequences at once; further ones wait. It has the methods of :class:`~headrace.engine.Engine` that a fleet calls."""

    name: str
    flush: int
    """Number of tokens of a chunk."""
    places: int = 1 << 30
    """Largest number of sequences that run at once."""
    token_s: float = TOKEN_S
    """Seconds for one token of each sequence, however many run."""
    commit_s: float = 0.0
    """Seconds for which a commit stops the engine."""
    on_request: Callable[[int], None] = lambda _: None
    """Called with the seed of every request as soon as it arrives."""
    sampled: int = 0
    """Number of sampled tokens, including those lost when the engine was killed."""
    version: int = NOT_SAMPLED
    """Version of the weights in use; -1 before the first commit."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to kill the engine: running requests then fail."""
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Make the places for running sequences, and let the engine run."""
        self._slots = asyncio.Semaphore(self.places)
        self._resumed.set()

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Yield an answer of ``sampling.max_new_tokens`` tokens in chunks of ``flush`` tokens, as fast as ``token_s``
        allows. An answer that another engine had begun (``options.answer_ids_T``) is continued."""
        self.on_request(sampling.seed)
        done, total = 0 if options.answer_ids_T is None else len(options.answer_ids_T), sampling.max_new_tokens
        async with self._slots:
            while done < total:
                size = min(self.flush, total - done)
                await self._compute(size)
                done += size
                yield TokenChunk(
                    tokens=_tokens(self.version, size), stop_reason=StopReason.LENGTH if done == total else None
                )

    async def _compute(self, size: int) -> None:
        """Wait as long as ``size`` tokens of a sequence take, and count them. Raises
        :class:`~headrace.base.errors.ComponentDied` if the engine is killed meanwhile; the tokens until then are
        counted."""
        await self._resumed.wait()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            async with asyncio.timeout(size * self.token_s):
                await self.dead.wait()
        except TimeoutError:
            self.sampled += size
            return
        self.sampled += int((loop.time() - start_s) / self.token_s)
        raise ComponentDied(f"{self.name} was killed", remedy="another goes on")

    async def stage(self, update: WeightUpdate) -> float:
        """Return 0 seconds: there are no weights to fetch."""
        return 0.0

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Use ``version`` after ``commit_s`` seconds, during which no token is sampled. Return the report of the
        commit, with that time as its gap."""
        self._resumed.clear()
        await asyncio.sleep(self.commit_s)
        self._resumed.set()
        self.version = version
        return SwapReport(version=version, gap_s=self.commit_s, carried_over=0, restarted=0, mode=mode)

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the recorded logprobs: there is no model that could score the tokens."""
        return tokens.logprobs_T

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return ``num`` made-up entries for each token: there is no model that could score the tokens."""
        ids_TK = np.zeros((len(tokens), num), np.int32)
        return TopScores(logprobs_T=tokens.logprobs_T, ids_TK=ids_TK, logs_TK=ids_TK.astype(np.float32))

    async def pause(self, *, release: bool = False) -> None:
        """Sample no token until :meth:`resume`."""
        self._resumed.clear()

    async def resume(self) -> None:
        """Sample again after :meth:`pause`."""
        self._resumed.set()

    def stats(self) -> EngineStats:
        """Return the version in use and the number of sampled tokens."""
        return EngineStats(version=self.version, generated_tokens=self.sampled)


def _tokens(version: int, size: int) -> Tokens:
    """Return ``size`` tokens with id 0 and logprob 0, sampled by weights of ``version``."""
    return Tokens(
        ids_T=np.zeros(size, np.int32),
        logprobs_T=np.zeros(size, np.float32),
        versions_T=np.full(size, version, np.int32),
    )


async def commit_weights(fleet: Fleet, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
    """Stage and commit weights of ``version``, which hold no tensors, on all engines of the fleet. ``mode`` says what
    becomes of running sequences."""
    await fleet.stage(
        WeightUpdate(version=version, slot=0, path="", manifest=Manifest(entries=(), total_bytes=0), checksums=())
    )
    await fleet.commit(version, mode)
