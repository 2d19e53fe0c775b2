"""The files of a comparison: ``compare.json``, ``compare.md`` and the bar chart ``compare.svg``, in its directory.

The bar chart has four panels side by side, with one line of bars per recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.base.errors import RunError
from headrace.run.observe.svg import BLUE, GREEN, INK, ORANGE, SKY, SLATE, Drawing, Panel
from headrace.run.session.directory import write_json
from headrace.wings.bench.base import Report, make_report
from headrace.wings.compare.rows import RecipeRow
from headrace.wings.compare.running import RecipeComparison
from headrace.wings.compare.tables import make_document


def make_comparison_report(comparison: RecipeComparison) -> Report:
    """Return ``comparison`` as a report in the format of benchmarks: its rows as JSON objects, no targets, and a
    description of this machine."""
    return make_report([msgspec.to_builtins(row) for row in comparison.rows], [])


def write(comparison: RecipeComparison) -> None:
    """Write ``compare.json``, ``compare.md`` and ``compare.svg`` into the directory of ``comparison``.

    Raises :class:`~headrace.base.errors.RunError` if a file cannot be written.
    """
    try:
        write_json(comparison.directory / "compare.json", make_comparison_report(comparison))
        (comparison.directory / "compare.md").write_text(
            make_document(comparison.base, comparison.rows), encoding="utf-8"
        )
        (comparison.directory / "compare.svg").write_bytes(draw_comparison(comparison.rows))
    except OSError as error:
        remedy = "make room on that disk; the runs themselves are not affected, and the same command continues"
        raise RunError(f"{comparison.directory} cannot be written: {error.strerror}", remedy=remedy) from None


WIDTH, HEAD, ROW, NAMES, GAP = 1120, 74, 30, 150, 26
"""Sizes in pixels: the picture's width, the height above the bars, the height of a recipe's line, the width of the
names, and the gap between panels."""

Values = Callable[[RecipeRow], float | None]
"""A function that returns the value of a bar for a row; ``None`` if it is unknown."""
PANELS: tuple[tuple[str, float, tuple[tuple[str, Values, str], ...]], ...] = (
    ("tokens per second", 3, (
        ("generated", lambda row: row.generated_tok_s, SKY), ("trained", lambda row: row.trained_tok_s, BLUE),
    )),
    ("idle, % of the time", 2.4, (
        ("engine", lambda row: _to_percent(row.engine_idle_frac), SKY),
        ("learner", lambda row: _to_percent(row.learner_idle_frac), BLUE),
    )),
    ("age of tokens", 2, (("oldest", lambda row: row.age_max, SLATE), ("mean", lambda row: row.age_mean, ORANGE))),
    ("gain a minute", 2, (("", lambda row: row.gain_per_minute, GREEN),)),
)  # fmt: skip
"""Title, relative width and series of each panel; a series is a label, a function of the row, and a colour."""


def draw_comparison(rows: Sequence[RecipeRow]) -> bytes:
    """Return the bar chart of the comparison as an SVG file: a line of bars in each of four panels for every row whose
    run has not failed."""
    shown = [row for row in rows if row.status != "failed"]
    drawing = Drawing(WIDTH, HEAD + ROW * max(1, len(shown)) + 34, "recipes compared by speed, idle time, age and gain")
    for place, row in enumerate(shown):
        drawing.text(NAMES - 12, HEAD + ROW * place + 20, row.recipe, anchor="end", color=INK)
    panels_width = WIDTH - NAMES - GAP * len(PANELS)
    left: float = NAMES
    for title, share, series in PANELS:
        width = panels_width * share / sum(panel[1] for panel in PANELS)
        drawing.text(left, 26, title, size=14, color=INK)
        drawing.legend(left, 50, [(words, color) for words, _, color in series if words])
        _draw_bars(drawing, (left, width), shown, series)
        left += width + GAP
    return drawing.svg()


def _draw_bars(
    drawing: Drawing,
    extent: tuple[float, float],
    rows: Sequence[RecipeRow],
    series: Sequence[tuple[str, Values, str]],
) -> None:
    """Draw the bars of one panel: for each row, one bar for each of ``series`` (label, function of the row, colour).
    ``extent`` is (left edge, width) of the panel in pixels. The panel's scale ends slightly above the largest value."""
    largest = max((values(row) or 0.0 for row in rows for _, values, _ in series), default=0.0)
    panel = Panel(drawing, (extent[0], HEAD, extent[1], ROW * max(1, len(rows))), (1.08 * largest, 0.0))
    height = 20 / len(series)
    for line, row in enumerate(rows):
        for below, (_, values, color) in enumerate(series):
            width = panel.x(values(row) or 0.0) - panel.left
            drawing.bar(panel.left, HEAD + ROW * line + 6 + height * below, width, height - 1, color)


def _to_percent(value: float | None) -> float | None:
    """Return a fraction in percent; ``None`` for ``None`` (unknown)."""
    return None if value is None else 100 * value
