"""What an engine is.

Two faces of one thing. :class:`EngineCore` is the machine: a plain synchronous step loop drives it, in its own process
or thread. :class:`Engine` is what the rest of the system holds: asynchronous, wherever the core may run.

A version is *staged* while decoding goes on and *committed* between two steps, so that a forward pass sees one version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.types.episode import StopReason
from headrace.types.messages.controller import Chunk, EngineStats
from headrace.types.messages.engine import GenerateRequest
from headrace.types.sampling import Sampling
from headrace.types.tokens import IntColumn, Tokens
from headrace.types.weights import SwapReport, WeightUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of one sequence, in the order sampled."""

    tokens: Tokens
    stop_reason: StopReason | None = None
    """Set on the last chunk only."""


class Engine(Protocol):
    """An engine as the rollouts see it."""

    def generate(self, prompt_ids_T: IntColumn, sampling: Sampling) -> AsyncIterator[TokenChunk]:
        """Sample one sequence; chunks arrive while it grows, the last one has a stop reason.

        Requests made in one turn of the event loop join the batch together, in that order. Leaving the iterator early
        withdraws the request. Raises :class:`~headrace.errors.RequestError` for a request that cannot be served.
        """
        ...

    async def stage(self, update: WeightUpdate) -> float:
        """Bring ``update`` next to the engine and verify its checksums, while decoding goes on; seconds it took.

        Raises :class:`~headrace.errors.WeightsError` if it does not fit, is corrupt or is older than the weights in
        use; nothing has changed then.
        """
        ...

    async def commit(self, version: int) -> SwapReport:
        """Use the staged ``version`` from the next step on; running sequences keep their cache and go on."""
        ...

    def stats(self) -> EngineStats:
        """The latest counters."""
        ...


class EngineCore(Protocol):
    """The machine behind an engine: not thread-safe but for :meth:`stage`, never blocking but for :meth:`step`."""

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises :class:`~headrace.errors.RequestError` if it can never be served."""
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

    def stage(self, update: WeightUpdate) -> None:
        """Verify an update; may run in another thread while :meth:`step` runs."""
        ...

    def commit(self, version: int) -> SwapReport:
        """Swap to a staged version; called between two steps."""
        ...

    def stats(self) -> EngineStats:
        """Counters since the start."""
        ...
