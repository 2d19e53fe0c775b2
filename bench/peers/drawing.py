"""Draw the result of ``compare.py`` in three panels: tokens per second, memory, and accuracy over time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"headrace": "#0072B2", "trl": "#D55E00"}
NAMES = {"headrace": "Headrace", "trl": "TRL GRPOTrainer"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw ``result``, a decoded file of ``compare.py``, into the picture ``path``. Bars are medians, and
    dots are the pairs."""
    tasks = list(dict.fromkeys(row["task"] for row in result["rows"]))
    figure, (speed, memory, race) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for panel, key, title in (
        (speed, "tok_s", "trained tokens/s, relative to TRL"),
        (memory, "memory_mb", "peak memory, MB"),
    ):
        for index, task in enumerate(tasks):
            pairs = [row for row in result["rows"] if row["task"] == task]
            base = statistics.median(row["trl"][key] for row in pairs) if key == "tok_s" else 1.0
            for shift, side in ((-0.2, "headrace"), (0.2, "trl")):
                values = [row[side][key] / base for row in pairs]
                label = NAMES[side] if not index else None
                panel.bar(index + shift, statistics.median(values), 0.38, color=COLOURS[side], label=label)
                panel.scatter([index + shift] * len(values), values, color="black", s=10, zorder=3)
        panel.set_xticks(range(len(tasks)), tasks)
        panel.set_title(title)
    speed.legend(frameon=False, loc="upper left")
    for row in result["rows"]:
        for side, colour in COLOURS.items():
            points = row[side]["curve"]
            race.plot([at_s for at_s, _ in points], [right for _, right in points], color=colour, alpha=0.8)
    race.set_title("held-out accuracy of the demo")
    race.set_xlabel("seconds of training")
    for panel in (speed, memory, race):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
