"""The JSON answer to the timeline page: any window of all lanes, on a clock that begins with the first rollout. A lane
has the spans of one part of the run; a span is an activity between two moments.

A run that was resumed has several lives. The timeline shows one after the other, without the pauses between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.base.errors import DataError
from headrace.base.types.observation import Account, StepRecord
from headrace.run.observe.rundata import find_recorded_account, split_into_lives
from headrace.wings.view.lanes import Column, LaneIndex
from headrace.wings.view.run import OpenRun

MOST_BINS = 2000
MOST_STEPS = 200
"""Largest number of steps of a window that are marked."""
PAUSE_S = 1e-9
"""Length of a pause between two lives on the timeline: almost nothing, but interpolation needs an increasing clock."""


class RunClock:
    """A conversion between the clock of a run's spans and the run's running time, which omits the pauses between
    lives.

    >>> clock = RunClock([(100.0, 110.0), (500.0, 520.0)])
    >>> clock.to_running_time([105.0, 300.0]), clock.length
    ([5.0, 10.0], 30.0)
    >>> clock.pieces(5.0, 15.0)
    [(105.0, 110.0), (500.0, 505.0)]
    """

    def __init__(self, intervals: Sequence[tuple[float, float]]) -> None:
        """Create the clock. ``intervals`` has the beginning and the end of every life on the spans' clock, in order."""
        lengths = [end - start for start, end in intervals]
        self.starts = [sum(lengths[:place]) for place in range(len(lengths))]
        """Running time at the beginning of each life, in seconds."""
        self.length = sum(lengths)
        self._intervals = list(intervals)
        """The beginning and the end of every life on the spans' clock."""
        self._span_times = np.ravel(intervals)
        """The beginnings and ends of the lives on the spans' clock, in order."""
        ends = [start + length for start, length in zip(self.starts, lengths, strict=True)]
        self._run_times = np.ravel(np.column_stack([[start + PAUSE_S for start in self.starts], ends]))
        """The running time at each of these moments."""
        self._run_times[0] = 0.0

    def to_running_time(self, moments_s: Sequence[float]) -> list[float]:
        """Convert moments on the spans' clock to running time in seconds, rounded to a microsecond. A moment within a
        pause is converted to the end of the life before the pause."""
        found: list[float] = np.round(np.interp(moments_s, self._span_times, self._run_times), 6).tolist()
        return found

    def to_span_clock(self, run_S: Column) -> Column:
        """Convert running time in seconds to moments on the spans' clock."""
        moments: Column = np.interp(run_S, self._run_times, self._span_times)
        return moments

    def pieces(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the part of the run between the running times ``start`` and ``end`` as intervals on the spans' clock,
        at most one for each life."""
        found = []
        for begins, (first, last) in zip(self.starts, self._intervals, strict=True):
            left, right = max(start, begins), min(end, begins + last - first)
            if left < right:
                found.append((first + left - begins, first + right - begins))
        return found


def timeline(run: OpenRun, start: str, end: str, bins: str) -> dict[str, Any]:
    """Return the activity of the lanes between ``start`` and ``end``, in seconds since the first rollout; an empty text
    means the beginning or the end of the run. For a lane with too many spans to list, the window is divided into about
    ``bins`` bins. All three are texts from a request. Raises :class:`~headrace.base.errors.DataError` for texts that
    are not numbers, and for an empty window."""
    steps = run.steps
    with run.lanes() as lanes:
        extent = lanes.extent()
        if extent is None:
            return {"lanes": [], "extent": [0.0, 0.0], "window": [0.0, 0.0], "steps": [], "lives": [], "spans": 0}
        moved = _align_steps(steps, lanes)
        intervals = [(life[0][0] - life[0][1].seconds - life[0][1].wait_s, life[-1][0]) for life in moved] or [extent]
        intervals[-1] = intervals[-1][0], max(intervals[-1][1], extent[1])
        clock = RunClock(intervals)
        window = (_parse_moment(start, 0.0), _parse_moment(end, clock.length))
        if not window[0] < window[1]:
            raise DataError(f"the window from {start!r} to {end!r} is empty", remedy="give two moments that rise")
        edges_B = np.linspace(*window, min(MOST_BINS, max(10, int(_parse_moment(bins, 600.0)))) + 1)
        shown = lanes.window(clock.to_span_clock(edges_B))
        account = find_recorded_account(run.summary.tree) or find_recorded_account(run.live.tree)
        pieces = clock.pieces(*window)
        length = sum(last - first for first, last in pieces) or 1.0
        for lane in shown:
            lane["busy"] = lanes.busy_s(lane["lane"], pieces) / length
            lane["busy_overall"] = _get_training_share(account, lane["lane"])
            lane["parts"] = [part for part in lane["parts"] if _convert_spans(part, clock)]
        ended = [each for life in moved for each in life]
        moments = clock.to_running_time([at for at, _ in ended])
        marks = [{"step": step.version, "at": at} for at, (_, step) in zip(moments, ended, strict=True)]
        inside = [mark for mark in marks if window[0] <= mark["at"] <= window[1]]
        return {
            "lanes": shown,
            "extent": [0.0, clock.length],
            "window": [*window],
            "steps": _thin_out(inside),
            "lives": [
                {"step": life[0][1].version, "at": at} for life, at in list(zip(moved, clock.starts, strict=False))[1:]
            ],
            "spans": lanes.num_spans,
        }


def _thin_out(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most about :data:`MOST_STEPS` of the marks of steps, evenly spaced. The last mark is always included,
    because the page first shows the end of the run."""
    stride = -(-len(marks) // MOST_STEPS) or 1
    return marks[::stride] + (marks[-1:] if (len(marks) - 1) % stride else [])


def _align_steps(steps: Sequence[StepRecord], lanes: LaneIndex) -> list[list[tuple[float, StepRecord]]]:
    """Return the steps of every life, each with the moment of its end on the monotonic clock of ``lanes``."""
    found: list[list[tuple[float, StepRecord]]] = []
    resets, before_s = 0, -np.inf
    for life in split_into_lives(steps):
        resets += life[0].clock_s < before_s
        before_s = life[-1].clock_s
        moved_s = lanes.moved_s[min(resets, len(lanes.moved_s) - 1)]
        found.append([(step.clock_s + moved_s, step) for step in life])
    return found


def _get_training_share(account: Account | None, lane: str) -> float | None:
    """Return the fraction of the training phase in which a lane worked, from the account behind the verdict; ``None``
    if the run has no account."""
    return None if account is None else account.to_fraction(account.lanes_s.get(lane, 0.0))


def _convert_spans(part: dict[str, Any], clock: RunClock) -> bool:
    """Convert the spans of ``part`` (the spans of a lane with one name) to running time in place, and drop the spans
    within a pause between two lives. Return whether the part still has data; a part with fractions of bins always
    has."""
    if "spans" not in part:
        return True
    starts, ends = (clock.to_running_time(side) for side in part["spans"])
    momentary = [start == end for start, end in zip(*part["spans"], strict=True)]
    kept = [place for place, end in enumerate(ends) if starts[place] < end or momentary[place]]
    part["spans"] = [[side[place] for place in kept] for side in (starts, ends)]
    part["count"] = len(kept)
    for name in ("steps", "of"):
        part[name] = [part[name][place] for place in kept]
    return bool(kept)


def _parse_moment(text: str, default: float) -> float:
    """Parse ``text`` as a number of seconds; return ``default`` for an empty text. Raises
    :class:`~headrace.base.errors.DataError` for other text."""
    try:
        found = float(text) if text else default
    except ValueError:
        found = float("nan")
    if not abs(found) < 1e9:
        raise DataError(f"{text[:40]!r} is not a number of seconds", remedy="give seconds since the first rollout")
    return found
