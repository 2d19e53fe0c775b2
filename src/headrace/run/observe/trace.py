"""The time of a run, computed from its spans: intervals, their union, and the working share of a lane.

A span whose name begins with ``wait`` is a wait; every other span is work. Spans of one lane may overlap (several
scorers work at once), so time is the length of a union of intervals, never a sum of spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from headrace.base.types.observation import Account, Cause
from headrace.base.types.trace import Span

Interval = tuple[float, float]
"""Start and end in seconds, start ≤ end."""


def is_wait(span: Span) -> bool:
    """Return whether the lane waited during the span."""
    return span.name.startswith("wait")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals merged into disjoint ones, in order.

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
    """Return the time that two unions have in common.

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
    """Return the time of ``within`` that a union does not cover.

    >>> complement([(1, 2)], (0, 3))
    [(0, 1), (2, 3)]
    """
    edges = [within[0], *(edge for interval in intersection(intervals, [within]) for edge in interval), within[1]]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the length of a union, in seconds."""
    return sum(end - start for start, end in intervals)


def busy(spans: Iterable[Span], lane: str) -> list[Interval]:
    """Return the time in which the lane worked."""
    return union((span.start_s, span.end_s) for span in spans if span.lane == lane and not is_wait(span))


def busy_frac(spans: Iterable[Span], lane: str, within: Interval) -> float:
    """Return the fraction of ``within`` in which the lane worked; 0 for an empty interval.

    >>> spans = [Span(lane="engine", name="generate", start_s=0, end_s=3)]
    >>> busy_frac(spans, "engine", (0, 4)), idle_frac(spans, "engine", (2, 4))
    (0.75, 0.5)
    """
    length = within[1] - within[0]
    return seconds(intersection(busy(spans, lane), [within])) / length if length > 0 else 0.0


def idle_frac(spans: Iterable[Span], lane: str, within: Interval) -> float:
    """Return the fraction of ``within`` in which the lane did not work."""
    return 1.0 - busy_frac(spans, lane, within)


def account(spans: Iterable[Span], within: Interval, known: Iterable[str] = ()) -> Account:
    """Return the part of an account that follows from spans: the work of each part in ``within``, and the causes of
    waits.

    A moment in which the learner is idle belongs to the first part in :data:`LEARNER_WAITS` that works at that moment,
    and likewise for every engine. The shares are therefore disjoint, and they cover all idle time. ``known`` names
    lanes that exist, although they may have no span in ``within``.
    """
    lanes: dict[str, list[Span]] = {lane: [] for lane in known}
    for span in spans:
        if span.lane not in lanes:
            lanes[span.lane] = []
        if span.end_s > within[0] and span.start_s < within[1]:
            lanes[span.lane].append(span)

    def when(lane: str, matches: Callable[[Span], bool]) -> list[Interval]:
        return _union_within(((span.start_s, span.end_s) for span in lanes.get(lane, ()) if matches(span)), within)

    works = {lane: when(lane, _works) for lane in lanes}
    engines = [lane for lane in lanes if is_engine(lane)]
    count = max(1, len(engines))
    parts: dict[str, Sequence[Interval]] = {cause: works.get(cause, []) for cause in Cause}
    parts[Cause.ENGINE] = union(chain.from_iterable(works[lane] for lane in engines))
    waits = {name: when("learner", _named(name)) for name in (WAIT_BATCH, WAIT_REWARDS, WAIT_SYNC)}
    engine_waits: dict[str, float] = dict.fromkeys(map(str, Cause), 0.0)
    for lane in engines:
        for cause, part in split(complement(works[lane], within), parts, ENGINE_WAITS).items():
            engine_waits[cause] += seconds(part) / count
    exposed = when("learner", lambda span: span.name in ("snapshot", WAIT_SYNC))
    return Account(
        seconds=within[1] - within[0],
        engine_busy_s=sum(seconds(works[lane]) for lane in engines) / count,
        prefill_s=sum(seconds(when(lane, lambda span: span.name == "prefill")) for lane in engines) / count,
        engine_waits_s={cause: time_s for cause, time_s in engine_waits.items() if time_s},
        learner_busy_s=seconds(works.get("learner", [])),
        learner_waits_s=_learner_waits(complement(works.get("learner", []), within), waits, parts),
        controller_busy_s=seconds(works.get(Cause.CONTROLLER, [])),
        lanes_s={lane: seconds(time) for lane, time in works.items()},
        exposed_sync_s=seconds(exposed),
    )


WAIT_BATCH, WAIT_REWARDS, WAIT_SYNC = "wait batch", "wait rewards", "wait sync"
"""The wait spans of the learner: until the last episode of its batch has ended, from then until the batch is put
together, and until there is a buffer for its weights."""
_OTHERS = (Cause.SCORING, Cause.TEACHERS, Cause.SYNC, Cause.LEDGER)
LEARNER_WAITS: dict[str, tuple[Cause, ...]] = {
    WAIT_BATCH: (Cause.ENGINE, Cause.CONTROLLER, Cause.ENVIRONMENT, *_OTHERS),
    WAIT_REWARDS: (Cause.CONTROLLER, Cause.SCORING, Cause.TEACHERS, Cause.LEDGER),
    "": (Cause.CONTROLLER, Cause.LEDGER),
}
"""The parts for which the learner may wait, by the name of its wait span; the first that works is the cause.

