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
"""The default time for one token of a sequence, in seconds."""


@dataclass(slots=True, kw_only=True)
class CountingEngine:
    """An engine without a model, which samples zeros in a fixed time and counts them. It runs up to ``num_slots``
    sequences at once; further sequences wait. It has the methods of :class:`~headrace.engine.Engine` that a fleet
    calls."""

    name: str
    flush: int
    """The number of tokens of a chunk."""
    num_slots: int = 1 << 30
    """The largest number of sequences that run at once."""
    token_s: float = TOKEN_S
    """The time for one token of each sequence, in seconds, whatever the number of running sequences."""
    commit_s: float = 0.0
    """The time for which a commit stops the engine, in seconds."""
    on_request: Callable[[int], None] = lambda _: None
    """The callback for each request, called with its seed as soon as the request arrives."""
    num_sampled: int = 0
    """The number of sampled tokens, including tokens that were lost when the engine was killed."""
    version: int = NOT_SAMPLED
    """The version of the weights in use; -1 before the first commit."""
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that kills the engine when it is set: running requests then fail."""
    _resumed: asyncio.Event = field(default_factory=asyncio.Event)
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        """Create the semaphore of the ``num_slots`` slots for running sequences, and let the engine run."""
        self._slots = asyncio.Semaphore(self.num_slots)
        self._resumed.set()

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Yield an answer to ``prompt_ids_T`` of ``sampling.max_new_tokens`` tokens, in chunks of ``flush`` tokens, at
        the speed that ``token_s`` defines. An answer of which another engine has sampled the first tokens
        (``options.answer_ids_T``) is continued."""
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
        """Wait for the time of ``size`` tokens of a sequence, and count these tokens. Raises
        :class:`~headrace.base.errors.ComponentDied` if the engine is killed during this time; the tokens until then are
        counted."""
        await self._resumed.wait()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            async with asyncio.timeout(size * self.token_s):
                await self.dead.wait()
        except TimeoutError:
            self.num_sampled += size
            return
        self.num_sampled += int((loop.time() - start_s) / self.token_s)
        raise ComponentDied(f"{self.name} was killed", remedy="another goes on")

    async def stage(self, update: WeightUpdate) -> float:
        """Return 0 seconds, since ``update`` has no weights to load."""
        return 0.0

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Stop sampling for ``commit_s`` seconds, and then use ``version``. Return the report of the commit, with this
        time as its gap and the given ``mode``."""
        self._resumed.clear()
        await asyncio.sleep(self.commit_s)
        self._resumed.set()
        self.version = version
        return SwapReport(version=version, gap_s=self.commit_s, carried_over=0, restarted=0, mode=mode)

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the recorded logprobs of ``tokens``, since there is no model that could score them at
        ``temperature``."""
        return tokens.logprobs_T

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the recorded log-probability of each token, and zeros as its ``num`` most probable tokens, since there
        is no model that could score them. ``below`` and ``temperature`` are ignored."""
        ids_TK = np.zeros((len(tokens), num), np.int32)
        return TopScores(logprobs_T=tokens.logprobs_T, ids_TK=ids_TK, logs_TK=ids_TK.astype(np.float32))

    async def pause(self, *, release: bool = False) -> None:
        """Stop sampling until :meth:`resume` is called. ``release`` is ignored."""
        self._resumed.clear()

    async def resume(self) -> None:
        """Continue sampling after :meth:`pause`."""
        self._resumed.set()

    def stats(self) -> EngineStats:
        """Return the version in use and the number of sampled tokens."""
        return EngineStats(version=self.version, generated_tokens=self.num_sampled)


def _tokens(version: int, size: int) -> Tokens:
    """Return ``size`` tokens with id 0 and logprob 0, sampled by weights of ``version``."""
    return Tokens(
        ids_T=np.zeros(size, np.int32),
        logprobs_T=np.zeros(size, np.float32),
        versions_T=np.full(size, version, np.int32),
    )


async def commit_weights(fleet: Fleet, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
    """Stage and commit weights of ``version``, which contain no tensors, on all engines of the fleet. ``mode`` selects
    what happens to running sequences."""
    await fleet.stage(
        WeightUpdate(version=version, slot=0, path="", manifest=Manifest(entries=(), total_bytes=0), checksums=())
    )
    await fleet.commit(version, mode)
