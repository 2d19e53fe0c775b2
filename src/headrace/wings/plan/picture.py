"""The chart of ``headrace plan --picture``: the throughput of every candidate, and the idle times of the requested, the
synchronous and the best candidate."""

from __future__ import annotations

from headrace.run.observe.svg import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, SLATE, Drawing, Panel
from headrace.wings.plan.search import PlanRow, SearchResult, make_plan_row

AGES = (SLATE, SKY, BLUE, GREEN, PURPLE, ORANGE)
"""The colours of the staleness bounds in increasing order; they repeat after the sixth bound."""


def draw_plan(result: SearchResult) -> bytes:
    """Return the chart of the plan ``result`` as an SVG file: trained tokens per second of every candidate over the
    number of generating accelerators, and the idle times of three candidates."""
    drawing = Drawing(960, 600, f"{len(result.tried)} simulated runs of {result.site.request.shape.name}")
    _draw_throughputs(drawing, result)
    _draw_idle_times(drawing, _select_rows(result))
    return drawing.svg()


def _draw_throughputs(drawing: Drawing, result: SearchResult) -> None:
    """Draw the trained tokens per second of every candidate of ``result`` into ``drawing``, over the number of
    generating accelerators."""
    count = result.site.cluster.count
    title = f"{result.site.request.shape.name} on {result.site.cluster}: {len(result.tried)} simulated runs"
    drawing.text(20, 28, title, size=15, color=INK)
    drawing.text(20, 48, "trained tokens per second, over the accelerators that generate (all: in turn with training)")
    ages = sorted({each.max_age for each in result.tried})
    colors = {age: AGES[place % len(AGES)] for place, age in enumerate(ages)}
    drawing.legend(20, 70, [(f"max_age {age}", color) for age, color in colors.items()])
    fastest = max((each.trained_tok_s for each in result.tried), default=0.0)
    panel = Panel(drawing, (90, 90, 840, 250), (1.12 * count, 1.1 * fastest))
    for each in result.tried:
        drawing.dot(panel.x(each.generation or count), panel.y(each.trained_tok_s), colors[each.max_age])
    for name, row in _select_rows(result).items():
        drawing.text(panel.x(row.generation or count) + 8, panel.y(row.trained_tok_s) - 6, name, color=INK)


def _draw_idle_times(drawing: Drawing, rows: dict[str, PlanRow]) -> None:
    """Draw the idle times of engines and learner as two bars for each of ``rows``, which are candidates by name."""
    drawing.text(20, 400, "Idle time", size=15, color=INK)
    drawing.text(120, 400, "% of the time")
    drawing.legend(240, 400, [("engines", BLUE), ("learner", ORANGE)])
    panel = Panel(drawing, (120, 415, 780, 145), (100.0, 0.0))
    for place, (name, row) in enumerate(rows.items()):
        top = panel.top + 8 + 46 * place
        drawing.text(110, top + 22, name, anchor="end", color=INK)
        for below, share, color in ((0, row.engine_idle, BLUE), (18, row.learner_idle, ORANGE)):
            drawing.bar(panel.left, top + below, panel.x(100 * share) - panel.left, 16, color)
            drawing.text(panel.x(100 * share) + 5, top + below + 13, f"{100 * share:.0f}%", size=11)


def _select_rows(result: SearchResult) -> dict[str, PlanRow]:
    """Return the rows of the three candidates that the chart labels, by label: the settings of the run file, the best
    synchronous settings and the best settings."""
    named = {"as asked": result.requested, "synchronous": result.synchronous, "best": result.best}
    return {name: make_plan_row(result.site, each) for name, each in named.items()}
