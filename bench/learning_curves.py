"""Draw the learning curves of ``headrace bench learning --json``.

    python bench/learning_curves.py FIGURES.json PICTURE.png

The picture has a row of panels for each task: the held-out reward over trained tokens, and over seconds. A line is the
mean over the seeds, and its band reaches from the worst seed to the best.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

AXES = ((0, "trained tokens"), (1, "seconds of training"))
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the learning curves of the runs in ``rows`` into the picture ``path``."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, panels = plt.subplots(len(tasks), 2, figsize=(11, 3.4 * len(tasks)), layout="constrained", squeeze=False)
    for task, beside in zip(tasks, panels, strict=True):
        runs: dict[tuple[int, str], list[list[list[float]]]] = {}
        for row in rows:
            if row["task"] == task:
                runs.setdefault((row["max_age"], row["part"]), []).append(row["curve"])
        for panel, (axis, words) in zip(beside, AXES, strict=True):
            for colour, ((age, part), curves) in zip(COLOURS, sorted(runs.items()), strict=False):
                name = "synchronous" if age == 0 else f"max_age {age}" + ("" if part == "default" else f", {part}")
                _band(panel, [np.array(curve) for curve in curves], axis, colour, f"{name} ({len(curves)} seeds)")
            panel.set_xlabel(words)
            panel.spines[["top", "right"]].set_visible(False)
        beside[0].set_ylabel(f"held-out reward, {task}")
        beside[1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _band(panel: Any, curves: list[Any], axis: int, colour: str, label: str) -> None:
    """Draw the mean of ``curves`` and the range between the worst and the best, up to the end of the shortest curve.
    ``axis`` is the column of the horizontal axis: 0 for tokens, 1 for seconds."""
    at = np.linspace(0.0, min(curve[-1, axis] for curve in curves), 200)
    values = np.array([np.interp(at, curve[:, axis], curve[:, 2]) for curve in curves])
    panel.plot(at, values.mean(axis=0), color=colour, label=label)
    panel.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)


if __name__ == "__main__":
    figures, picture = map(Path, sys.argv[1:])
    found = json.loads(figures.read_text("utf-8"))["rows"]
    draw([row for row in found if "curve" in row], picture)
