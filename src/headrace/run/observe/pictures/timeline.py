"""What every lane did, when: the whole run, and a few steps from its middle.

Shape legend: B bins of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from headrace.base.types.observation import Account
from headrace.base.types.trace import Span
from headrace.run.observe.pictures.canvas import Theme, say, time_unit
from headrace.run.observe.rundata import RunData
from headrace.run.observe.trace import Interval, busy, coverage, intersection, is_wait, union
from headrace.run.observe.words import percent

_LANES = ("engine", "learner", "controller", "environment", "scoring", "sync", "ledger", "rollout")
_MOST_LANES = 10
_BINS = 900
_STEPS_IN_ZOOM = 5


def draw_timeline(figure: Figure, run: RunData, theme: Theme) -> None:
    """Two strips of lanes, one above the other; one where the run is no longer than the zoom."""
    lanes = lanes_of(run.spans)
    if not lanes or run.loop[0] >= run.loop[1]:
        axes = figure.add_subplot()
        axes.set_title("Timeline")
        say(axes, "no trace", theme)
        return
    within = zoom_window(run)
    if within == run.loop:
        zoom = figure.add_subplot()
        zoom.set_title("Timeline: the whole run")
        _shares(zoom, run, lanes, theme)
    else:
        whole, zoom = figure.subplots(2, 1, height_ratios=(1, 1.25))
        whole.set_title("Timeline: the whole run")
        _strips(whole, run, lanes, within, theme)
        zoom.set_title(f"Timeline: {_steps_in(run, within)}, the framed part above")
    _bars(zoom, run, lanes, within, theme)
    handles = [Patch(color=_color(lane, name, theme), label=label) for lane, name, label in _legend(run.spans, within)]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=9, handlelength=1.2)


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that have spans, the usual ones first."""
    present = {span.lane for span in spans}
    known = [lane for lane in _LANES if lane in present]
    return (known + sorted(present - set(_LANES)))[:_MOST_LANES]


def zoom_window(run: RunData) -> Interval:
    """About five optimizer steps in the middle of the run; all of it where it has no more."""
    start, end = run.loop
    starts = [left for left, _ in training(run.spans, run.loop).values()]
    if len(starts) <= _STEPS_IN_ZOOM:
        return start, end
    first = (len(starts) - _STEPS_IN_ZOOM) // 2
    return starts[first], starts[first + _STEPS_IN_ZOOM]


def training(spans: Iterable[Span], within: Interval) -> dict[int, Interval]:
    """When each optimizer step that touches ``within`` began and ended its computing, in the order of the steps."""
    steps: dict[int, Interval] = {}
    for span in spans:
        other = span.lane != "learner" or is_wait(span) or span.name in ("snapshot", "save") or span.step < 0
        if other or span.end_s <= within[0] or span.start_s >= within[1]:
            continue
        left, right = steps.get(span.step, (span.start_s, span.end_s))
        steps[span.step] = min(left, span.start_s), max(right, span.end_s)
    return dict(sorted(steps.items()))


def _strips(axes: Any, run: RunData, lanes: list[str], framed: Interval, theme: Theme) -> None:
    start, end = run.loop
    unit, unit_name = time_unit(end - start)
    edges_B = np.linspace(start, end, _BINS + 1)
    for row, lane in enumerate(lanes):
        image = np.empty((1, _BINS, 4))
        image[..., :3] = to_rgb(_color(lane, "", theme))
        image[..., 3] = coverage(busy(run.spans, lane), edges_B)
        extent = (0, (end - start) / unit, row + 0.36, row - 0.36)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest", zorder=2)
    _rows(axes, lanes)
    _shares(axes, run, lanes, theme)
    left, right = ((edge - start) / unit for edge in framed)
    axes.axvspan(left, right, fill=False, ec=theme.ink, lw=1.2, zorder=6)
    axes.set_xlim(0, (end - start) / unit)
    axes.set_xlabel(f"{unit_name} since the first rollout")


