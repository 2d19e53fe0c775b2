"""The calibration of ``headrace plan --calibrate RUN``, which fits cost models to the steps, the trace and the ledger
of recorded runs.

The engine's cost is a line through points (batch size, seconds of a step), one point for each tenth of the run:

    seconds of a step = busy seconds of the engine / number of its steps
    batch size        = sampled tokens / number of its steps
                      = seconds of all episodes in that time / busy seconds, for a served engine, whose number of
                        steps is not recorded

If the batch sizes of the points hardly differ, no line can be fitted, and the time of a step is modelled as constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import DataError
from headrace.base.types.observation import StepRecord
from headrace.base.types.trace import Span
from headrace.flow.ledger.browse import Browser
from headrace.run.observe.rundata import load_run
from headrace.wings.plan.costs import Linear, SyncCost
from headrace.wings.plan.spread import ConstantSpread, RecordedSpread
from headrace.wings.plan.system import Measured
from headrace.wings.plan.workload import Workload

SKIPPED = 2
"""Number of steps at the beginning of a run that are ignored, because kernels are compiled and memory is allocated
during these steps."""
LEAST_STEPS = 10
"""Smallest number of steps that a run must have after the ignored ones."""
PARTS = 10
"""Number of parts into which a run is divided, with one point (batch size, seconds of a step) for each."""
SPREAD = 1.3
"""Smallest ratio of largest to smallest batch size at which a line is fitted to the points."""
MOST_LENGTHS = 4096
"""Largest number of episode lengths that are used from a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecording:
    """The data of a run directory from which costs are fitted."""

    name: str
    """Name of the run for messages."""
    steps: Sequence[StepRecord]
    """Records of the steps since the run was last started or resumed."""
    spans: Sequence[Span]
    """The event trace. A span is one activity of a part of the run, with its begin and end; the lane names the part,
    such as ``engine``, ``rollout`` or ``sync``."""
    lengths: Sequence[int]
    """Number of sampled tokens of each episode."""
    config: Mapping[str, Any]
    """The settings of the run, by section and key."""

    def setting(self, section: str, key: str, default: int) -> int:
        """Return the integer setting ``key`` of the table ``section`` of the run, or ``default`` if it is not set."""
        value = self.config.get(section, {}).get(key)
        return value if isinstance(value, int) else default


def calibrate_from(*run_dirs: Path) -> Measured:
    """Return the costs of engine, learner and sync that are fitted to the runs in the directories ``run_dirs``; see
    :func:`calibrate`."""
    return calibrate([read_recording(each) for each in run_dirs])


def read_recording(run_dir: Path) -> RunRecording:
    """Return the data of the run in the directory ``run_dir``; raise :class:`~headrace.base.errors.DataError` if the
    directory contains no run."""
    run = load_run(run_dir)
    browser = Browser.open_run(run_dir)
    try:
        lengths = browser.lengths().submitted
    finally:
        browser.close()
    return RunRecording(name=str(run_dir), steps=run.session, spans=run.spans, lengths=lengths, config=run.config)


def calibrate(runs: Sequence[RunRecording]) -> Measured:
    """Return the costs that are fitted to all ``runs``, which ran on the same machine. The workload (lengths and times
    of rewards) is that of the first run.

    Raises :class:`~headrace.base.errors.DataError` if a run is too short or has no trace.
    """
    points = np.array([point for run in runs for point in _engine_points(_require_data(run))])
    first = runs[0]
    steps = [step for run in runs for step in run.steps[SKIPPED:]]
    prompt, reward_s = _prompt_tokens(first), _typical_reward_s(first)
    fixed_s, tok_s = _fit_training(runs)
    lengths = np.asarray(first.lengths, np.float64)
    if len(lengths) > MOST_LENGTHS:
        lengths = lengths[np.linspace(0, len(lengths) - 1, MOST_LENGTHS).astype(int)]
    return Measured(
        engine=_fit_line(points),
        train_tok_s=tok_s,
        train_fixed_s=fixed_s,
        sync=_sync_cost(runs, steps),
        workload=Workload(
            prompt_tokens=ConstantSpread(value=prompt),
            answer_tokens=RecordedSpread(values=tuple(lengths.tolist())),
            reward_s=ConstantSpread(value=reward_s),
        ),
        engines=first.setting("engine", "count", 1),
        episode_s=float(np.median([_controller_s_per_episode(run) for run in runs])),
    )


