"""One request on its way through a server, and what it has got.

Shape legend: T tokens of the answer, N tokens of prompt and answer but for the last, L mixture-of-experts layers, K
experts per token and layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import HeadraceError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import Chunk
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.recorded import Experts, KeptSets, Routing

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""As a server writes it."""


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one stream that one version has sampled, as the server says."""

    version: str
    """Its label of the weights."""
    start: int
    """Its first token."""
    end: int
    """One behind its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """What one event of a stream adds."""

    ids: Sequence[int]
    """Of its tokens."""
    logprobs: Sequence[float]
    """NaN where the server had none that is finite."""
    ended: str = ""
    """Why the stream ended: ``stop``, ``length`` or ``abort``; empty while it goes on."""
    spans: tuple[VersionSpan, ...] | None = None
    """Of the whole stream, at its end; ``None`` of a server that does not tell them."""
    label: str | None = None
    """Of the weights in use, of a server that tells it with every event."""
    kept: Sequence[Sequence[int]] | None = None
    """What each token was drawn from; ``None`` of a server that does not tell it."""
    experts: npt.NDArray[Any] | None = None
    """At the end of a stream, of every token but the last: those that it began with, and what it has brought; of every
    layer, in any shape. ``None`` of a server that does not tell them."""


@dataclass(slots=True, kw_only=True, eq=False)
class StreamedAnswer:
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
    kept: list[Sequence[int]] = field(default_factory=list)
    """What each was drawn from; empty where that was not asked for, and of those."""
    experts_NLK: Experts | None = None
    """Of every token of prompt and answer but the last, once they are known."""
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

    def take(self, part: StreamPart, version: int) -> None:
        """Append what came while ``version`` was in use."""
        certain = self.request.sampling.temperature == 0  # the likeliest was taken, whatever its probability
        self.ids.extend(part.ids)
        self.logprobs.extend([0.0] * len(part.ids) if certain else part.logprobs)
        self.versions.extend([version] * len(part.ids))
        self.kept.extend(part.kept or [()] * len(part.ids))

    def restart(self) -> int:
        """Forget it all; how many tokens that were."""
        lost = len(self.ids) - self.begun
        self.ids, self.logprobs, self.versions, self.kept = [], [], [], []
        self.begun = self.flushed = self.stream_begin = 0
        self.restarted = True
        return lost

    def certify(self, spans: Sequence[tuple[int, int]]) -> None:
        """The server's word on the versions of the present stream is the last: tokens are stamped as they arrive, and
        one may have been on its way while the version changed. What its reader has been told otherwise, it is told
        again. ``spans``: versions, and how many tokens each has sampled. ``ValueError`` for spans that are not those of
        this stream, or of versions that were not in use yet."""
        told = self.versions[self.stream_begin :]
        if (tokens := sum(count for _, count in spans)) != len(told):
            raise ValueError(f"versions of {tokens} tokens for {len(told)}")
        right = [version for version, count in spans for _ in range(count)]
        if any(not 0 <= one <= newest for one, newest in zip(right, told, strict=True)):
            raise ValueError(f"versions from {min(right)} to {max(right)}, and {max(told)} is in use")
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
        prompt_routing, routing = self._routing()
        chunk = Chunk(
            request_id=self.request.request_id,
            ids_T=np.array(self.ids[span], np.int32),
            logprobs_T=np.array(self.logprobs[span], np.float32),
            versions_T=np.array(self.versions[span], np.int32),
            kept=KeptSets.of(self.kept[span]) if self.request.sampling.record_kept else None,
            prompt_routing=prompt_routing,
            routing=routing,
            stop_reason=reason,
            restarted=self.restarted,
            error=f"{error.problem}; {error.remedy}" if error else "",
            error_kind=type(error).__name__ if error else "",
        )
        self.flushed, self.restarted = len(self.ids), False
        return chunk

    def _routing(self) -> tuple[Routing | None, Routing | None]:
        """Of the prompt, for the first chunk; and of the tokens that its reader has not yet got."""
        if self.experts_NLK is None:
            return None, None
        prompt_NLK, answer_NLK = np.split(self.experts_NLK, [len(self.prompt)])
        known_T = np.arange(self.flushed, len(self.ids)) < len(answer_NLK)
        told = self.flushed > self.begun
        prompt = None if told else Routing(known_T=np.ones(len(prompt_NLK), bool), experts_RLK=prompt_NLK)
        return prompt, Routing(known_T=known_T, experts_RLK=answer_NLK[self.flushed :])
