"""A request that may be served by several engines in turn: it records the tokens that its reader has received, so that
any engine can continue after them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.base.errors import ComponentDied, SequenceFailed
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import ForkRequest, RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.fleet.router import RouteRequest, prefix_keys

MAX_DEATHS_WITHOUT_TOKEN = 5
"""The number of engines that may die one after the other with a request, without a token from any of them, before the
request itself is regarded as the cause and fails."""

MIN_DEADLINE_S = 1e-3
"""The remaining time of a request, in seconds, if its deadline passed while it was moved to another engine. The request
then ends at once, with the tokens that it has."""


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedRequest:
    """A request and its progress through the engines of a fleet. Its *reader* is the caller of the fleet, which gets
    one stream of chunks."""

    number: int
    """The number of the request in the fleet, whichever engine serves it."""
    prompt_ids_T: IntColumn
    sampling: Sampling
    options: RequestOptions
    arrived_s: float
    ended: bool = False
    """Whether its last chunk has arrived."""
    avoid: set[str] = field(default_factory=set)
    """The names of engines that refused it because they are full."""
    _streamed: list[IntColumn] = field(default_factory=list)
    """The tokens that its reader has received since it began or was restarted."""
    _restarted: bool = False
    """Whether an engine has restarted the request, so that all earlier tokens, also ``options.answer_ids_T``, are
    void."""
    _version: int = NOT_SAMPLED
    """The version of its newest token."""
    _sent_routing: bool = False
    """Whether its reader has received the routing of the prompt."""
    _moved: bool = False
    """Whether an engine has died while it served the request."""
    _deaths_without_token: int = 0
    """The number of engines that died with it since its last token."""

    def route_request(self, only: str = "", *, by_prefix: bool = True) -> RouteRequest:
        """Return the constraints and preferences for routing it. ``only`` names the one engine that can serve it
        (empty: any); ``by_prefix`` says whether the engine that has computed the beginning of its prompt is preferred.
        A pinned request that has tokens needs an engine with the version of its tokens."""
        is_pinned = self.options.pinned and self._version != NOT_SAMPLED
        return RouteRequest(
            session=self.options.session,
            prefixes=prefix_keys(self.prompt_ids_T) if by_prefix else (),
            only=only,
            version=self._version if is_pinned else None,
        )

    def next_options(self, now_s: float, fork: ForkRequest | None) -> RequestOptions:
        """Return the options that are sent to the next engine: with the tokens that the answer has so far, and the time
        that remains until its deadline at ``now_s``. ``fork`` has the parent's number on that engine; ``None`` if the
        request is not a fork."""
        if not self._moved and fork is None:
            return self.options
        answer = list(self._streamed)
        if self.options.answer_ids_T is not None and not self._restarted:
            answer.insert(0, self.options.answer_ids_T)
        limit_s = self.options.deadline_s
        return msgspec.structs.replace(
            self.options,
            fork=fork,
            answer_ids_T=np.concatenate(answer) if answer else None,
            deadline_s=None if limit_s is None else max(MIN_DEADLINE_S, limit_s - (now_s - self.arrived_s)),
        )

    def on_chunk(self, chunk: TokenChunk) -> TokenChunk:
        """Record a chunk that an engine sent, and return the chunk that the reader receives: with the fleet's request
        number, and with the routing of the prompt only once."""
        if chunk.lost:
            self._streamed.clear()
            self._restarted, self._sent_routing = True, False
        if len(chunk.tokens):
            self._streamed.append(chunk.tokens.ids_T)
            self._version, self._deaths_without_token = int(chunk.tokens.versions_T[-1]), 0
        routing = None if self._sent_routing else chunk.prompt_routing
        self._sent_routing |= routing is not None
        self.ended = chunk.ended
        return msgspec.structs.replace(chunk, request_id=self.number, prompt_routing=routing)

    def on_engine_death(self, death: ComponentDied, *, removed: bool = False) -> None:
        """Prepare the request to continue on another engine after its engine has died (``death``), or was ``removed``
        on purpose, which is not the fault of the request. Raises :class:`~headrace.base.errors.SequenceFailed` if no
        other engine can continue it."""
        self._moved = True
        self._deaths_without_token += not removed
        if self.options.fork is not None:
            raise SequenceFailed(
                f"it was a fork, and what it began with is gone with its engine: {death.problem}",
                remedy="send the tokens of its parent as a prompt",
            )
        if self._deaths_without_token >= MAX_DEATHS_WITHOUT_TOKEN:
            raise SequenceFailed(
                f"{MAX_DEATHS_WITHOUT_TOKEN} engines died one after the other with this request and not one token of "
                f"it; the last: {death.problem}",
                remedy="look at the logs of the engines: the request may be what kills them",
            )

    def pinned_error(self) -> SequenceFailed:
        """Return the error for a pinned request that no serving engine can continue, since none has its weights."""
        return SequenceFailed(
            f"it is pinned to version {self._version}, its engine is gone, and no other has these weights",
            remedy="do not pin what must outlive its engine",
        )
