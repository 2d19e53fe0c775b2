"""What an engine is.

Two faces of one thing. :class:`EngineCore` is the machine: a plain synchronous step loop drives it, in its own process
or thread. :class:`Engine` is what the rest of the system holds: asynchronous, wherever the core may run.

A version is *staged* while decoding goes on and *committed* between two steps, so that a forward pass sees one version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import Chunk, EngineStats
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens
from headrace.base.types.recorded import Routing
from headrace.base.types.sampling import Sampling
from headrace.base.types.taught import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one sequence, in the order sampled."""

    tokens: Tokens
    stop_reason: StopReason | None = None
    """Set on the last chunk only."""
    request_id: int = -1
    """Names the sequence for a later :class:`~headrace.base.types.messages.engine.ForkRequest`."""
    prompt_routing: Routing | None = None
    """The experts of the prompt's tokens, on the first chunk, if asked for."""
    restarted: bool = False
    """The sequence has begun again: forget its tokens before this chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What may be said of a request beyond its prompt and its sampling."""

    priority: int = 0
    """Higher ones join first and are preempted last."""
    deadline_s: float | None = None
    """Seconds after which it ends with what it has."""
    fork: ForkRequest | None = None
    """Continue another sequence; the prompt is empty then."""
    pinned: bool = False
    """Stay under the weights it begins with."""
    answer_ids_T: IntColumn | None = None
    """What it has sampled before, in this engine or another, and its reader has: it goes on behind that, with the
    draws, penalties and limits it would have had. ``None``: it begins."""
    session: str = ""
    """Names requests that belong together: of several engines, the one that served the last of them gets the next."""
    agent: str = ""
    """Whose adapter samples it, of several in training (``model.lora.agents``); empty: the policy's."""


PLAIN = RequestOptions()


class TokenSource(Protocol):
    """What answers."""

    def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample one sequence; chunks arrive while it grows, the last one has a stop reason.

        Requests made in one turn of the event loop join the batch together, in that order. Leaving the iterator early
        withdraws the request. Raises :class:`~headrace.base.errors.RequestError` for a request that cannot be served.
        """
        ...


class Engine(TokenSource, Protocol):
    """An engine as the rollouts see it."""

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """The logprob of each token but the first under the weights in use, by one prefill; under the tokens' own
        kept-sets and routing where they have them."""
        ...

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """The same, with the ``num`` likeliest entries in the place of each token, of those with ids ``below`` that (0:
        of all)."""
        ...

    async def stage(self, update: WeightUpdate) -> float:
        """Bring ``update`` next to the engine and verify its checksums, while decoding goes on; seconds it took.

        Raises :class:`~headrace.base.errors.WeightsError` if it does not fit, is corrupt or is older than the weights
        in use; nothing has changed then.
        """
        ...

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Use the staged ``version``; ``mode`` says from when on, and what becomes of the running sequences."""
        ...

    async def pause(self, *, release: bool = False) -> None:
        """Stand still after the present step; with ``release`` the cache's memory is given back."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    def stats(self) -> EngineStats:
        """The latest counters."""
        ...


class EngineSet(Protocol):
    """Engines that come and go behind one :class:`Engine`: what those who bring weights have to know of them."""

    async def manned(self) -> None:
        """Until an engine is there, with weights or without, that the newest version has not missed; or until all are
        there: those that are not come soon, or the run ends."""
        ...

    def spare(self, version: int, why: str) -> bool:
        """Go on without the engines that lack ``version``, until a later one reaches them, if others have brought it;
        whether others have."""
        ...

    async def behind(self) -> None:
        """Until an engine is there that lacks the version that was committed last: it wants to be staged and committed
        once more, which leaves the others as they are."""
        ...


class EngineCore(Protocol):
    """The machine behind an engine: not thread-safe but for :meth:`stage`, never blocking but for :meth:`step`,
    :meth:`score` and :meth:`top_scores`."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises :class:`~headrace.base.errors.RequestError` if it can never be served, or if the
        queue is
        full."""
        ...

    def abort(self, request_ids: Sequence[int]) -> list[Chunk]:
        """Withdraw requests; their last chunks hold what was sampled and not yet returned. Unknown ids are ignored:
        they have just ended."""
        ...

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> list[Chunk]:
        """Schedule, run one forward pass, sample; return the chunks that are due."""
        ...

    def score(self, request: ScoreTokens) -> FloatColumn:
        """One prefill between two steps."""
        ...

    def top_scores(self, request: ScoreTokens) -> TopScores:
        """The same, with the likeliest entries that are asked for."""
        ...

    def stage(self, update: WeightUpdate) -> None:
        """Verify an update; may run in another thread while :meth:`step` runs."""
        ...

    def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
        """Begin to use a staged version; called between two steps. Its report comes from :meth:`take_swaps`, at once
        or, where ``mode`` lets sequences finish first, after a later step."""
        ...

    def take_swaps(self) -> list[SwapReport]:
        """The commits that have been completed since the last call, in their order."""
        ...

    def pause(self, *, release: bool = False) -> None:
        """Have no work until :meth:`resume`, or until a commit with ``Interrupt.SLEEP``."""
        ...

    def resume(self) -> None:
        """Have work again."""
        ...

    def stats(self) -> EngineStats:
        """Counters since the start."""
        ...
