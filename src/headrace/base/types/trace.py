"""The unit of the event trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.base.types.episode import EpisodeKey


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Something a lane did between two moments of the machine's clock. Written as an array: a run has many.

    >>> msgspec.json.encode(Span(lane="engine", name="generate", start_s=1.5, end_s=2.0))
    b'["engine","generate",1.5,2.0,-1,null]'
    """

    lane: str
    """Who: ``engine`` (``engine-1`` and so on in a fleet), ``learner``, ``scoring``, ``sync``, ``rollout``."""
    name: str
    """What: ``generate``, ``forward_backward``, ``snapshot``, ``wait batch``."""
    start_s: float
    end_s: float
    step: int = -1
    """The step or version it belongs to; −1 for none."""
    of: EpisodeKey | None = None
    """The episode, if it is of one."""


OnSpans = Callable[[Sequence[Span]], None]
"""Told what parts were busy with."""


def earlier(spans: Sequence[Span], by_s: float) -> Sequence[Span]:
    """The same by the clock of this machine, of spans by one that is ahead of it."""
    if not by_s:
        return spans
    return [msgspec.structs.replace(span, start_s=span.start_s - by_s, end_s=span.end_s - by_s) for span in spans]


def in_lane(lane: str, on_spans: OnSpans) -> OnSpans:
    """Tells ``on_spans`` of every span as one of ``lane``: several parts of a kind keep lanes of their own."""

    def told(spans: Sequence[Span]) -> None:
        if spans:
            on_spans([msgspec.structs.replace(span, lane=lane) for span in spans])

    return told
