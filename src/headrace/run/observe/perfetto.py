"""The trace of a run for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``, in the Trace Event Format.

A *span* is what one part of the run did between two moments; its *lane* names the part. Perfetto shows processes with
threads: every lane becomes a process (``pid``), and its spans are placed on threads (``tid``), called *tracks* here, so
that overlapping spans, such as episodes, are on different tracks. Queues, throughput and reward are counters. Times are
microseconds since the first span.
"""

from __future__ import annotations

import gzip
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.base.errors import DataError, RunError
from headrace.base.types.trace import Span
from headrace.run.observe.metrics import flat
from headrace.run.observe.rundata import RunData
from headrace.run.observe.trace import is_wait

Event = dict[str, Any]
"""One event of the Trace Event Format. Its key ``ph`` is M for a name, X for a span and C for a counter."""

COUNTERS = {
    "groups": ("queue/running", "queue/ready"),
    "tokens per second": ("generated_tok_s", "trained_tok_s"),
    "reward": ("reward_mean",),
    "age of trained tokens": ("age_mean", "age_max"),
}
"""The counters of the trace by name, with the metrics that each counter shows."""
_FIRST_LANES = ("engine", "learner", "sync", "scoring", "rollout")
"""The lanes that are shown first, in this order."""


def write_trace(run: RunData, path: Path) -> int:
    """Write the trace of ``run`` to ``path`` as JSON for Perfetto, compressed if ``path`` ends in ``.gz``. Return the
    number of events, which are spans, counters and names of rows.

    Raises :class:`~headrace.base.errors.DataError` if the run has no trace, and :class:`~headrace.base.errors.RunError`
    if ``path`` cannot be written.
    """
    if not run.spans:
        reason = next((note for note in run.notes if note.startswith("trace")), "it has no span yet")
        raise DataError(
            f"{run.directory} holds no trace: {reason}", remedy="name the directory of a run that has begun"
        )
    try:
        with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
            return _write(file, events(run))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}", remedy="choose another --out") from None


def _write(file: gzip.GzipFile | BinaryIO, all_events: Iterable[Event]) -> int:
    """Write the events to ``file`` as one JSON object, one event in a line, and return their number."""
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    num_events = 0
    for event in all_events:
        file.write((b",\n" if num_events else b"") + encoder.encode(event))
        num_events += 1
    file.write(b"\n]}\n")
    return num_events


def events(run: RunData) -> Iterator[Event]:
    """Yield every event of the trace of ``run``, which must have a span: lane by lane, the spans of each track in the
    order of their start, and then the counters."""
    zero_s = min(span.start_s for span in run.spans)
    lanes: dict[str, list[Span]] = {}
    for span in run.spans:
        lanes.setdefault(span.lane, []).append(span)
    ordered = sorted(lanes, key=lambda lane: (_rank_lane(lane), lane))
    for pid, lane in enumerate(ordered, start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": lane}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for tid, track in enumerate(split_into_tracks(lanes[lane]), start=1):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"{lane} {tid}"}}
            yield from (_make_span_event(span, pid, tid, zero_s) for span in track)
    yield from _make_counter_events(run, len(ordered) + 1, zero_s)


def _rank_lane(lane: str) -> int:
    """Return the sort key of a lane: the position in :data:`_FIRST_LANES` of its name without a number (``engine-1``
    counts as ``engine``). Lanes that are not in :data:`_FIRST_LANES` get the highest key."""
    kind = lane.partition("-")[0]
    return _FIRST_LANES.index(kind) if kind in _FIRST_LANES else len(_FIRST_LANES)


def _make_span_event(span: Span, pid: int, tid: int, zero_s: float) -> Event:
    """Return ``span`` as an event on the track ``tid`` of the lane ``pid``. ``zero_s`` is the start of the first span
    of the trace, on the spans' clock; the event's times are microseconds since then."""
    arguments: Mapping[str, Any] = {"step": span.step, "of": str(span.of or "")}
    return {
        "ph": "X",
        "name": span.name,
        "cat": "wait" if is_wait(span) else "work",
        "pid": pid,
        "tid": tid,
        "ts": (span.start_s - zero_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {name: value for name, value in arguments.items() if value not in (-1, "")},
    }


def _make_counter_events(run: RunData, pid: int, zero_s: float) -> Iterator[Event]:
    """Yield the metrics of :data:`COUNTERS` after every step since ``run`` was last started, as counters of a process
    ``metrics`` with the id ``pid``. ``zero_s`` is the start of the first span, on the spans' clock."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "metrics"}}
    for record in run.session:
        numbers = flat(record)
        for name, metrics in COUNTERS.items():
            values = {metric: numbers[metric] for metric in metrics if metric in numbers}
            if values:
                time_us = (record.clock_s - zero_s) * 1e6
                yield {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": max(0.0, time_us), "args": values}


def split_into_tracks(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the spans of one lane, divided into the smallest possible number of tracks. The spans of one track are in
    order and do not overlap.

    >>> spans = [Span(lane="rollout", name="episode", start_s=s, end_s=e) for s, e in ((0, 3), (1, 2), (3, 4))]
    >>> [[(span.start_s, span.end_s) for span in track] for track in split_into_tracks(spans)]
    [[(0, 3)], [(1, 2), (3, 4)]]
    """
    tracks: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # a heap of (end of the track's last span, index of the track)
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        if free and free[0][0] <= span.start_s:
            _, index = heapq.heappop(free)
            tracks[index].append(span)
        else:
            index = len(tracks)
            tracks.append([span])
        heapq.heappush(free, (span.end_s, index))
    return tracks
