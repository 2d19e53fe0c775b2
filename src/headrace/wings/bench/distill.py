"""Distillation of the demo's model: from a larger model, and, in addition to the reward, from its own earlier weights.
The earlier weights are *refreshed*: every few steps they are replaced by the present weights of the learner."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.base.types.observation import StepRecord
from headrace.run.observe.jsonl import METRICS_FILE, read_steps
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, get_columns, make_report
from headrace.wings.bench.program import train_quietly
from headrace.wings.recipes.demo import Demo, build_demo, build_teacher

STEPS, QUICK_STEPS = 80, 4
"""The number of steps of a run, and with ``quick``."""
EVERY = 5
"""The number of steps between two refreshments of the earlier weights."""
LARGER = """learner.teachers=[{{kind="model", path="{teacher}"}}]"""
SERVED = """learner.teachers=[{{kind="model", path="{teacher}", engine={{}}}}]"""
KINDS: dict[str, tuple[str, ...]] = {
    "larger teacher, likeliest entries": ("algo.loss=distill", "learner.top_k=8", LARGER),
    "larger teacher, sampled tokens": ("algo.advantage=reverse_kl", LARGER),
    "larger teacher, in an engine of its own": ("algo.loss=distill", "learner.top_k=8", SERVED),
    "own past, beside the reward": (
        *("algo.advantage.kind=reverse_kl", "algo.advantage.beta=0.05", "algo.advantage.weight=1.0"),
        f"""learner.teachers=[{{{{kind="refreshed", every={EVERY}}}}}]""",
    ),
}


def measure(on_progress: Callable[[str], None], *, quick: bool = False) -> Report:
    """Train one run of the demo with each kind of teacher in :data:`KINDS`; return a report with a row and targets for
    each run. With ``quick`` each run has 4 steps. ``on_progress`` is called with a line of text before each run."""
    steps = QUICK_STEPS if quick else STEPS
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        on_progress("the demo's model, and a larger one that forgets no carry")
        demo, teacher = build_demo(directory / "demo", seed=0), build_teacher(directory, seed=0)
        rows: list[Row] = []
        for kind, settings in KINDS.items():
            on_progress(kind)
            rows.append(
                _run(demo, directory / f"run-{len(rows)}", kind, [s.format(teacher=teacher) for s in settings], steps)
            )
    return make_report(rows, [target for row in rows for target in _targets(row)])


def _run(demo: Demo, run_dir: Path, kind: str, settings: list[str], steps: int) -> Row:
    """Train the demo for ``steps`` steps in ``run_dir`` with ``settings``, overrides in the form ``section.key=value``.
    Return a row with the figures of the run: held-out accuracy before and after, the divergence from the teacher in the
    first and the last step, and the versions that the teacher had. ``kind`` is the name of the kind of run in the
    row."""
    summary = train_quietly(demo.run_file, run_dir, f"run.steps={steps}", *settings)
    records = read_steps(run_dir / METRICS_FILE)
    return {
        "what": kind,
        **get_columns(summary, "steps", "eval_before", "eval_after", "wall_s", "exposed_sync_frac"),
        "kl_teacher_first": records[0].metrics.get("kl_teacher"),
        "kl_teacher_last": records[-1].metrics.get("kl_teacher"),
        "teacher_versions": sorted({int(v) for r in records if (v := r.metrics.get("teacher_version")) is not None}),
        "refreshment_by_step": _refreshment(records),
        "rewards": [record.reward_mean for record in records],
    }


def _refreshment(records: list[StepRecord]) -> float | None:
    """Return the median duration of the steps that refresh the teacher, divided by the median duration of the other
    steps. Return ``None`` if the teacher has no version in the metrics, or if one of the two kinds of steps is
    missing."""
    versions = [record.metrics.get("teacher_version") for record in records]
    if None in versions:
        return None
    steps = list(zip(records, versions, versions[1:], strict=False))[1:]  # the first step also allocates memory
    refreshing_s = [record.seconds for record, now, then in steps if now != then]
    others_s = [record.seconds for record, now, then in steps if now == then]
    return statistics.median(refreshing_s) / statistics.median(others_s) if refreshing_s and others_s else None


def _targets(row: Row) -> list[Target]:
    """Return the targets for a row of the report: the gain in accuracy, and the relative time of steps that refresh the
    teacher, if there are such steps."""
    gained = (row["eval_after"] or 0.0) - (row["eval_before"] or 0.0)
    targets = [at_least(f"{row['what']}: held-out accuracy gained", gained, 0.2, "fraction")]
    if row["refreshment_by_step"] is not None:
        refreshment = row["refreshment_by_step"]
        targets.append(
            at_most(f"{row['what']}: a step that refreshes it, by one that does not", refreshment, 1.1, "ratio")
        )
    return targets
