"""An index of the spans of a run, stored in columns, for queries of any window of time at any resolution. A span is an
activity of one part of the run between two moments. A lane is a row of the timeline with the spans of one part, such as
an engine.

Shape legend: S spans of one lane, U disjoint intervals that they cover, B bins of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.types.episode import EpisodeKey
from headrace.base.types.trace import Span
from headrace.run.observe.trace import is_wait

Column = npt.NDArray[np.float64]
"""Times in seconds, or fractions."""
Places = npt.NDArray[np.int64]
"""Indices of spans."""

LANES = ("engine", "learner", "controller", "environment", "scoring", "sync", "ledger", "rollout")
"""The usual lanes in the order in which they are shown; others follow, sorted by name."""
MOST_SPANS = 600
"""Largest number of spans of a lane in a window that are listed. If there are more, the fraction of each bin that the
spans cover is returned instead."""
MOST_LANES = 32
"""Largest number of lanes that are shown; further lanes are left out."""
RESET_S = 60.0
"""The number of seconds by which a span must end before the latest end so far to show that the clock of the run was
reset, and that the span has times of the new clock. Spans of one life are written within seconds of their end, so their
order differs by less."""


@dataclass(slots=True)
class _Kind:
    """The spans of one lane with the same name, in columns; times are in seconds."""

    waits: bool
    """Whether the lane waited during these spans, and did not work."""
    starts: list[float] = field(default_factory=list)
    """Start of each span, in the order in which they were added."""
    ends: list[float] = field(default_factory=list)
    """End of each span."""
    steps: list[int] = field(default_factory=list)
    """Step of each span."""
    owners: list[EpisodeKey | None] = field(default_factory=list)
    """Episode of each span, if it has one."""
    columns: tuple[Column, Column, Places] | None = None
    """Starts and ends sorted by start, and the permutation that sorts them; ``None`` after spans were added."""
    covered: tuple[Column, Column] | None = None
    """Starts and ends of the disjoint intervals that the spans cover; ``None`` after spans were added."""

    def add(self, span: Span, moved_s: float) -> None:
        """Add a span. ``moved_s`` is the offset, in seconds, from the span's clock to the time axis of the index."""
        self.starts.append(span.start_s + moved_s)
        self.ends.append(span.end_s + moved_s)
        self.steps.append(span.step)
        self.owners.append(span.of)
        self.columns = self.covered = None

    def sorted(self) -> tuple[Column, Column, Places]:
        """Return the starts and ends of the spans in the order of their starts, and the index of each in the order in
        which they were added."""
        if self.columns is None:
            starts_S, ends_S = np.array(self.starts), np.array(self.ends)
            order = np.argsort(starts_S, kind="stable")
            self.columns = starts_S[order], ends_S[order], order
        return self.columns

    def union(self) -> tuple[Column, Column]:
        """Return the starts and ends of the disjoint intervals that the spans cover together, in order."""
        if self.covered is None:
            starts_S, ends_S, _ = self.sorted()
            self.covered = merge_intervals(starts_S, ends_S)
        return self.covered


def merge_intervals(starts_S: Column, ends_S: Column) -> tuple[Column, Column]:
    """Return the union of intervals, given as starts and ends and sorted by their starts, as disjoint intervals.

    >>> [edges.tolist() for edges in merge_intervals(np.array([0.0, 1.0, 3.0]), np.array([2.0, 2.5, 4.0]))]
    [[0.0, 3.0], [2.5, 4.0]]
    """
    if not len(starts_S):
        return starts_S, ends_S
    reached_S = np.maximum.accumulate(ends_S)
    opens_S = np.concatenate([[True], starts_S[1:] > reached_S[:-1]])
    return starts_S[opens_S], reached_S[np.concatenate([opens_S[1:], [True]])]


