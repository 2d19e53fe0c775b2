"""How fast both sides were, and what stood between them.

Shape legend: S steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from headrace.run.observe.pictures.canvas import Theme, say, time_unit
from headrace.run.observe.pictures.reward import rolling_mean
from headrace.run.observe.rundata import RunData

Column = npt.NDArray[np.float64]


def draw_throughput(figure: Figure, run: RunData, theme: Theme) -> None:
    """Tokens per second of engine and learner, and groups in the queues, over time."""
    steps = run.session
    window = max(1, len(steps) // 30)
    over = f", mean of {window} steps" if window > 1 else ""
    speed, queue = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    speed.set_title(f"Throughput{over}")
    queue.set_title(f"Groups in flight{over}")
    if not steps:
        say(speed, "no step yet", theme)
        say(queue, "no step yet", theme)
        return
    start = run.loop[0]
    time_S = np.array([step.clock_s - start for step in steps])
    unit, unit_name = time_unit(float(time_S[-1]))
    before = run.steps[len(run.steps) - len(steps) - 1].generated_tokens if len(steps) < len(run.steps) else 0
    generated_S = np.array([step.generated_tokens - before for step in steps], np.float64)
    trained_S = np.cumsum([step.trained_tokens for step in steps], dtype=np.float64)
    sides = (("generated", generated_S, theme.blue), ("trained", trained_S, theme.orange))
    marker = "o" if len(steps) < 3 else ""
    for name, tokens_S, color in sides:
        rate_S = _rate(tokens_S, time_S, window)
        speed.plot(time_S / unit, rate_S, color=color, lw=2, marker=marker, label=name)
    speed.set_ylabel("tokens per second")
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    lines = (("running", theme.green, "-"), ("ready", theme.purple, "-"), ("submitted", theme.faint, ":"))
    for name, color, line in lines:
        counts_S = rolling_mean(np.array([getattr(step.queue, name) for step in steps], np.float64), window)
        queue.plot(time_S / unit, counts_S, color=color, lw=1.8, ls=line, marker=marker, label=name)
    queue.set_ylabel("groups")
    queue.set_xlabel(f"{unit_name} since the first rollout")
    queue.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    for axes in (speed, queue):
        axes.set_xlim(0, 1.01 * time_S[-1] / unit)
        axes.set_ylim(0, 1.12 * max(1.0, axes.dataLim.y1))
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.2, fontsize=9)


def _rate(tokens_S: Column, time_S: Column, window: int) -> Column:
    """Tokens per second over the last ``window`` steps at each step; both columns count from 0."""
    tokens, time = np.concatenate([[0.0], tokens_S]), np.concatenate([[0.0], time_S])
    last = np.arange(1, len(time))
    first = np.maximum(last - window, 0)
    passed_S = time[last] - time[first]
    rate_S: Column = np.where(passed_S > 0, (tokens[last] - tokens[first]) / np.maximum(passed_S, 1e-9), np.nan)
    return rate_S
