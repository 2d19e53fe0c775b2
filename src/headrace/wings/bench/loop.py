"""The whole training loop on the demo: whether the model learns, and how much time asynchronous training saves."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.control.metrics.summary import Summary
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, get_columns, make_report, measure_s
from headrace.wings.bench.program import train_quietly
from headrace.wings.recipes.demo import Demo, build_demo

SEEDS = (0, 1, 2)
PAIRS = 3
"""The number of pairs of a synchronous and an asynchronous run."""
PAIR_STEPS = 40
FROZEN_STEPS = 60
"""The number of steps of the runs with ``learner.lr=0``, whose weights never change."""


def measure(on_progress: Callable[[str], None]) -> Report:
    """Measure the demo over three seeds with and without learning, pairs of a synchronous and an asynchronous run with
    a slow reward, and the time of ``import headrace``. Return a row for each run, and the targets. ``on_progress`` is
    called with lines of progress."""
    clock = RealClock()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        rows: list[Row] = []
        demos: list[Demo] = []
        learned: list[Summary] = []
        frozen: list[Summary] = []
        walls_s: list[float] = []
        for seed in SEEDS:
            on_progress(f"demo, seed {seed}")
            start_s = clock.now()
            demos.append(build_demo(directory / f"demo-{seed}", seed=seed))
            learned.append(train_quietly(demos[-1].run_file, directory / f"learn-{seed}", f"run.seed={seed}"))
            walls_s.append(clock.now() - start_s)
            rows.append(_row("demo", learned[-1], seed=seed, with_build_s=walls_s[-1]))
            on_progress(f"demo with learner.lr=0, seed {seed}")
            settings = (f"run.seed={seed}", "learner.lr=0", f"run.steps={FROZEN_STEPS}")
            frozen.append(train_quietly(demos[-1].run_file, directory / f"frozen-{seed}", *settings))
            rows.append(_row("lr=0", frozen[-1], seed=seed))
        ratios, pair_rows = _train_pairs(demos[0], directory, on_progress)
        rows += pair_rows
        on_progress("import")
        imports_s = [_import_s() for _ in range(5)]
        rows.append({"what": "import headrace", "median_s": statistics.median(imports_s)})
    gap_ms = max(summary.commit_gap_ms.p99 for summary in learned)
    targets = [
        *_learning_targets(learned, frozen),
        at_most("demo, model building included, slowest seed", max(walls_s), 180, "s"),
        at_most("wall time per trained token, asynchronous / synchronous", statistics.median(ratios), 0.75, "ratio"),
        at_most("commit gap p99, worst run", gap_ms, 5, "ms"),
        at_most("sequences restarted by weight updates", sum(s.sequences_restarted for s in learned), 0, "sequences"),
        at_most("engine against learner, mean |Δ logprob|", max(s.mismatch_abs or 0.0 for s in learned), 1e-4, "nats"),
        at_most("age of the oldest token at max_age=2", max(s.max_token_age for s in learned), 2, "versions"),
        at_most("import headrace", statistics.median(imports_s), 0.7, "s"),
    ]
    return make_report(rows, targets)


def _learning_targets(learned: list[Summary], frozen: list[Summary]) -> list[Target]:
    """Return the targets for the held-out accuracy: before and after training in the runs ``learned``, and its change
    in the runs ``frozen``, whose learning rate is 0."""
    moves = [abs((s.eval_after or 0.0) - (s.eval_before or 0.0)) for s in frozen]
    return [
        at_most("held-out accuracy before, highest seed", max(s.eval_before or 0.0 for s in learned), 0.55, "fraction"),
        at_least("held-out accuracy after, lowest seed", min(s.eval_after or 0.0 for s in learned), 0.90, "fraction"),
        at_most("held-out accuracy moved by lr=0, largest", max(moves), 0.05, "fraction"),
    ]


def _train_pairs(demo: Demo, directory: Path, on_progress: Callable[[str], None]) -> tuple[list[float], list[Row]]:
    """Train the demo with a slow reward :data:`PAIRS` times with ``flow.max_age=1`` (asynchronous) and with
    ``flow.max_age=0`` (synchronous). Return for each pair the wall time per trained token of the asynchronous run
    divided by that time of the synchronous run; and the rows of the report, one for each run. Run directories are
    created in ``directory``; ``on_progress`` is called with lines of progress."""
    ratios: list[float] = []
    rows: list[Row] = []
    with as_file(files("headrace.wings.bench") / "user_code.py") as user_code:
        for pair in range(PAIRS):
            per_token: list[float] = []
            for max_age in (1, 0):
                on_progress(f"slow reward, pair {pair}, max_age={max_age}")
                settings = (f"flow.max_age={max_age}", f"env.reward={user_code}:slow_sum", f"run.steps={PAIR_STEPS}")
                run_dir = directory / f"pair-{pair}-{max_age}"
                summary = train_quietly(demo.run_file, run_dir, *settings, "data.eval_path=")
                per_token.append(summary.wall_s / summary.tokens_trained)
                rows.append(_row(f"slow reward, max_age={max_age}", summary, pair=pair))
            ratios.append(per_token[0] / per_token[1])
    return ratios, rows


def _row(kind: str, summary: Summary, **more: float) -> Row:
    """Return the row of the report for one run, from its summary; ``kind`` names the kind of run, and ``more`` are
    further columns."""
    figures = get_columns(
        summary, "steps", "eval_before", "eval_after", "wall_s", "trained_tok_s", "engine_idle_frac",
        "learner_idle_frac", "exposed_sync_frac", "max_token_age",
    )  # fmt: skip
    return {"what": kind, **more, **figures, "commit_gap_p99_ms": summary.commit_gap_ms.p99}


def _import_s() -> float:
    """Return the time, in seconds, that a new process needs to start Python and import headrace."""
    return measure_s(lambda: subprocess.run([sys.executable, "-c", "import headrace"], check=True))