def fill_fractions(union: tuple[Column, Column], edges_B: Column) -> Column:
    """Return the fraction of each bin of time that a union of disjoint intervals (starts and ends) covers. The bins are
    the intervals between neighbouring ``edges_B``, so the result has one element fewer than the edges.

    >>> fill_fractions((np.array([0.5]), np.array([2.0])), np.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    starts_U, ends_U = union
    if not len(starts_U):
        return np.zeros(len(edges_B) - 1)
    # the covered time before each edge of an interval; between edges it is linear, so interpolation is exact
    times = np.ravel(np.column_stack([starts_U, ends_U]))
    lengths_U = ends_U - starts_U
    so_far = np.repeat(np.cumsum(lengths_U), 2)
    so_far[::2] -= lengths_U
    share_B: Column = np.diff(np.interp(edges_B, times, so_far)) / np.maximum(np.diff(edges_B), 1e-12)
    return share_B


class LaneIndex:
    """An index of every span of a run, from all its lives, on one monotonic clock.

    A run that is resumed on another machine, or after a reboot, continues with a clock that is behind. The spans of
    the new clock are shifted so that they follow the earlier ones.
    """

    def __init__(self, resets: int = 0) -> None:
        """Create an empty index. ``resets`` is the number of times that the clock of the run's steps went back; at most
        as many clock resets are recognised among the spans."""
        self._kinds: dict[tuple[str, str], _Kind] = {}
        """The spans of each lane and name."""
        self._busy_union: dict[str, tuple[Column, Column]] = {}
        """Starts and ends of the intervals in which each lane worked; a lane is removed when it gets spans."""
        self._resets = resets
        self._newest_s = -np.inf
        """Latest end of a span so far."""
        self.moved_s = [0.0]
        """Number of seconds by which the spans of each clock are shifted; 0 for the first clock."""

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans, which must be in the order of their file. Spans that end before they begin are left out."""
        for span in spans:
            if span.end_s < span.start_s:
                continue
            if len(self.moved_s) <= self._resets and span.end_s + self.moved_s[-1] < self._newest_s - RESET_S:
                self.moved_s.append(self._newest_s - span.start_s)
            kind = self._kinds.get((span.lane, span.name))
            if kind is None:
                kind = self._kinds[span.lane, span.name] = _Kind(is_wait(span))
            kind.add(span, self.moved_s[-1])
            self._newest_s = max(self._newest_s, span.end_s + self.moved_s[-1])
            self._busy_union.pop(span.lane, None)

    @property
    def num_spans(self) -> int:
        """Return the number of spans in the index."""
        return sum(len(kind.starts) for kind in self._kinds.values())

    def lanes(self) -> list[str]:
        """Return the names of the lanes in the order in which they are shown: engines first, then the usual ones, then
        other lanes by name; at most :data:`MOST_LANES`."""
        present = {lane for lane, _ in self._kinds}
        known = [lane for lane in LANES if lane in present]
        engines = sorted(lane for lane in present - set(known) if lane.startswith("engine"))
        return (engines + known + sorted(present - set(known) - set(engines)))[:MOST_LANES]

    def extent(self) -> tuple[float, float] | None:
        """Return the first start and the last end of all spans, in seconds; ``None`` without spans."""
        if not self._kinds:
            return None
        kinds = self._kinds.values()
        return min(min(kind.starts) for kind in kinds), max(max(kind.ends) for kind in kinds)

    def busy(self, lane: str, within: tuple[float, float]) -> float:
        """Return the fraction of the time ``within`` (start and end) in which the lane worked, waiting excluded; 0 if
        ``within`` is empty."""
        return (
            float(fill_fractions(self._find_busy_intervals(lane), np.array(within))[0])
            if within[0] < within[1]
            else 0.0
        )

    def busy_s(self, lane: str, pieces: Sequence[tuple[float, float]]) -> float:
        """Return the number of seconds that the lane worked in all intervals of ``pieces`` together."""
        return sum(self.busy(lane, piece) * (piece[1] - piece[0]) for piece in pieces)

    def window(self, edges_B: Column) -> list[dict[str, Any]]:
        """Return a JSON object for each lane with its activity between the first and the last of the increasing
        ``edges_B`` (seconds): for each name of spans, either a list of the spans or, if the lane has many, the fraction
        of each bin that they cover."""
        return [self._lane(lane, edges_B) for lane in self.lanes()]

    def _lane(self, lane: str, edges_B: Column) -> dict[str, Any]:
        """Return the JSON object of one lane for :meth:`window`."""
        within = float(edges_B[0]), float(edges_B[-1])
        names = sorted(name for owner, name in self._kinds if owner == lane)
        inside = {name: _find_overlapping(self._kinds[lane, name], within) for name in names}
        few = sum(len(places) for places in inside.values()) <= MOST_SPANS
        parts = [self._part(lane, name, inside[name], few, edges_B) for name in names if len(inside[name])]
        return {"lane": lane, "parts": parts}

    def _part(self, lane: str, name: str, inside: Places, few: bool, edges_B: Column) -> dict[str, Any]:
        """Return the JSON object of the spans of ``lane`` with the name ``name`` in a window. ``inside`` has their
        indices in the order of start. If ``few``, list the spans; otherwise return the fraction of each of the bins
        between ``edges_B`` (seconds) that the spans cover."""
        kind = self._kinds[lane, name]
        part: dict[str, Any] = {"name": name, "wait": kind.waits, "count": len(inside)}
        if few:
            starts_S, ends_S, order = kind.sorted()
            own = order[inside].tolist()
            part["spans"] = [starts_S[inside].tolist(), ends_S[inside].tolist()]
            part["steps"] = [kind.steps[place] for place in own]
            part["of"] = [str(kind.owners[place] or "") for place in own]
        else:
            part["bins"] = np.round(fill_fractions(kind.union(), edges_B), 3).tolist()
        return part

    def _find_busy_intervals(self, lane: str) -> tuple[Column, Column]:
        """Return the starts and ends of the disjoint intervals in which a lane worked, waiting excluded."""
        if lane not in self._busy_union:
            parts = [kind.sorted() for (owner, _), kind in self._kinds.items() if owner == lane and not kind.waits]
            starts, ends = _concatenate([part[0] for part in parts]), _concatenate([part[1] for part in parts])
            order = np.argsort(starts, kind="stable")
            self._busy_union[lane] = merge_intervals(starts[order], ends[order])
        return self._busy_union[lane]


def _find_overlapping(kind: _Kind, within: tuple[float, float]) -> Places:
    """Return the indices, in the order of starts, of the spans of ``kind`` that overlap the window ``within``."""
    starts_S, ends_S, _ = kind.sorted()
    until = int(np.searchsorted(starts_S, within[1]))
    return np.flatnonzero(ends_S[:until] > within[0])


def _concatenate(columns: Sequence[Column]) -> Column:
    """Concatenate ``columns``; return an empty column for an empty sequence."""
    return np.concatenate(columns) if columns else np.zeros(0)
