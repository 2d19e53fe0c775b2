"""One request on its way through a server, and what it has got.

Shape legend: T tokens of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from headrace.errors import HeadraceError
from headrace.types.episode import StopReason
from headrace.types.messages.controller import Chunk
from headrace.types.messages.engine import GenerateRequest

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""As a server writes it."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one stream that one version has sampled, as the server says."""

    version: str
    """Its label of the weights."""
    start: int
    """Its first token."""
    end: int
    """One behind its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one event of a stream adds."""

    ids: Sequence[int]
    """Of its tokens."""
    logprobs: Sequence[float]
    """NaN where the server had none that is finite."""
    ended: str = ""
    """Why the stream ended: ``stop``, ``length`` or ``abort``; empty while it goes on."""
    spans: tuple[Span, ...] | None = None
    """Of the whole stream, at its end; ``None`` of a server that does not tell them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Answer:
    """Owned by the loop that streams it."""

    request: GenerateRequest
    prompt: list[int]
    arrival: int
    """Which of all requests it is."""
    ids: list[int] = field(default_factory=list)
    """Of the whole answer, those included that were sampled before it came here."""
    logprobs: list[float] = field(default_factory=list)
    """0 of those that were sampled before."""
    versions: list[int] = field(default_factory=list)
    """``NOT_SAMPLED`` of those."""
    begun: int = 0
    """How many of them were sampled before it came here."""
    flushed: int = 0
    """How many its reader has."""
    stream_begin: int = 0
    """Where the present stream began."""
    restarted: bool = False
    """Its reader has to forget what it has, and has not been told."""
    halted: bool = False
    """A commit has ended its stream: it goes on after that."""
    task: asyncio.Task[None] | None = None
    """Streams it; ``None`` while it waits."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place in the queue."""
        return -self.request.priority, self.arrival

    def take(self, part: Part, version: int) -> None:
        """Append what came while ``version`` was in use."""
        certain = self.request.sampling.temperature == 0  # the likeliest was taken, whatever its probability
        self.ids.extend(part.ids)
        self.logprobs.extend([0.0] * len(part.ids) if certain else part.logprobs)
        self.versions.extend([version] * len(part.ids))

    def restart(self) -> int:
        """Forget it all; how many tokens that were."""
        lost = len(self.ids) - self.begun
        self.ids, self.logprobs, self.versions = [], [], []
        self.begun = self.flushed = self.stream_begin = 0
        self.restarted = True
        return lost

    def certify(self, spans: Sequence[Span]) -> None:
        """The server's word on the versions of the present stream is the last: tokens are stamped as they arrive, and
        one may have been on its way while the version changed. What its reader has been told otherwise, it is told
        again. ``ValueError`` for spans that are not those of this stream."""
        told = self.versions[self.stream_begin :]
        counts = [max(0, span.end - span.start) for span in spans]
        if sum(counts) != len(told):
            raise ValueError(f"versions of {sum(counts)} tokens for {len(told)}")
        right = [int(span.version) for span, count in zip(spans, counts, strict=True) for _ in range(count)]
        if right == told:
            return
        first = self.stream_begin + next(at for at, (a, b) in enumerate(zip(right, told, strict=True)) if a != b)
        self.versions[self.stream_begin :] = right
        if first < self.flushed and not self.begun:
            self.flushed, self.restarted = 0, True
        elif first < self.flushed:
            raise ValueError("they contradict what was streamed, of an answer that was begun elsewhere")

    def chunk(self, reason: StopReason | None = None, error: HeadraceError | None = None) -> Chunk:
        """What its reader has not yet got."""
        span = slice(self.flushed, None)
        chunk = Chunk(
            request_id=self.request.request_id,
            ids_T=np.array(self.ids[span], np.int32),
            logprobs_T=np.array(self.logprobs[span], np.float32),
            versions_T=np.array(self.versions[span], np.int32),
            stop_reason=reason,
            restarted=self.restarted,
            error=f"{error.problem}; {error.remedy}" if error else "",
            error_kind=type(error).__name__ if error else "",
        )
        self.flushed, self.restarted = len(self.ids), False
        return chunk