An engine that works after the last episode of the batch has ended works on another batch, so it is not a cause then.
The empty name stands for idle time without a span, which lies between two steps.
"""
ENGINE_WAITS = (Cause.CONTROLLER, Cause.ENVIRONMENT, Cause.LEARNER, *_OTHERS)
"""The parts for which an engine without requests may wait; the first that works is the cause."""


def split(
    idle: Sequence[Interval], parts: Mapping[str, Sequence[Interval]], order: Iterable[Cause]
) -> dict[str, list[Interval]]:
    """Return ``idle`` by its cause: each moment belongs to the first part in ``order`` that works, or else to nobody.

    >>> split([(0, 4)], {"controller": [(1, 3)], "scoring": [(0, 2)]}, (Cause.CONTROLLER, Cause.SCORING))
    {'controller': [(1, 3)], 'scoring': [(0, 1)], 'nobody': [(3, 4)]}
    """
    shares: dict[str, list[Interval]] = {}
    left = list(idle)
    for cause in order:
        shares[str(cause)] = intersection(left, parts.get(cause, []))
        left = _without(left, shares[str(cause)])
    shares[str(Cause.NOBODY)] = left
    return shares


def _without(intervals: Sequence[Interval], covered: Sequence[Interval]) -> list[Interval]:
    """Return the time of ``intervals`` that ``covered`` does not cover."""
    if not intervals or not covered:
        return list(intervals)
    return intersection(intervals, complement(covered, (intervals[0][0], intervals[-1][1])))


def _learner_waits(
    idle: list[Interval], waits: Mapping[str, Sequence[Interval]], parts: Mapping[str, Sequence[Interval]]
) -> dict[str, float]:
    """Return the seconds that the learner waited, by cause; causes without any are left out."""
    total: dict[str, float] = {}
    for_buffer = intersection(idle, waits[WAIT_SYNC])
    total[str(Cause.SYNC)] = seconds(for_buffer)
    idle = _without(idle, for_buffer)
    for name, order in LEARNER_WAITS.items():
        inside = intersection(idle, waits[name]) if name else idle
        for cause, part in split(inside, parts, order).items():
            total[cause] = total.get(cause, 0.0) + seconds(part)
        idle = _without(idle, inside)
    return {cause: time_s for cause, time_s in total.items() if time_s > 0}


def _named(name: str) -> Callable[[Span], bool]:
    """Return a test for spans with this name."""
    return lambda span: span.name == name


def _works(span: Span) -> bool:
    """Return whether the lane worked during the span."""
    return not is_wait(span)


def _union_within(intervals: Iterable[Interval], within: Interval) -> list[Interval]:
    """Return the union of ``intervals`` inside ``within``."""
    return intersection(union(intervals), [within])


def is_engine(lane: str) -> bool:
    """Return whether a lane is that of an engine, alone or in a fleet."""
    return lane == "engine" or lane.startswith("engine-")
