"""The process that measures one version of the code; it imports nothing of this checkout.

    python side.py PACKAGE DIRECTORY

``PACKAGE`` is where that version keeps its benchmarks, for example ``headrace.wings.bench``. Every line of the input
names a benchmark, ``sync`` or ``loop``, and a turn; the answer is a line ``{"ok": {figure: value}}``. All figures are
rates: larger is better.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

STEPS = 40
"""Number of steps of each run of the demo."""
SLOW_STEPS = 12
"""Number of steps of each run with a slow reward."""
VERSIONS, COMMITS = 6, 100
"""Number of versions per transport and codec, and of commits beside decoding sequences."""


def measure_sync(bench: str) -> dict[str, float]:
    """Publish, stage and commit a model of 28M parameters through every transport with every codec; return the rates.
    ``bench`` is the package of the benchmarks."""
    module: Any = import_module(f"{bench}.sync")
    module.FULL = (replace(module.FULL[0], rounds=VERSIONS, commits=COMMITS),)
    for name in ("_broadcasts", "_measure_broadcasts"):  # the name differs by version; it measures the library Gloo
        setattr(module, name, lambda *_: ([], []))  # no rows and no targets; older versions ignore the result
    figures: dict[str, float] = {}
    for row in module.measure(lambda line: None).rows:
        if "transport" in row:
            name = f"{row['transport']}, {row['codec']}"
            figures |= {f"{name}: {key}": 1 / row[f"{key}_s"] for key in ("exposed", "announce", "stage")}
        elif "p50_ms" in row:
            figures["commit gap, median"] = 1 / row["p50_ms"]
    return figures


class DemoRuns:
    """Runs of the demo, whose model is built once."""

    def __init__(self, bench: str, directory: Path) -> None:
        """Create the runs without a model. ``bench`` is the package of the benchmarks, and ``directory`` the place of
        the runs."""
        self._module = import_module(f"{bench}.loop")
        """The benchmark ``loop`` of the measured version."""
        self._directory = directory
        self._demo: Any = None
        """The demo; None before the first measurement builds it."""

    def measure(self, turn: int) -> dict[str, float]:
        """Train the demo, and train it with a reward that takes 50 to 500 ms, with the seed ``turn``; return the
        rates."""
        if self._demo is None:
            self._demo = self._module.build_demo(self._directory / "demo", seed=0)
        fast = self._run(turn, "fast", f"run.steps={STEPS}", f"run.seed={turn}")
        reward = Path(__file__).with_name("slow_reward.py")
        slow = self._run(turn, "slow", f"run.steps={SLOW_STEPS}", f"run.seed={turn}", f"env.reward={reward}:slow_sum")
        return {"demo, trained tok/s": fast, "slow reward, trained tok/s": slow}

    def _run(self, turn: int, name: str, *settings: str) -> float:
        run_dir, settings = self._directory / f"{name}-{turn}", (*settings, "data.eval_path=")
        if hasattr(self._module, "_run"):  # older versions
            summary = self._module._run(self._demo, run_dir, *settings)
        else:
            summary = self._module.train_quietly(self._demo.run_file, run_dir, *settings)
        return float(summary.trained_tok_s)


def main(bench: str, directory: Path) -> None:
    """Answer requests until the input ends. ``bench`` is the package of the benchmarks, and ``directory`` is for
    files."""
    answers, sys.stdout = sys.stdout, sys.stderr  # runs print, and the answers must stand alone
    loop = DemoRuns(bench, directory)
    for line in sys.stdin:
        request = json.loads(line)
        figures = measure_sync(bench) if request["bench"] == "sync" else loop.measure(request["turn"])
        answers.write(json.dumps({"ok": figures}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
