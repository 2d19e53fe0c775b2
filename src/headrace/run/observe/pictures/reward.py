"""The reward of every step, and the held-out evaluations.

Shape legend: S steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.run.observe.pictures.canvas import Theme, say
from headrace.run.observe.rundata import RunData
from headrace.run.observe.summary import evaluations

Column = npt.NDArray[np.float64]
JOINED = 3
"""Evaluations; fewer are points that no line joins."""


def draw_reward(figure: Figure, run: RunData, theme: Theme) -> None:
    """Reward over optimizer steps."""
    axes = figure.add_subplot()
    axes.set_title("Reward")
    evals = evaluations(run.steps, run.summary)
    steps_S = np.array([step.version for step in run.steps], np.float64)
    mean_S, std_S = (_column([getattr(step, name) for step in run.steps]) for name in ("reward_mean", "reward_std"))
    if not evals and not np.isfinite(mean_S).any():
        say(axes, "no reward yet", theme)
        return
    window = max(1, len(run.steps) // 15)
    smooth_S = rolling_mean(mean_S, window)
    band_S = rolling_mean(std_S, window)
    if window > 1 and np.isfinite(band_S).any():
        label = "spread within a batch (± 1 std)"
        low_S, high_S = _inside(smooth_S - band_S, smooth_S + band_S, run)
        axes.fill_between(steps_S, low_S, high_S, color=theme.blue, alpha=0.13, lw=0, label=label)
    if window > 1:
        axes.plot(steps_S, mean_S, color=theme.blue, alpha=0.4, lw=1, label="training, each step")
        axes.plot(steps_S, smooth_S, color=theme.blue, lw=2.4, label=f"training, mean of {window} steps")
    elif run.steps:
        axes.plot(steps_S, mean_S, "o-", color=theme.blue, lw=2, ms=4, label="training, each step")
    if evals:
        x, y = zip(*evals, strict=True)
        style: dict[str, Any] = {"mfc": theme.orange, "mec": theme.ink, "mew": 0.9}
        axes.plot(
            x,
            y,
            "D--" if len(evals) >= JOINED else "D",
            color=theme.orange,
            ms=8,
            lw=1.2,
            label="held-out evaluation",
            zorder=5,
            **style,
        )
        for at, side, offset in ((0, "right", -9), (-1, "left", 9))[-len(evals) :]:
            place: dict[str, Any] = {"ha": side, "va": "center", "textcoords": "offset points", "fontweight": "bold"}
            axes.annotate(f"{evals[at][1]:.2f}", evals[at], xytext=(offset, 0), zorder=6, **place)
    last = max([1, *(step.version for step in run.steps)])
    axes.set_xlim(-0.07 * last, 1.07 * last)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(y=0.1)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)


def rolling_mean(values_S: Column, window: int) -> Column:
    """The mean of the last ``window`` values at each place, NaN left out; fewer at the beginning.

    >>> rolling_mean(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist()
    [1.0, 2.0, 3.0, 5.0]
    """
    known_S = np.isfinite(values_S)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known_S, values_S, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known_S)])
    last = np.arange(1, len(values_S) + 1)
    first = np.maximum(last - window, 0)
    count_S = counts[last] - counts[first]
    mean_S: Column = np.where(count_S > 0, (sums[last] - sums[first]) / np.maximum(count_S, 1), np.nan)
    return mean_S


def _column(values: list[float | None]) -> Column:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _inside(low_S: Column, high_S: Column, run: RunData) -> tuple[Column, Column]:
    """The band, cut at the smallest and the largest reward that was ever given."""
    least = [step.reward_min for step in run.steps if step.reward_min is not None]
    most = [step.reward_max for step in run.steps if step.reward_max is not None]
    return np.maximum(low_S, min(least, default=-np.inf)), np.minimum(high_S, max(most, default=np.inf))
