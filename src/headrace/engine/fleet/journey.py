"""One request on its way through the engines: what its reader has, so that any of them can go on behind that."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from headrace.base.errors import ComponentDied, SequenceFailed
from headrace.base.types.messages.engine import ForkRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.base import RequestOptions, TokenChunk
from headrace.engine.fleet.router import RouteRequest, prefix_keys

MAX_FRUITLESS = 5
"""Engines that may die one after the other with a request, without a token of it between them: it may be the cause."""

LEAST_S = 1e-3
"""What is left of a deadline that has passed on the way: it ends at once, with what it has."""


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedRequest:
    """What was asked, and how far it is."""

    number: int
    """Its name for its reader, whichever engine it is with."""
    prompt_ids_T: IntColumn
    sampling: Sampling
    options: RequestOptions
    arrived_s: float
    over: bool = False
    avoid: set[str] = field(default_factory=set)
    """Engines that have refused it because they are full."""
    _streamed: list[IntColumn] = field(default_factory=list)
    """What its reader has got since it began, or began again."""
    _anew: bool = False
    """Whether it has begun again: what it was given as its answer is void."""
    _version: int = NOT_SAMPLED
    """Of its newest token."""
    _told_routing: bool = False
    _moved: bool = False
    _fruitless: int = 0
    """Engines that died with it since its last token."""

    def wish(self, only: str = "", *, alone: bool = False) -> RouteRequest:
        """Where it would like to be; ``only`` names the one engine that can serve it; ``alone``: there is but one."""
        bound = self.options.pinned and self._version != NOT_SAMPLED
        return RouteRequest(
            session=self.options.session,
            prefixes=() if alone else prefix_keys(self.prompt_ids_T),
            only=only,
            version=self._version if bound else None,
        )

    def asked(self, now_s: float, fork: ForkRequest | None) -> RequestOptions:
        """What the next engine is asked, beside prompt and sampling; ``fork`` is in that engine's words."""
        if not self._moved and fork is None:
            return self.options
        answer = list(self._streamed)
        if self.options.answer_ids_T is not None and not self._anew:
            answer.insert(0, self.options.answer_ids_T)
        limit_s = self.options.deadline_s
        return replace(
            self.options,
            fork=fork,
            answer_ids_T=np.concatenate(answer) if answer else None,
            deadline_s=None if limit_s is None else max(LEAST_S, limit_s - (now_s - self.arrived_s)),
        )

    def took(self, chunk: TokenChunk) -> TokenChunk:
        """The chunk as its reader gets it."""
        if chunk.restarted:
            self._streamed.clear()
            self._anew, self._told_routing = True, False
        if len(chunk.tokens):
            self._streamed.append(chunk.tokens.ids_T)
            self._version, self._fruitless = int(chunk.tokens.versions_T[-1]), 0
        routing = None if self._told_routing else chunk.prompt_routing
        self._told_routing |= routing is not None
        self.over = chunk.stop_reason is not None
        return replace(chunk, request_id=self.number, prompt_routing=routing)

    def strand(self, death: ComponentDied) -> None:
        """Its engine is gone. Raises :class:`~headrace.base.errors.SequenceFailed` where no other can go on with it."""
        self._moved = True
        self._fruitless += 1
        if self.options.fork is not None:
            raise SequenceFailed(
                f"it was a fork, and what it began with is gone with its engine: {death.problem}",
                remedy="send the tokens of its parent as a prompt",
            )
        if self._fruitless >= MAX_FRUITLESS:
            raise SequenceFailed(
                f"{MAX_FRUITLESS} engines died one after the other with this request and not one token of it; the "
                f"last: {death.problem}",
                remedy="look at the logs of the engines: the request may be what kills them",
            )

    def refused(self) -> SequenceFailed:
        """Why none of the engines that serve can go on with it."""
        return SequenceFailed(
            f"it is pinned to version {self._version}, its engine is gone, and no other has these weights",
            remedy="do not pin what must outlive its engine",
        )
