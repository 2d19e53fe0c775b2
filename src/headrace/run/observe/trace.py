"""Functions that compute times of a run from its spans: unions of intervals, the share of time in which a lane worked,
and the account.

A *span* is what one part of the run did between two moments; its *lane* names the part, such as ``engine-1`` or
``learner``. A span whose name begins with ``wait`` is a wait; every other span is work. Spans of one lane may overlap
(several scorers work at once), so time is the length of a *union*, a list of disjoint intervals in order, never a sum
of spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain

from headrace.base.types.observation import Account, Cause
from headrace.base.types.trace import Span

Interval = tuple[float, float]
"""An interval of time: its start and its end in seconds, with start ≤ end."""


def is_wait(span: Span) -> bool:
    """Return whether the span is a wait of its lane, not work: whether its name begins with ``wait``."""
    return span.name.startswith("wait")


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of ``intervals``, which may overlap and come in any order: disjoint intervals in rising order.
    Empty intervals are skipped.

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
    """Return the time that two unions have in common, as a union. Each argument must be disjoint and in order, as
    :func:`union` returns it.

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
    """Return the time of the interval ``within`` that a union does not cover, as a union.

    >>> complement([(1, 2)], (0, 3))
    [(0, 1), (2, 3)]
    """
    edges = [within[0], *(edge for interval in intersection(intervals, [within]) for edge in interval), within[1]]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals of a union, in seconds."""
    return sum(end - start for start, end in intervals)


def make_span_account(spans: Iterable[Span], within: Interval, known: Iterable[str] = ()) -> Account:
    """Return the part of an account that follows from spans: for the interval ``within``, how long engines, learner and
    controller worked, and how long engines and learner waited for which part. Other fields keep their defaults; the
    times of several engines are averaged.

    A process that is stopped does not count as working, even inside a span. A moment in which the learner is idle
    belongs to :attr:`Cause.STOPPED` while the learner, all engines or the controller are stopped; otherwise it belongs
    to the first part in :data:`LEARNER_WAITS` that works at that moment. The idle time of every engine is divided in
    the same way, if a stop of this engine alone counts too. The shares are disjoint and cover all idle time. ``known``
    names lanes that exist, although they may have no span in ``within``.
    """
    lanes: dict[str, list[Span]] = {lane: [] for lane in known}
    for span in spans:
        lane_spans = lanes.setdefault(span.lane, [])
        if span.end_s > within[0] and span.start_s < within[1]:
            lane_spans.append(span)

    def find_time(lane: str, matches: Callable[[Span], bool]) -> list[Interval]:
        """Return the time of the spans of ``lane`` for which ``matches`` is true, as a union inside ``within``."""
        times = ((span.start_s, span.end_s) for span in lanes.get(lane, ()) if matches(span))
        return intersection(union(times), [within])

    engines = [lane for lane in lanes if is_engine(lane)]
    own_stops = {
        lane: find_time(Cause.STOPPED, _make_stop_test(lane)) for lane in (*lanes, Cause.LEARNER, Cause.CONTROLLER)
    }
    works = {lane: _subtract(find_time(lane, lambda span: not is_wait(span)), own_stops[lane]) for lane in lanes}
    common_stops = reduce(intersection, [own_stops[lane] for lane in engines]) if engines else []
    stops = union(chain(own_stops[Cause.LEARNER], own_stops[Cause.CONTROLLER], common_stops))
    count = max(1, len(engines))
    parts: dict[str, Sequence[Interval]] = {**{cause: works.get(cause, []) for cause in Cause}, Cause.STOPPED: stops}
    parts[Cause.ENGINE] = union(chain.from_iterable(works[lane] for lane in engines))
    waits = {name: find_time("learner", _has_name(name)) for name in (WAIT_BATCH, WAIT_REWARDS, WAIT_SYNC)}
    engine_waits: dict[str, float] = dict.fromkeys(map(str, Cause), 0.0)
    for lane in engines:
        engine_parts = {**parts, Cause.STOPPED: union(chain(stops, own_stops[lane]))}
        for cause, share in split_by_cause(complement(works[lane], within), engine_parts, ENGINE_WAITS).items():
            engine_waits[cause] += seconds(share) / count
    exposed = _subtract(find_time("learner", lambda span: span.name in ("snapshot", WAIT_SYNC)), stops)
    return Account(
        seconds=within[1] - within[0],
        engine_busy_s=sum(seconds(works[lane]) for lane in engines) / count,
        prefill_s=sum(seconds(find_time(lane, lambda span: span.name == "prefill")) for lane in engines) / count,
        engine_waits_s={cause: time_s for cause, time_s in engine_waits.items() if time_s},
        learner_busy_s=seconds(works.get("learner", [])),
        learner_waits_s=_sum_learner_waits(complement(works.get("learner", []), within), waits, parts),
        controller_busy_s=seconds(works.get(Cause.CONTROLLER, [])),
        lanes_s={lane: seconds(time) for lane, time in works.items()},
        exposed_sync_s=seconds(exposed),
    )


WAIT_BATCH, WAIT_REWARDS, WAIT_SYNC = "wait batch", "wait rewards", "wait sync"
"""The names of the learner's wait spans: the wait until the last episode of its batch has ended, the wait from then on
until the batch is assembled, and the wait for a buffer for its new weights."""
_OTHERS = (Cause.SCORING, Cause.TEACHERS, Cause.SYNC, Cause.LEDGER)
"""The last causes of both tables below."""
LEARNER_WAITS: dict[str, tuple[Cause, ...]] = {
    WAIT_BATCH: (Cause.ENGINE, Cause.CONTROLLER, Cause.ENVIRONMENT, *_OTHERS),
    WAIT_REWARDS: (Cause.CONTROLLER, Cause.SCORING, Cause.TEACHERS, Cause.LEDGER),
    "": (Cause.CONTROLLER, Cause.LEDGER),
}
"""The parts for which the learner may wait, by the name of its wait span; the first part that works is the cause.

