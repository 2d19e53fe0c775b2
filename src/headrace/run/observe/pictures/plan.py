"""What a plan has tried: how fast every candidate was, and who waited in those that matter."""

from __future__ import annotations

from matplotlib.figure import Figure

from headrace.run.observe.pictures.canvas import LIGHT, Theme, render
from headrace.wings.plan.search import SearchResult, Tried, row_of


def plan_png(found: SearchResult) -> bytes:
    """The picture of a plan."""
    return render(draw_plan, found, LIGHT, 6.4)


def draw_plan(figure: Figure, found: SearchResult, theme: Theme) -> None:
    """Trained tokens a second of every candidate over the accelerators that generate, and idle time of three runs."""
    speed, idle = figure.subplots(2, 1, height_ratios=(3, 2))
    colors = (theme.faint, theme.sky, theme.blue, theme.green, theme.purple, theme.orange)
    speed.set_title(f"{found.site.asked.shape.name} on {found.site.cluster}: {len(found.tried)} simulated runs")
    for place, age in enumerate(sorted({each.max_age for each in found.tried})):
        rows = [each for each in found.tried if each.max_age == age]
        speed.scatter(
            [each.generation or found.site.cluster.count for each in rows],
            [each.trained_tok_s for each in rows],
            color=colors[place % len(colors)], s=30, label=f"max_age {age}",
        )  # fmt: skip
    three = _three(found)
    for name, row in three.items():
        at = (row.generation or found.site.cluster.count, row.trained_tok_s)
        speed.annotate(name, at, xytext=(6, 6), textcoords="offset points", color=theme.ink, fontsize=9)
    speed.set_xlabel("accelerators that generate (all of them: in turn with training)")
    speed.set_ylabel("trained tokens per second")
    speed.set_ylim(0, None)
    speed.set_xlim(0, 1.12 * found.site.cluster.count)
    speed.legend(loc="upper left", fontsize=8)
    idle.set_title("Idle time")
    sides = ((0.2, "engines", theme.blue), (-0.2, "learner", theme.orange))
    for beside, side, color in sides:
        shares = [100 * (row.engine_idle if side == "engines" else row.learner_idle) for row in three.values()]
        bars = idle.barh([place + beside for place in range(len(three))], shares, height=0.36, color=color, label=side)
        idle.bar_label(bars, [f"{share:.0f}%" for share in shares], padding=3, fontsize=9)
    idle.set_yticks(range(len(three)), list(three))
    idle.set_xlim(0, 110)
    idle.set_xlabel("% of the time")
    idle.grid(visible=False, axis="y")
    idle.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8)


def _three(found: SearchResult) -> dict[str, Tried]:
    named = {"as asked": found.asked, "synchronous": found.synchronous, "best": found.best}
    return {name: row_of(found.site, each) for name, each in named.items()}
