"""Where the time went, from spans: intervals, their union, and fractions of a lane.

A span whose name begins with ``wait`` is a wait; every other span is work. Spans of one lane may overlap (several
scorers work at once), so time is the length of a union of intervals, never a sum of spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.types.observation import Fractions
from headrace.types.trace import Span

Interval = tuple[float, float]
"""Start and end in seconds, start ≤ end."""


def is_wait(span: Span) -> bool:
    """Whether the lane stood still during the span."""
    return span.name.startswith("wait")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time in both of two unions.

    >>> intersection([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def complement(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """The time of ``within`` that a union leaves free.

    >>> complement([(1, 2)], (0, 3))
    [(0, 1), (2, 3)]
    """
    edges = [within[0], *(edge for interval in intersection(intervals, [within]) for edge in interval), within[1]]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def seconds(intervals: Iterable[Interval]) -> float:
    """The length of a union."""
    return sum(end - start for start, end in intervals)


def busy(spans: Iterable[Span], lane: str) -> list[Interval]:
    """When the lane worked."""
    return union((span.start_s, span.end_s) for span in spans if span.lane == lane and not is_wait(span))


def busy_frac(spans: Iterable[Span], lane: str, within: Interval) -> float:
    """The fraction of ``within`` in which the lane worked; 0 for an empty interval.

    >>> spans = [Span(lane="engine", name="generate", start_s=0, end_s=3)]
    >>> busy_frac(spans, "engine", (0, 4)), idle_frac(spans, "engine", (2, 4))
    (0.75, 0.5)
    """
    length = within[1] - within[0]
    return seconds(intersection(busy(spans, lane), [within])) / length if length > 0 else 0.0


def idle_frac(spans: Iterable[Span], lane: str, within: Interval) -> float:
    """The fraction of ``within`` in which the lane did not work."""
    return 1.0 - busy_frac(spans, lane, within)


def fractions(spans: Sequence[Span], within: Interval) -> Fractions:
    """Who stood idle during ``within``, and what for; all zero for an empty interval."""
    length = within[1] - within[0]
    if length <= 0:
        return Fractions()
    engine, learner = (intersection(busy(spans, lane), [within]) for lane in ("engine", "learner"))
    both_idle = complement(union(engine + learner), within)
    stopped = union((s.start_s, s.end_s) for s in spans if (s.lane, s.name) in _STANDS_STILL)
    sync = union(intersection(stopped, [within]) + intersection(busy(spans, "sync"), both_idle))
    scoring = intersection(busy(spans, "scoring"), both_idle)
    return Fractions(
        engine_idle=1.0 - seconds(engine) / length,
        learner_idle=1.0 - seconds(learner) / length,
        scoring=seconds(scoring) / length,
        sync=seconds(sync) / length,
    )


def coverage(intervals: Sequence[Interval], edges_B: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The fraction of each bin that a union covers; ``edges_B`` rises, the result is one shorter.

    >>> coverage([(0.5, 2.0)], np.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    if not intervals:
        return np.zeros(len(edges_B) - 1)
    times = np.array(intervals, np.float64).ravel()
    lengths = times[1::2] - times[::2]
    covered = np.repeat(np.cumsum(lengths), 2)
    covered[::2] -= lengths
    result: npt.NDArray[np.float64] = np.diff(np.interp(edges_B, times, covered)) / np.diff(edges_B)
    return result


_STANDS_STILL = frozenset({("learner", "snapshot"), ("learner", "wait sync"), ("engine", "commit")})
