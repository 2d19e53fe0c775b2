"""How old the tokens were when they were trained."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.run.observe.pictures.canvas import Theme, say
from headrace.run.observe.rundata import RunData
from headrace.run.observe.summary import age_histogram


def draw_ages(figure: Figure, run: RunData, theme: Theme) -> None:
    """A histogram over ages, with the bound where the configuration has one."""
    axes = figure.add_subplot()
    axes.set_title("Age of the trained tokens")
    ages = age_histogram(step.ages for step in run.steps)
    total = sum(ages.values())
    if not total:
        say(axes, "nothing trained yet", theme)
        return
    shares = [100 * tokens / total for tokens in ages.values()]
    bars = axes.bar(list(ages), shares, width=0.72, color=theme.blue)
    if len(ages) <= 16:
        labels = [f"{share:.1f}%" if share < 10 else f"{share:.0f}%" for share in shares]
        axes.bar_label(bars, labels, padding=3, color=theme.ink, fontsize=9)
    bound = run.setting("flow", "max_age")
    high = max(ages)
    if isinstance(bound, int) and not isinstance(bound, bool) and high <= bound <= 2 * high + 8:
        axes.axvline(bound + 0.5, color=theme.red, lw=1.6, ls="--")
        place: dict[str, Any] = {"ha": "right", "va": "top", "color": theme.red}
        axes.annotate(f"bound: max_age = {bound}", (bound + 0.5, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(-6, 0), textcoords="offset points", **place)  # fmt: skip
        high = bound
    axes.set_xlim(-0.9, max(high, 3) + 0.9)
    axes.set_ylim(0, max(shares) * 1.18)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("age: learner version when trained − version that sampled the token")
    axes.set_ylabel("share of trained tokens (%)")
