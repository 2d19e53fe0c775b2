"""The answer to one request, as it arrives in the streams of a server. A stream is one streamed HTTP response. A commit
of new weights may end a stream, and another stream then continues the answer. The reader is the part of the run that
receives the tokens in chunks. A label is the server's name for a version of the weights.

Shape legend: T tokens of the answer, N tokens of prompt and answer except the last, L mixture-of-experts layers, K
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

from headrace.base.errors import RequestError
from headrace.base.types.episode import RESTARTED, StopReason, TokenChunk
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.recorded import Experts, KeptSets, Routing
from headrace.base.types.tokens import Tokens

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id in a server's JSON."""


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A range of tokens of one stream that the same version has sampled, as reported by the server."""

    version: str
    """The server's label of the weights that sampled the tokens."""
    start: int
    """Index of the first token of the span within the stream."""
    end: int
    """Index behind the last token of the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """The part of an answer that one server-sent event of a stream carries, decoded from the server's JSON."""

    ids: Sequence[int]
    """Ids of the new tokens."""
    logprobs: Sequence[float]
    """Logprobs of the new tokens; NaN where the server reported no finite number."""
    finish_reason: str = ""
    """The reason why the stream ended: ``stop``, ``length`` or ``abort``; empty while it continues."""
    spans: tuple[VersionSpan, ...] | None = None
    """The versions of all tokens of the stream, in its last event; ``None`` in other events, and from a server that
    does not report them."""
    label: str | None = None
    """The label of the weights in use; ``None`` from a server that does not report it in every event."""
    kept: Sequence[Sequence[int]] | None = None
    """The kept-set of each new token; ``None`` from a server that does not report them."""
    experts: npt.NDArray[Any] | None = None
    """The chosen experts of every layer for the tokens of the stream's prompt and for its new tokens except the last,
    flat or shaped, in the last event. ``None`` in other events, and from a server that does not report them."""


@dataclass(slots=True, kw_only=True, eq=False)
class StreamedAnswer:
    """The answer to one request while it is streamed. Only the event loop that streams it may change it."""

    request: GenerateRequest
    """The request of the run."""
    prompt: list[int]
    """Token ids of the prompt."""
    arrival: int
    """The number of requests that arrived before this one."""
    ids: list[int] = field(default_factory=list)
    """Ids of the whole answer, including tokens that another engine sampled before this engine received the request."""
    logprobs: list[float] = field(default_factory=list)
    """Logprobs of the answer; 0 for tokens that another engine sampled."""
    versions: list[int] = field(default_factory=list)
    """The version that sampled each token; ``NOT_SAMPLED`` for tokens that another engine sampled."""
    kept: list[Sequence[int]] = field(default_factory=list)
    """The kept-set of each token; empty if not requested, and for tokens that another engine sampled."""
    experts_NLK: Experts | None = None
    """The experts of every token of prompt and answer but the last, once the server has reported them."""
    num_continued: int = 0
    """Number of tokens that another engine sampled before this engine received the request."""
    num_sent: int = 0
    """Number of tokens that have been sent to the reader."""
    stream_start: int = 0
    """Number of tokens that the answer had when its current stream began."""
    restarted: bool = False
    """Whether the reader must discard all tokens that it has received; the next chunk tells the reader so."""
    halted: bool = False
    """Whether a commit has ended the stream; a new stream continues the answer after the commit."""
    task: asyncio.Task[None] | None = None
    """The task that streams the answer; ``None`` while the request waits."""

    @property
    def key(self) -> tuple[int, int]:
        """Return the key by which waiting requests are sorted: higher priority first, then earlier arrival."""
        return -self.request.priority, self.arrival

    def append(self, part: StreamPart, version: int) -> None:
        """Append the tokens of ``part``, which arrived while ``version`` was in use."""
        greedy = self.request.sampling.temperature == 0  # temperature 0 makes the likeliest token certain
        self.ids.extend(part.ids)
        self.logprobs.extend([0.0] * len(part.ids) if greedy else part.logprobs)
        self.versions.extend([version] * len(part.ids))
        self.kept.extend(part.kept or [()] * len(part.ids))

    def restart(self) -> int:
        """Discard the whole answer, which will be sampled again from the prompt, and return the number of discarded
        tokens that this server had sampled."""
        lost = len(self.ids) - self.num_continued
        self.ids, self.logprobs, self.versions, self.kept = [], [], [], []
        self.num_continued = self.num_sent = self.stream_start = 0
        self.restarted = True
        return lost

    def correct_versions(self, spans: Sequence[tuple[int, int]]) -> None:
        """Replace the versions of the tokens of the current stream by the versions in ``spans``, which are pairs of a
        version and a number of tokens, in order. A token is stamped with the version in use when it arrives, which is
        wrong if the token was in transit during a commit. If the reader has already received a wrong version, the
        answer is sent again. Raises ``ValueError`` if the spans do not fit the stream, or name a version that was not
        in use yet."""
        stamped = self.versions[self.stream_start :]
        if (tokens := sum(count for _, count in spans)) != len(stamped):
            raise ValueError(f"versions of {tokens} tokens for {len(stamped)}")
        correct = [version for version, count in spans for _ in range(count)]
        if any(not 0 <= one <= newest for one, newest in zip(correct, stamped, strict=True)):
            raise ValueError(f"versions from {min(correct)} to {max(correct)}, and {max(stamped)} is in use")
        if correct == stamped:
            return
        first = self.stream_start + next(at for at, (a, b) in enumerate(zip(correct, stamped, strict=True)) if a != b)
        self.versions[self.stream_start :] = correct
        if first < self.num_sent and not self.num_continued:
            self.num_sent, self.restarted = 0, True
        elif first < self.num_sent:
            raise ValueError(
                "they contradict tokens that were sent, and an answer begun elsewhere cannot be sent again"
            )

    def chunk(self, reason: StopReason | None = None, error: RequestError | None = None) -> TokenChunk:
        """Return the tokens that have not been sent to the reader as a chunk, and mark them as sent. The last chunk of
        an answer has the ``reason`` why the answer ended, or the ``error`` with which it failed."""
        span = slice(self.num_sent, None)
        prompt_routing, routing = self._routing()
        chunk = TokenChunk(
            request_id=self.request.request_id,
            tokens=Tokens(
                ids_T=np.array(self.ids[span], np.int32),
                logprobs_T=np.array(self.logprobs[span], np.float32),
                versions_T=np.array(self.versions[span], np.int32),
                kept=KeptSets.from_spans(self.kept[span]) if self.request.sampling.record_kept else None,
                routing=routing,
            ),
            prompt_routing=prompt_routing,
            stop_reason=reason,
            lost=RESTARTED if self.restarted else "",
        )
        self.num_sent, self.restarted = len(self.ids), False
        return chunk if error is None else chunk.with_error(error)

    def _routing(self) -> tuple[Routing | None, Routing | None]:
        """Return the experts of the prompt's tokens, which belong to the first chunk only (``None`` for later chunks),
        and of the answer's tokens that have not been sent. Both are ``None`` if the server has reported no experts."""
        if self.experts_NLK is None:
            return None, None
        prompt_NLK, answer_NLK = np.split(self.experts_NLK, [len(self.prompt)])
        # the last token of the answer was never an input of the model, so it has no experts
        known_T = np.arange(self.num_sent, len(self.ids)) < len(answer_NLK)
        is_first = self.num_sent <= self.num_continued
        prompt = None if not is_first else Routing(known_T=np.ones(len(prompt_NLK), bool), experts_RLK=prompt_NLK)
        return prompt, Routing(known_T=known_T, experts_RLK=answer_NLK[self.num_sent :])
