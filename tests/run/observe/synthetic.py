"""Runs that never happened: a directory as a run leaves it, with any number of steps."""

import json
from collections.abc import Callable
from pathlib import Path

from headrace.base.types.observation import QueueCounts, StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe import JsonlWriter

MakeRun = Callable[..., Path]
CLOCK_ZERO = 5000.0


def step_record(step: int, **changes: object) -> StepRecord:
    """A step of a run whose steps take 1 s: 0.6 s waiting, 0.4 s training."""
    values: dict[str, object] = {
        "step": step,
        "version": step + 1,
        "clock_s": CLOCK_ZERO + step + 1,
        "wall_s": step + 3.0,
        "unix_s": 1.79e9 + step,
        "reward_mean": min(1.0, 0.4 + 0.001 * step),
        "reward_std": 0.3,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "metrics": {"mismatch_kl": 4e-4, "loss": float("nan")},
        "trained_tokens": 90,
        "generated_tokens": 100 * (step + 1),
        "seconds": 0.4,
        "wait_s": 0.6,
        "exposed_sync_s": 0.02,
        "commit_gap_s": 0.001,
        "ages": {0: 30, 1: 60},
        "queue": QueueCounts(submitted=1, running=4, ready=2),
    }
    return StepRecord(**{**values, **changes})


def step_spans(step: int) -> list[Span]:
    zero = CLOCK_ZERO + step
    return [
        Span(lane="engine", name="generate", start_s=zero, end_s=zero + 0.97, step=step),
        Span(lane="learner", name="wait batch", start_s=zero + 0.02, end_s=zero + 0.6, step=step),
        Span(lane="learner", name="forward_backward", start_s=zero + 0.6, end_s=zero + 0.95, step=step),
        Span(lane="learner", name="optim_step", start_s=zero + 0.95, end_s=zero + 1.0, step=step),
        Span(lane="learner", name="snapshot", start_s=zero + 1.0, end_s=zero + 1.02, step=step),
        Span(lane="scoring", name="score", start_s=zero + 0.3, end_s=zero + 0.5, step=step),
        Span(lane="sync", name="stage", start_s=zero + 1.02, end_s=zero + 1.1, step=step + 1),
        Span(lane="rollout", name="episode", start_s=zero, end_s=zero + 0.95),
        Span(lane="sync", name="commit", start_s=zero + 1.1, end_s=zero + 1.101, step=step + 1),
    ]


def write_run(directory: Path, num_steps: int, *, name: str = "arithmetic", **summary: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with JsonlWriter[StepRecord](directory / "metrics.jsonl") as metrics:
        metrics.write(step_record(step) for step in range(num_steps))
    with JsonlWriter[Span](directory / "trace.jsonl") as trace:
        trace.write(span for step in range(num_steps) for span in step_spans(step))
    fates = {"submitted": 100, "trained": 80, "dropped": {"zero_variance": 12}, "in_flight": 8}
    ledger = {"groups": fates, "episodes": fates, "tokens": fates}
    values = {"eval_before": 0.41, "eval_after": 0.93, "ledger": ledger, **summary}
    (directory / "summary.json").write_text(json.dumps(values))
    (directory / "config.json").write_text(json.dumps({"run": {"name": name}, "flow": {"max_age": 2}}))
    return directory