def _shares(axes: Any, run: RunData, lanes: list[str], theme: Theme) -> None:
    place = {"textcoords": "offset points", "va": "center", "color": theme.faint, "fontsize": 9}
    account = run.account or Account()
    for row, lane in enumerate(lanes):
        share = account.of_time(account.lanes_s.get(lane, 0.0))
        anchor = {"xy": (1, row), "xycoords": ("axes fraction", "data"), "xytext": (6, 0)}
        axes.annotate(f"{percent(share)} busy", annotation_clip=False, **anchor, **place)


def _bars(axes: Any, run: RunData, lanes: list[str], within: Interval, theme: Theme) -> None:
    zero, length = run.loop[0], within[1] - within[0]
    thinnest = length / 500
    shown = [span for span in run.spans if span.start_s < within[1] and span.end_s > within[0]]
    for row, lane in enumerate(lanes):
        mine = [span for span in shown if span.lane == lane]
        for name in sorted({span.name for span in mine}, key=_painted):
            pieces = _drawn([span for span in mine if span.name == name], within, thinnest)
            boxes = [(left - zero, right - left) for left, right in pieces]
            axes.broken_barh(boxes, (row - 0.36, 0.72), color=_color(lane, name, theme), lw=0)
    for step, (began, ended) in training(shown, within).items():
        left, right = max(began, within[0]), min(ended, within[1])
        if "learner" in lanes and right - left > 0.055 * length:
            place: dict[str, Any] = {"ha": "center", "va": "center", "color": "#1b2330", "fontsize": 8.5}
            axes.text((left + right) / 2 - zero, lanes.index("learner"), f"step {step + 1}", **place)
    _rows(axes, lanes)
    axes.set_xlim(within[0] - zero, within[1] - zero)
    axes.set_xlabel("seconds since the first rollout")


def _painted(name: str) -> tuple[int, str]:
    """Waits first, so that work lies over them; commits last, so that nothing hides them."""
    return (0 if name.startswith("wait") else 2 if name == "commit" else 1), name


def _drawn(spans: list[Span], within: Interval, thinnest: float) -> list[Interval]:
    """The spans as bars: cut at the window, wide enough to be seen, and one where they touch."""
    pieces = [(span.start_s, max(span.end_s, span.start_s + thinnest)) for span in spans]
    return intersection(union(pieces), [within])


def _rows(axes: Any, lanes: list[str]) -> None:
    axes.set_yticks(range(len(lanes)), [_plain(lane) for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _legend(spans: Iterable[Span], within: Interval) -> list[tuple[str, str, str]]:
    """(lane, name, words) of every kind of bar in the window, a wait only once."""
    shown = {(span.lane, span.name): span for span in spans if span.start_s < within[1] and span.end_s > within[0]}
    order = sorted(
        shown, key=lambda key: (is_wait(shown[key]), _LANES.index(key[0]) if key[0] in _LANES else 9, key[1])
    )
    entries: dict[str, tuple[str, str, str]] = {}
    for lane, name in order:
        words = "waiting" if is_wait(shown[lane, name]) else _plain(name.replace("_", " "))
        entries.setdefault(f"{lane if lane not in _LANES else ''}{words}", (lane, name, words))
    return list(entries.values())[:18]


def _plain(text: str) -> str:
    """Short, and in letters that every font has."""
    return text.encode("ascii", "backslashreplace").decode()[:18]


def _color(lane: str, name: str, theme: Theme) -> str:
    if name.startswith("wait"):
        return theme.wait
    own = {
        ("learner", "snapshot"): theme.purple,
        ("learner", "save"): theme.faint,
        ("learner", "optim_step"): theme.brown,
        ("sync", "publish"): theme.pale,
        ("engine", "commit"): theme.red,
        ("sync", "commit"): theme.red,
    }
    usual = {
        "engine": theme.blue,
        "learner": theme.orange,
        "controller": theme.red,
        "environment": theme.brown,
        "scoring": theme.green,
        "sync": theme.sky,
        "rollout": theme.slate,
    }
    return own.get((lane, name), usual.get(lane, theme.faint))


def _steps_in(run: RunData, within: Interval) -> str:
    inside = [step.version for step in run.session if within[0] < step.clock_s <= within[1]]
    return f"steps {inside[0]} to {inside[-1]}" if inside else "a part of the middle"
