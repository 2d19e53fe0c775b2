"""The contracts of an engine.

An engine has two contracts. :class:`EngineCore` is the machine itself: a synchronous step loop drives it, in a process
or thread of its own. :class:`Engine` is the asynchronous interface that the rest of the system uses, wherever the core
runs.

A version is *staged* while decoding continues and *committed* between two steps, so that every forward pass uses one
version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import PLAIN, GenerateRequest, RequestOptions, ScoreTokens
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate


class TokenSource(Protocol):
    """An object that generates tokens for a prompt."""

    def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample one sequence. Chunks arrive while it grows, and the last one has a stop reason.

        Requests that are made in one iteration of the event loop join the batch together, in that order. Leaving the
        iterator early withdraws the request. Raises :class:`~headrace.base.errors.RequestError` for a request that
        cannot be served.
        """
        ...


class Engine(TokenSource, Protocol):
    """An engine as the rollouts see it."""

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the logprob of each token but the first, computed by one prefill with the weights in use. Kept-sets
        and routing that the tokens carry are applied."""
        ...

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the logprobs of the tokens, and at each position the ``num`` most likely entries. Only entries with
        ids below ``below`` are considered (0: all)."""
        ...

    async def stage(self, update: WeightUpdate) -> float:
        """Bring ``update`` next to the engine and verify its checksums while decoding continues. Return the seconds
        that it took.

        Raises :class:`~headrace.base.errors.WeightsError` if the update does not fit the model, is corrupt or is older
        than the weights in use; nothing has changed then.
        """
        ...

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Use the staged ``version``. ``mode`` decides when it comes into use and what happens to the running
        sequences."""
        ...

    async def pause(self, *, release: bool = False) -> None:
        """Stop after the present step; with ``release``, also free the memory of the key-value cache."""
        ...

    async def resume(self) -> None:
        """Continue after :meth:`pause`."""
        ...

    def stats(self) -> EngineStats:
        """Return the latest counters."""
        ...


class EngineSet(Protocol):
    """A changing set of engines behind one :class:`Engine`, as the code that distributes weights sees it.

    An engine *misses* a version if the version cannot reach it. It gets no new requests until it receives a later one.
    """

    async def wait_for_any(self) -> None:
        """Wait until an engine is present that has not missed the newest version, with weights or without, or until all
        engines are present."""
        ...

    def drop_lagging(self, version: int, why: str) -> bool:
        """Mark the engines that lack ``version`` as having missed it, if at least one other engine has staged it.
        Return whether one has; if not, nothing changes."""
        ...

    async def wait_for_lagging(self) -> None:
        """Wait until an engine is present that lacks the version committed last. The caller then stages and commits
        that version once more, which does not affect the other engines."""
        ...


class EngineCore(Protocol):
    """The machine behind an engine.

    It is not thread-safe, except for :meth:`stage`. Only :meth:`step`, :meth:`score` and :meth:`top_scores` may block.
    """

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises :class:`~headrace.base.errors.RequestError` if it can never be served, or if the
        queue is full."""
        ...

    def abort(self, request_ids: Sequence[int]) -> list[TokenChunk]:
        """Withdraw requests and return their last chunks, which hold the tokens that were sampled and not yet returned.
        Unknown ids are ignored, since a request may just have ended."""
        ...

    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        ...

    def step(self) -> list[TokenChunk]:
        """Schedule, run one forward pass, sample, and return the chunks that are due: one for each sequence that has
        ended, and one for each that has at least ``engine.flush_tokens`` tokens that were not returned yet."""
        ...

    def score(self, request: ScoreTokens) -> FloatColumn:
        """Return the logprobs of given tokens, by one prefill between two steps."""
        ...

    def top_scores(self, request: ScoreTokens) -> TopScores:
        """Return the logprobs of given tokens and the most likely entries at each position, as many as the request
        sets."""
        ...

    def stage(self, update: WeightUpdate) -> None:
        """Verify an update. May run in another thread while :meth:`step` runs."""
        ...

    def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
        """Begin to use a staged version; called between two steps. :meth:`take_swaps` returns its report, at once or,
        where ``mode`` lets sequences finish first, after a later step."""
        ...

    def take_swaps(self) -> list[SwapReport]:
        """Return the reports of the commits completed since the last call, in their order."""
        ...

    def pause(self, *, release: bool = False) -> None:
        """Stop working until :meth:`resume`, or until a commit with ``Interrupt.SLEEP``."""
        ...

    def resume(self) -> None:
        """Start working again."""
        ...

    def stats(self) -> EngineStats:
        """Return the counters since the start."""
        ...
