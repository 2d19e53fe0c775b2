"""The unit of the event trace: a span of time in a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.base.types.episode import EpisodeKey


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """An activity of one lane between two moments of the machine's clock. It is encoded as an array, since a run has
    many.

    >>> msgspec.json.encode(Span(lane="engine", name="generate", start_s=1.5, end_s=2.0))
    b'["engine","generate",1.5,2.0,-1,null]'
    """

    lane: str
    """The part of the run that was active: ``engine`` (``engine-1`` and so on if there are several), ``learner``,
    ``scoring``, ``sync``, ``rollout``."""
    name: str
    """The activity: ``generate``, ``forward_backward``, ``snapshot``, ``wait batch``."""
    start_s: float
    """When the activity began, in seconds of the machine's clock."""
    end_s: float
    """When the activity ended, in seconds of the machine's clock."""
    step: int = -1
    """The step or version that the span belongs to; −1 for none."""
    of: EpisodeKey | None = None
    """The episode that the span belongs to; ``None`` for none."""


OnSpans = Callable[[Sequence[Span]], None]
"""A callback that receives the spans of a part."""


def shifted_back(spans: Sequence[Span], by_s: float) -> Sequence[Span]:
    """Return the spans with ``by_s`` seconds subtracted from their times. This converts spans of a machine whose clock
    is ahead of the controller's by that much."""
    if not by_s:
        return spans
    return [msgspec.structs.replace(span, start_s=span.start_s - by_s, end_s=span.end_s - by_s) for span in spans]


def in_lane(lane: str, on_spans: OnSpans) -> OnSpans:
    """Return a callback that passes spans on to ``on_spans`` with their lane replaced by ``lane``, so that each of
    several parts of one kind has its own lane."""

    def told(spans: Sequence[Span]) -> None:
        """Pass the spans on in the lane, if there are any."""
        if spans:
            on_spans([msgspec.structs.replace(span, lane=lane) for span in spans])

    return told
