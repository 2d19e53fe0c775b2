"""The elements of the event trace: spans of time, each in a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.base.types.episode import EpisodeKey


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """An activity of one lane from its start to its end, on the machine's clock. It is encoded as an array to save
    space, since a run has many spans.

    >>> msgspec.json.encode(Span(lane="engine", name="generate", start_s=1.5, end_s=2.0))
    b'["engine","generate",1.5,2.0,-1,null]'
    """

    lane: str
    """The part of the run that was active: ``engine`` (``engine-1`` and so on if there are several engines),
    ``learner``, ``scoring``, ``sync``, ``rollout``."""
    name: str
    """The activity: ``generate``, ``forward_backward``, ``snapshot``, ``wait batch``."""
    start_s: float
    """When the activity began, in seconds of the machine's clock."""
    end_s: float
    """When the activity ended, in seconds of the machine's clock."""
    step: int = -1
    """The step or version that the activity belongs to; −1 for none."""
    of: EpisodeKey | None = None
    """The episode that the activity belongs to; ``None`` for none."""


OnSpans = Callable[[Sequence[Span]], None]
"""A callback that receives the new spans of a part of the run."""


def shifted_back(spans: Sequence[Span], by_s: float) -> Sequence[Span]:
    """Return ``spans`` with ``by_s`` seconds subtracted from their times. This converts spans of a machine whose clock
    is ``by_s`` seconds ahead of the controller's clock."""
    if not by_s:
        return spans
    return [msgspec.structs.replace(span, start_s=span.start_s - by_s, end_s=span.end_s - by_s) for span in spans]


def rename_lane(lane: str, on_spans: OnSpans) -> OnSpans:
    """Return a callback that forwards spans to ``on_spans`` with their lane replaced by ``lane``, so that each of
    several parts of one kind has its own lane."""

    def forward_in_lane(spans: Sequence[Span]) -> None:
        """Forward the spans with the new lane, if there are any spans."""
        if spans:
            on_spans([msgspec.structs.replace(span, lane=lane) for span in spans])

    return forward_in_lane
