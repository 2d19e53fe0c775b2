"""The comparison as one picture: bars in four panels, a line for each recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.run.observe.pictures import LIGHT, Theme, render
from headrace.wings.compare.rows import RecipeRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_IN, ROW_IN = 1.6, 0.34
"""Inches for the titles, and for each recipe."""

Values = Callable[[RecipeRow], float | None]


def compare_png(rows: Sequence[RecipeRow]) -> bytes:
    """The picture of all rows that have figures, the first on top."""
    shown = [row for row in rows if row.status != "failed"]
    return render(_draw, shown, LIGHT, HEAD_IN + ROW_IN * max(4, len(shown)))


def _draw(figure: Figure, rows: Sequence[RecipeRow], theme: Theme) -> None:
    panels = figure.subplots(1, 4, sharey=True, width_ratios=(3, 2.4, 2, 2))
    speed, idle, age, gain = panels
    speeds: dict[str, tuple[Values, str]] = {
        "generated": (lambda row: row.generated_tok_s, theme.sky),
        "trained": (lambda row: row.trained_tok_s, theme.blue),
    }
    _bars(speed, rows, speeds, "tokens per second")
    sides: dict[str, tuple[Values, str]] = {
        "engine": (lambda row: _hundred(row.engine_idle_frac), theme.sky),
        "learner": (lambda row: _hundred(row.learner_idle_frac), theme.blue),
    }
    _bars(idle, rows, sides, "idle, % of the time")
    ages: dict[str, tuple[Values, str]] = {
        "oldest": (lambda row: row.age_max, theme.wait),
        "mean": (lambda row: row.age_mean, theme.orange),
    }
    _bars(age, rows, ages, "age of tokens", beside=False)
    _bars(gain, rows, {"": (lambda row: row.gain_per_minute, theme.green)}, "gain a minute")
    speed.set_yticks(range(len(rows)), [row.recipe for row in rows])
    speed.set_ylim(max(4, len(rows)) - 0.5, -0.5)


def _bars(
    axes: Any, rows: Sequence[RecipeRow], series: dict[str, tuple[Values, str]], title: str, *, beside: bool = True
) -> None:
    """One bar for each of ``series`` and row: beside each other, or the second in the first."""
    height = 0.8 / len(series) if beside else 0.8
    for place, (name, (values, color)) in enumerate(series.items()):
        shift = (place - (len(series) - 1) / 2) * height if beside else 0.0
        widths = [values(row) or 0.0 for row in rows]
        thin = 1.0 if beside else 1.0 - 0.45 * place
        axes.barh([at + shift for at in range(len(rows))], widths, height=height * thin, color=color, label=name)
    axes.set_title(title, fontsize=10)
    axes.grid(visible=False, axis="y")
    if len(series) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, -0.11 if len(rows) > 8 else -0.3), ncols=2, fontsize=8)


def _hundred(value: float | None) -> float | None:
    return None if value is None else 100 * value
