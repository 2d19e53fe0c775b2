"""What the timeline shows: any window of any lane, on a clock that begins with the first rollout."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import DataError
from headrace.base.types.observation import Account, StepRecord
from headrace.run.observe.rundata import told_account
from headrace.wings.view.run import OpenRun

MOST_BINS = 2000
MOST_STEPS = 200
"""Steps of a window that are marked one by one."""


def timeline(run: OpenRun, start: str, end: str, bins: str) -> dict[str, Any]:
    """Lanes between two moments, in seconds since the first rollout; all of the run where none are given."""
    steps = session(run.steps)
    with run.lanes() as lanes:
        extent = lanes.extent()
        if extent is None:
            return {"lanes": [], "extent": [0.0, 0.0], "window": [0.0, 0.0], "steps": [], "spans": 0}
        zero = steps[0].clock_s - steps[0].seconds - steps[0].wait_s if steps else extent[0]
        last = max(extent[1], steps[-1].clock_s if steps else extent[1])
        window = (_moment(start, 0.0) + zero, _moment(end, last - zero) + zero)
        if not window[0] < window[1]:
            raise DataError(f"the window from {start!r} to {end!r} is empty", remedy="give two moments that rise")
        count = min(MOST_BINS, max(10, int(_moment(bins, 600.0))))
        shown = lanes.window(window, count)
        account = told_account(run.summary.tree) or told_account(run.live.tree)
        for lane in shown:
            lane["busy_overall"] = _in_training(account, lane["lane"])
            _shift(lane, zero)
        return {
            "lanes": shown,
            "extent": [0.0, last - zero],
            "window": [window[0] - zero, window[1] - zero],
            "steps": _marks(steps, window, zero),
            "spans": lanes.num_spans,
        }


def _in_training(account: Account | None, lane: str) -> float | None:
    """The share of its training phase in which a lane worked, by the account that the verdict is made of; ``None``
    where the run has none."""
    return None if account is None else account.of_time(account.lanes_s.get(lane, 0.0))


def session(steps: list[StepRecord]) -> list[StepRecord]:
    """The steps since the run was last started: a resumed run begins a new clock."""
    first = 0
    for index in range(1, len(steps)):
        if steps[index].clock_s < steps[index - 1].clock_s or steps[index].wall_s < steps[index - 1].wall_s:
            first = index
    return steps[first:]


def _shift(lane: dict[str, Any], zero: float) -> None:
    for part in lane["parts"]:
        if "spans" in part:
            part["spans"] = [[round(at - zero, 6) for at in side] for side in part["spans"]]


def _marks(steps: list[StepRecord], window: tuple[float, float], zero: float) -> list[dict[str, Any]]:
    inside = [step for step in steps if window[0] <= step.clock_s <= window[1]]
    stride = -(-len(inside) // MOST_STEPS) or 1
    return [{"step": step.version, "at": step.clock_s - zero} for step in inside[::stride]]


def _moment(text: str, default: float) -> float:
    try:
        found = float(text) if text else default
    except ValueError:
        found = float("nan")
    if not abs(found) < 1e9:
        raise DataError(f"{text[:40]!r} is no number of seconds", remedy="give seconds since the first rollout")
    return found