An engine that works after the last episode of the batch has ended works on another batch, so that it is not a cause of
:data:`WAIT_REWARDS`. The empty name means idle time without a wait span, between two steps.
"""
ENGINE_WAITS = (Cause.STOPPED, Cause.CONTROLLER, Cause.ENVIRONMENT, Cause.LEARNER, *_OTHERS)
"""The parts for which an engine without requests may wait; the first part that works is the cause."""


def split_by_cause(
    idle: Sequence[Interval], parts: Mapping[str, Sequence[Interval]], order: Iterable[Cause]
) -> dict[str, list[Interval]]:
    """Return the idle time ``idle`` of one lane divided by its cause: each moment belongs to the first part in
    ``order`` that works at that moment, or else to ``nobody``. ``parts`` has the time in which each part works, by its
    name; ``idle`` and all results are unions.

    >>> split_by_cause([(0, 4)], {"controller": [(1, 3)], "scoring": [(0, 2)]}, (Cause.CONTROLLER, Cause.SCORING))
    {'controller': [(1, 3)], 'scoring': [(0, 1)], 'nobody': [(3, 4)]}
    """
    shares: dict[str, list[Interval]] = {}
    left = list(idle)
    for cause in order:
        shares[str(cause)] = intersection(left, parts.get(cause, []))
        left = _subtract(left, shares[str(cause)])
    shares[str(Cause.NOBODY)] = left
    return shares


def _subtract(intervals: Sequence[Interval], covered: Sequence[Interval]) -> list[Interval]:
    """Return the time of the union ``intervals`` that the union ``covered`` does not cover, as a union."""
    if not intervals or not covered:
        return list(intervals)
    return intersection(intervals, complement(covered, (intervals[0][0], intervals[-1][1])))


def _sum_learner_waits(
    idle: list[Interval], waits: Mapping[str, Sequence[Interval]], parts: Mapping[str, Sequence[Interval]]
) -> dict[str, float]:
    """Return how long the learner waited, in seconds by cause; a cause without any time is omitted.

    ``idle`` is all time in which the learner did not work. ``waits`` has the time of its wait spans, by their name, and
    ``parts`` the time in which every part works, by the name of the part. Time in which the run is stopped is counted
    first, then the wait for a weight buffer; :data:`LEARNER_WAITS` divides the remaining time.
    """
    total: dict[str, float] = {}
    for first_cause, time in ((Cause.STOPPED, parts[Cause.STOPPED]), (Cause.SYNC, waits[WAIT_SYNC])):
        total[str(first_cause)] = seconds(intersection(idle, time))
        idle = _subtract(idle, time)
    for name, order in LEARNER_WAITS.items():
        inside = intersection(idle, waits[name]) if name else idle
        for cause, time in split_by_cause(inside, parts, order).items():
            total[cause] = total.get(cause, 0.0) + seconds(time)
        idle = _subtract(idle, inside)
    return {cause: time_s for cause, time_s in total.items() if time_s > 0}


def _has_name(name: str) -> Callable[[Span], bool]:
    """Return a predicate that is true for a span with the name ``name``."""
    return lambda span: span.name == name


def _make_stop_test(lane: str) -> Callable[[Span], bool]:
    """Return a predicate for spans of the lane ``stopped``, whose names are lanes: true for a span in which the process
    of ``lane`` was stopped. The learner also counts as stopped while one of its ranks (``learner-1``, ...) is."""
    ranks = f"{lane}-" if lane == Cause.LEARNER else ""
    return lambda span: span.name == lane or bool(ranks and span.name.startswith(ranks))


def is_engine(lane: str) -> bool:
    """Return whether ``lane`` belongs to an engine: ``engine``, or ``engine-1`` and so on if a run has several."""
    return lane == "engine" or lane.startswith("engine-")
