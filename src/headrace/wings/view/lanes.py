"""The spans of a run as columns: indexed once as they come, asked for any window at any width.

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
Places = npt.NDArray[np.int64]

LANES = ("engine", "learner", "controller", "environment", "scoring", "sync", "ledger", "rollout")
"""The usual lanes, in the order they are shown; others follow by name."""
MOST_SPANS = 600
"""Of one lane that are shown one by one; beyond, its window is shown as how much of each bin they fill."""
MOST_LANES = 32


@dataclass(slots=True)
class _Kind:
    """Spans of one lane and name."""

    waits: bool
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    owners: list[EpisodeKey | None] = field(default_factory=list)
    """Their episodes."""
    columns: tuple[Column, Column, Places] | None = None
    """Starts and ends by start, and the order that sorts them; forgotten when spans come."""
    covered: tuple[Column, Column] | None = None
    """Starts and ends of what they cover together."""

    def add(self, span: Span) -> None:
        self.starts.append(span.start_s)
        self.ends.append(span.end_s)
        self.steps.append(span.step)
        self.owners.append(span.of)
        self.columns = self.covered = None

    def sorted(self) -> tuple[Column, Column, Places]:
        if self.columns is None:
            starts_S, ends_S = np.array(self.starts), np.array(self.ends)
            order = np.argsort(starts_S, kind="stable")
            self.columns = starts_S[order], ends_S[order], order
        return self.columns

    def union(self) -> tuple[Column, Column]:
        if self.covered is None:
            starts_S, ends_S, _ = self.sorted()
            self.covered = merged(starts_S, ends_S)
        return self.covered


def merged(starts_S: Column, ends_S: Column) -> tuple[Column, Column]:
    """The union of intervals that are sorted by their starts, as disjoint ones.

    >>> [edges.tolist() for edges in merged(np.array([0.0, 1.0, 3.0]), np.array([2.0, 2.5, 4.0]))]
    [[0.0, 3.0], [2.5, 4.0]]
    """
    if not len(starts_S):
        return starts_S, ends_S
    reached_S = np.maximum.accumulate(ends_S)
    opens_S = np.concatenate([[True], starts_S[1:] > reached_S[:-1]])
    return starts_S[opens_S], reached_S[np.concatenate([opens_S[1:], [True]])]


def filled(union: tuple[Column, Column], edges_B: Column) -> Column:
    """The fraction of each bin that a union covers; the result is one shorter than ``edges_B``.

    >>> filled((np.array([0.5]), np.array([2.0])), np.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [0.5, 1.0, 0.0]
    """
    starts_U, ends_U = union
    if not len(starts_U):
        return np.zeros(len(edges_B) - 1)
    times = np.ravel(np.column_stack([starts_U, ends_U]))
    lengths_U = ends_U - starts_U
    so_far = np.repeat(np.cumsum(lengths_U), 2)
    so_far[::2] -= lengths_U
    share_B: Column = np.diff(np.interp(edges_B, times, so_far)) / np.maximum(np.diff(edges_B), 1e-12)
    return share_B


class LaneIndex:
    """Every span of one life of a run."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._works: dict[str, tuple[Column, Column]] = {}

    def add(self, spans: Iterable[Span]) -> None:
        """More spans, in any order; those that end before they begin are left out."""
        for span in spans:
            if span.end_s < span.start_s:
                continue
            kind = self._kinds.get((span.lane, span.name))
            if kind is None:
                kind = self._kinds[span.lane, span.name] = _Kind(is_wait(span))
            kind.add(span)
            self._works.pop(span.lane, None)

    @property
    def num_spans(self) -> int:
        """How many it holds."""
        return sum(len(kind.starts) for kind in self._kinds.values())

    def lanes(self) -> list[str]:
        """The usual ones first."""
        present = {lane for lane, _ in self._kinds}
        known = [lane for lane in LANES if lane in present]
        engines = sorted(lane for lane in present - set(known) if lane.startswith("engine"))
        return (engines + known + sorted(present - set(known) - set(engines)))[:MOST_LANES]

    def extent(self) -> tuple[float, float] | None:
        """The first start and the last end; ``None`` without spans."""
        if not self._kinds:
            return None
        kinds = self._kinds.values()
        return min(min(kind.starts) for kind in kinds), max(max(kind.ends) for kind in kinds)

    def busy(self, lane: str, within: tuple[float, float]) -> float:
        """The fraction of ``within`` in which the lane worked."""
        return float(filled(self._work(lane), np.array(within))[0]) if within[0] < within[1] else 0.0

    def window(self, within: tuple[float, float], bins: int) -> list[dict[str, Any]]:
        """What every lane did in ``within``: per name its spans one by one, or how much of each bin they fill."""
        edges_B = np.linspace(*within, bins + 1)
        return [self._lane(lane, within, edges_B) for lane in self.lanes()]

    def _lane(self, lane: str, within: tuple[float, float], edges_B: Column) -> dict[str, Any]:
        names = sorted(name for owner, name in self._kinds if owner == lane)
        inside = {name: _inside(self._kinds[lane, name], within) for name in names}
        few = sum(len(places) for places in inside.values()) <= MOST_SPANS
        parts = [self._part(lane, name, inside[name], few, edges_B) for name in names if len(inside[name])]
        return {"lane": lane, "busy": self.busy(lane, within), "parts": parts}

    def _part(self, lane: str, name: str, inside: Places, few: bool, edges_B: Column) -> dict[str, Any]:
        kind = self._kinds[lane, name]
        part: dict[str, Any] = {"name": name, "wait": kind.waits, "count": len(inside)}
        if few:
            starts_S, ends_S, order = kind.sorted()
            own = order[inside].tolist()
            part["spans"] = [starts_S[inside].tolist(), ends_S[inside].tolist()]
            part["steps"] = [kind.steps[place] for place in own]
            part["of"] = [str(kind.owners[place] or "") for place in own]
        else:
            part["bins"] = np.round(filled(kind.union(), edges_B), 3).tolist()
        return part

    def _work(self, lane: str) -> tuple[Column, Column]:
        if lane not in self._works:
            parts = [kind.sorted() for (owner, _), kind in self._kinds.items() if owner == lane and not kind.waits]
            starts, ends = _joined([part[0] for part in parts]), _joined([part[1] for part in parts])
            order = np.argsort(starts, kind="stable")
            self._works[lane] = merged(starts[order], ends[order])
        return self._works[lane]


def _inside(kind: _Kind, within: tuple[float, float]) -> Places:
    """The places of the spans that touch a window."""
    starts_S, ends_S, _ = kind.sorted()
    until = int(np.searchsorted(starts_S, within[1]))
    return np.flatnonzero(ends_S[:until] > within[0])


def _joined(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns) if columns else np.zeros(0)