def _require_data(run: RunRecording) -> RunRecording:
    """Return ``run`` unchanged. Raises :class:`~headrace.base.errors.DataError` if the run has too few steps, no trace
    of its engine, or no episodes."""
    left = len(run.steps) - SKIPPED
    if left < LEAST_STEPS:
        raise DataError(
            f"{run.name} has {len(run.steps)} steps: too few to calibrate with, as the first {SKIPPED} do not count "
            f"and {LEAST_STEPS} more are needed",
            remedy=f"let it make {SKIPPED + LEAST_STEPS} steps (run.steps), or name another run",
        )
    if not any(span.lane.startswith("engine") for span in run.spans) or not run.lengths:
        raise DataError(
            f"{run.name} has no trace of its engine, or no episode in its ledger",
            remedy="name a run that has ended by itself, with its trace.jsonl and ledger.sqlite",
        )
    return run


def _engine_points(run: RunRecording) -> Iterable[tuple[float, float]]:
    """Yield (batch size, seconds of an engine's step) for each of :data:`PARTS` equal parts of the run; parts in which
    the engine did nothing are left out."""
    steps = run.steps[SKIPPED - 1 :]
    engines = run.setting("engine", "count", 1)
    counts_steps = run.config.get("engine", {}).get("kind") == "native"
    edges = np.unique(np.linspace(0, len(steps) - 1, PARTS + 1).astype(int))
    for begin, end in pairwise(edges.tolist()):
        within = (steps[begin].clock_s, steps[end].clock_s)
        busy_s = _overlap_s(run.spans, within, lambda span: span.lane.startswith("engine") and span.name != "commit")
        episodes_s = _overlap_s(run.spans, within, lambda span: span.lane == "rollout" and span.name == "episode")
        tokens = steps[end].generated_tokens - steps[begin].generated_tokens
        num = sum(step.metrics.get("engine_steps") or 0.0 for step in steps[begin + 1 : end + 1])
        if busy_s > 0 and tokens > 0 and num > 0 and counts_steps:
            yield tokens / num, busy_s / num
        elif busy_s > 0 and tokens > 0 and episodes_s > 0:
            num_concurrent = max(1.0, episodes_s / busy_s)
            yield num_concurrent / engines, num_concurrent * busy_s / tokens / engines


def _overlap_s(spans: Iterable[Span], within: tuple[float, float], selected: Any) -> float:
    """Return the summed seconds in which spans overlap with the interval ``within`` = (begin, end). Only spans for
    which ``selected(span)`` is true count."""
    begin, end = within
    return sum(
        max(0.0, min(span.end_s, end) - max(span.start_s, begin)) for span in spans if selected(span)
    )  # fmt: skip


def _controller_s_per_episode(run: RunRecording) -> float:
    """Return the seconds of processor time that the controller spends per finished episode; 0 if the run did not record
    its processor time."""
    steps = run.steps[SKIPPED - 1 :]
    begin, end = steps[0].clock_s, steps[-1].clock_s
    cores = [used for step in steps[1:] if (used := step.metrics.get("cpu/controller")) is not None]
    ended = sum(span.lane == "rollout" and span.name == "episode" and begin < span.end_s <= end for span in run.spans)
    return float(np.mean(cores)) * (end - begin) / ended if cores and ended else 0.0


