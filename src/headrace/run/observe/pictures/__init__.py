"""Pictures of a run as PNG. The only place that imports matplotlib; imported when a report is written."""

from headrace.run.observe.pictures.ages import draw_ages
from headrace.run.observe.pictures.canvas import DARK, LIGHT, Draw, Theme, render
from headrace.run.observe.pictures.reward import draw_reward
from headrace.run.observe.pictures.throughput import draw_throughput
from headrace.run.observe.pictures.timeline import draw_timeline

PICTURES: dict[str, tuple[Draw, float]] = {
    "reward": (draw_reward, 4.2),
    "timeline": (draw_timeline, 5.0),
    "throughput": (draw_throughput, 5.0),
    "ages": (draw_ages, 3.4),
}
"""Every picture of the report, in its order, with its height in inches."""

__all__ = ["DARK", "LIGHT", "PICTURES", "Draw", "Theme", "render"]