def _fit_line(points: np.ndarray[Any, np.dtype[np.float64]]) -> Linear:
    """Return the line seconds = fixed + n · per sequence that is fitted to ``points`` (batch size, seconds). If the
    batch sizes hardly differ, the time is fixed."""
    batch_sizes, seconds = points[:, 0], points[:, 1]
    if batch_sizes.max() < SPREAD * batch_sizes.min():
        return Linear(fixed_s=float(np.mean(seconds)))
    slope = float(np.polyfit(batch_sizes, seconds, 1)[0])
    # neither a negative cost per sequence nor a negative fixed cost
    slope = min(max(slope, 0.0), float(np.min(seconds / batch_sizes)))
    return Linear(fixed_s=max(0.0, float(np.mean(seconds - slope * batch_sizes))), sequence_s=slope)


def _fit_training(runs: Sequence[RunRecording]) -> tuple[float, float]:
    """Return the fixed seconds of a training step, and the number of tokens trained per second without the fixed time,
    as ``runs`` have measured them. They are fitted as a line to (tokens, seconds) of the steps; if the batches hardly
    differ in size, the fixed time is 0. The time of a step is the time between two records without the wait for its
    batch and the copy of its weights, and thus includes time lost to other processes of the machine."""
    pairs = [pair for run in runs for pair in pairwise(run.steps[SKIPPED - 1 :])]
    tokens = np.array([step.metrics.get("tokens") or step.trained_tokens for _, step in pairs], np.float64)
    unblocked_s = [step.clock_s - before.clock_s - step.wait_s - before.exposed_sync_s for before, step in pairs]
    seconds = np.maximum(unblocked_s, [step.seconds for _, step in pairs])
    if tokens.max() < SPREAD * tokens.min():
        return 0.0, float(tokens.sum() / seconds.sum())
    slope, fixed_s = np.polyfit(tokens, seconds, 1)
    if slope <= 0 or fixed_s < 0:
        return 0.0, float(tokens.sum() / seconds.sum())
    return float(fixed_s), float(1.0 / slope)


def _sync_cost(runs: Sequence[RunRecording], steps: Sequence[StepRecord]) -> SyncCost:
    """Return the costs of the weight sync that ``runs`` recorded: medians of copies and commit gaps, and the mean time
    of transfers per version. ``steps`` are the steps of all runs, without the ignored first steps."""
    transfers = _durations_s(runs, "sync", "publish", "stage")
    versions = len(_durations_s(runs, "sync", "commit"))
    copies = _durations_s(runs, "learner", "snapshot")
    gaps = [step.commit_gap_s for step in steps if step.commit_gap_s is not None]
    return SyncCost(
        snapshot_s=float(np.median(copies)) if copies else 0.0,
        travel_s=sum(transfers) / max(1, versions),
        gap_s=float(np.median(gaps)) if gaps else 0.0,
    )


def _prompt_tokens(run: RunRecording) -> float:
    """Return the mean number of prompt tokens per episode, at least 1: the tokens of a batch that are not trained,
    divided by the number of its episodes."""
    per_step = run.setting("flow", "groups_per_step", 1) * run.setting("flow", "group_size", 1)
    untrained = [
        (step.metrics.get("tokens") or step.trained_tokens) - step.trained_tokens for step in run.steps[SKIPPED:]
    ]
    return max(1.0, float(np.mean(untrained)) / per_step)


def _typical_reward_s(run: RunRecording) -> float:
    """Return the typical seconds of computing a reward; 0 if no reward was recorded. It is the first quartile, because
    the spans of rewards that are computed at the same time are longer."""
    durations_s = _durations_s([run], "scoring", "score")
    return float(np.quantile(durations_s, 0.25)) if durations_s else 0.0


def _durations_s(runs: Sequence[RunRecording], lane: str, *names: str) -> list[float]:
    """Return the durations, in seconds, of the spans of ``runs`` in this lane that have one of ``names``."""
    spans = [span for run in runs for span in run.spans if span.lane == lane and span.name in names]
    return [span.end_s - span.start_s for span in spans]
