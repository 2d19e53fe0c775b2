"""The fault experiment: the demo's pipeline, in which a random process is killed at a random moment.

Each run is determined by its seed, so that one that went wrong can be repeated: ``python -m lab faults --seed 17
--runs 1``. Even seeds run synchronously and must end with the weights of a run without kills; odd ones run two
versions ahead. Half of each restart a dead engine, the others end and are resumed. All record running answers in short
pieces, and learn from answers of any length.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import get_args

import numpy as np

from headrace.base.clock import RealClock
from headrace.base.errors import RunError
from headrace.control.saving import CHECKPOINTS
from headrace.flow.ledger.opening import has_ledger
from headrace.run.session import load_config
from headrace.run.session.directory import read_summary
from headrace.wings.bench.base import Report, Row, Target, at_most, make_report
from headrace.wings.recipes.demo import build_demo
from lab.faults.life import HUNG, Life, Moment, Part, leftovers, run_life
from lab.faults.verdict import LedgerSnapshot, Verdict, judge, same_weights, take_snapshot

RUNS = 100
STEPS = 12
SAVE_EVERY = 3
RECORD_TOKENS = 8
SECOND_FRAC = 0.3
"""Fraction of the runs with a second kill, in the life that resumes them."""
START_FRAC, SNAPSHOT_FRAC = 0.25, 0.15
"""Fractions of the kills in the first seconds of a life, and during the write of a snapshot."""
SNAPSHOT_S = 0.1
"""Longest delay of a kill after the beginning of a snapshot, in seconds."""
MAX_LIVES = 8
SETTINGS = (
    *("model.deterministic=true", "data.eval_path=", "env.kind=rollout", "env.reward_workers=2", "env.retries=4"),
    *("engine.temperature=8.0", "engine.max_new_tokens=48", "engine.flush_tokens=4"),
    *("flow.groups_per_step=8", "flow.group_size=4", f"flow.record_tokens={RECORD_TOKENS}"),
    *("launch.engine_threads=1", "launch.learner_threads=1"),
    *("observe.view=plain", "observe.report=false"),
    *(f"run.steps={STEPS}", f"run.checkpoint_every={SAVE_EVERY}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The settings in which runs differ."""

    max_age: int
    restarts: int
    """Number of times a dead engine is restarted."""

    @classmethod
    def from_seed(cls, seed: int) -> Variant:
        """Return the variant of the trial with this ``seed``."""
        return cls(max_age=0 if seed % 2 == 0 else 2, restarts=0 if seed % 4 < 2 else 2)


WITHOUT_KILLS = Variant(max_age=0, restarts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetup:
    """What all runs share."""

    directory: Path
    run_file: Path
    sources: Path
    """Directory of the file with the environment and the reward."""
    start_s: float
    """Seconds from the start of the program to its first step, without kills."""
    step_s: float
    """Seconds of a step without kills."""
    weights: Path
    """Last snapshot of the run without kills."""
    rollouts: int = 0
    """Number of rollout shards; 0: the controller runs the episodes."""

    @property
    def parts(self) -> list[Part]:
        """The kinds of processes that the runs have."""
        return [part for part in get_args(Part) if part != "rollout" or self.rollouts]

    def settings(self, run_dir: Path, variant: Variant) -> list[str]:
        """Return the settings of a run in ``run_dir`` for this ``variant``, as overrides ``section.key=value``."""
        return [
            *SETTINGS,
            f"env.entry={self.sources / 'user_code.py'}:rollout",
            f"env.reward={self.sources / 'user_code.py'}:partial_credit",
            f"run.dir={run_dir}",
            f"flow.max_age={variant.max_age}",
            f"launch.engine_restarts={variant.restarts}",
            f"launch.rollouts={self.rollouts}",
        ]


@dataclass(slots=True, kw_only=True)
class Trial:
    """One run from its first life to its last."""

    lives: list[Life]
    snapshots: list[LedgerSnapshot]
    """Content of the ledger after each kill."""
    unrecorded_tokens: list[float]
    """Number of tokens per running answer that were sampled but not recorded when a process died."""
    run_dir: Path


def measure(on_progress: Callable[[str], None], runs: int = RUNS, seed: int = 0, rollouts: int = 0) -> Report:
    """Run ``runs`` trials with the seeds from ``seed`` on, with ``rollouts`` rollout shards. The run without kills has
    none: its weights are those of any number of shards. ``on_progress`` is called with lines of progress."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        sources = stack.enter_context(as_file(files("headrace.wings.bench")))
        setup = replace(_run_without_kills(directory, sources, on_progress), rollouts=rollouts)
        rows = []
        for trial_seed in range(seed, seed + runs):
            rows.append(_measure_trial(setup, trial_seed))
            on_progress(_describe(rows[-1]))
    return make_report([_totals(rows), *rows], _targets(rows))


def _run_without_kills(directory: Path, sources: Path, on_progress: Callable[[str], None]) -> TrialSetup:
    """Create the demo in ``directory``, run it synchronously without kills, and return what the trials need.
    ``sources`` is the directory of the reward, and ``on_progress`` is called with lines of progress."""
    on_progress("the demo's model")
    demo = build_demo(directory / "demo", seed=0)
    run_dir = directory / "undisturbed"
    setup = TrialSetup(
        directory=directory, run_file=demo.run_file, sources=sources, start_s=0.0, step_s=0.0,
        weights=run_dir / CHECKPOINTS / f"step-{STEPS:06d}",
    )  # fmt: skip
    life = asyncio.run(run_life(_arguments(setup, run_dir, WITHOUT_KILLS), run_dir, None, resume=False))
    if life.exit_code:
        raise RunError(f"the run that nobody disturbs failed: {life.stderr}", remedy="fix that first")
    step_s = (life.seconds - life.started_s) / STEPS
    on_progress(f"undisturbed: first step after {life.started_s:.1f} s, then one every {step_s:.2f} s")
    return replace(setup, start_s=life.started_s, step_s=step_s)


def _arguments(setup: TrialSetup, run_dir: Path, variant: Variant) -> list[str]:
    settings = setup.settings(run_dir, variant)
    return [str(setup.run_file), *(word for setting in settings for word in ("--set", setting))]


def draw_moment(setup: TrialSetup, rng: np.random.Generator) -> Moment:
    """Draw a process of ``setup`` and a moment to kill it, with ``rng``."""
    part = setup.parts[rng.integers(len(setup.parts))]
    draw = rng.random()
    if draw < START_FRAC:
        return Moment(part=part, phase="start", delay_s=rng.uniform(0.0, setup.start_s))
    if draw < START_FRAC + SNAPSHOT_FRAC:
        step = SAVE_EVERY * int(rng.integers(1, STEPS // SAVE_EVERY + 1))
        return Moment(part=part, phase="snapshot", step=step, delay_s=rng.uniform(0.0, SNAPSHOT_S))
    step = int(rng.integers(1, STEPS + 1))
    return Moment(part=part, phase="step", step=step, delay_s=rng.uniform(0.0, setup.step_s))


def _measure_trial(setup: TrialSetup, seed: int) -> Row:
    """Run the trial with this ``seed``, with at least one kill, and return its row. ``setup`` is the same for all
    trials."""
    clock = RealClock()
    start_s = clock.now()
    rng = np.random.default_rng(seed)
    variant = Variant.from_seed(seed)
    run_dir = setup.directory / f"run-{seed}"
    while True:
        moments = [draw_moment(setup, rng) for _ in range(2 if rng.random() < SECOND_FRAC else 1)]
        trial = asyncio.run(_run_trial(setup, run_dir, variant, moments))
        if any(life.kill or life.exit_code for life in trial.lives):
            break
        shutil.rmtree(run_dir)  # the run finished before the first kill
    config = load_config(setup.run_file, setup.settings(run_dir, variant))
    is_finished = trial.lives[-1].exit_code == 0 or _is_finished(run_dir)
    verdict = judge(run_dir, config, trial.snapshots) if is_finished else Verdict.unfinished(config)
    wrong = _find_errors(verdict, trial, variant)
    if (
        is_finished
        and variant.max_age == 0
        and not same_weights(run_dir / CHECKPOINTS / setup.weights.name, setup.weights)
    ):
        wrong.append("other weights than the undisturbed run")
    if not wrong:
        shutil.rmtree(run_dir)
    message_times_s = [life.message_s for life in trial.lives if life.message_s is not None]
    cleanup_times_s = [life.cleanup_s for life in trial.lives if life.cleanup_s is not None]
    return {
        "what": f"seed {seed}",
        "seed": seed,
        **asdict(variant),
        "killed": [str(life.kill) for life in trial.lives if life.kill],
        "at_step": [life.num_steps for life in trial.lives if life.kill],
        "lives": len(trial.lives),
        **asdict(verdict),
        "told_s": max(message_times_s, default=None),
        "gone_s": max(cleanup_times_s, default=None),
        "unrecorded": max(trial.unrecorded_tokens, default=None),
        "left": leftovers(trial.lives, run_dir),
        "wrong": wrong,
        "wall_s": clock.now() - start_s,
    }


async def _run_trial(setup: TrialSetup, run_dir: Path, variant: Variant, moments: Sequence[Moment]) -> Trial:
    """Start, kill and resume the program, with the settings of ``setup`` and ``variant`` in ``run_dir``, until it ends
    by itself. The lives have kills at ``moments``."""
    trial = Trial(lives=[], snapshots=[], unrecorded_tokens=[], run_dir=run_dir)
    arguments = _arguments(setup, run_dir, variant)
    pending = list(moments)
    while len(trial.lives) < MAX_LIVES:
        resume = has_ledger(run_dir)
        life = await run_life(arguments, run_dir, pending.pop(0) if pending else None, resume=resume)
        trial.lives.append(life)
        if life.exit_code in (0, HUNG) or life.kill is None or _is_finished(run_dir):
            break
        if has_ledger(run_dir):
            trial.snapshots.append(take_snapshot(run_dir, setup.directory / "snapshot"))
            if life.kill.part != "controller":
                _count_unrecorded(trial)
    return trial


def _is_finished(run_dir: Path) -> bool:
    """Return whether the last life had reported its end before it was killed, so that there is nothing to resume."""
    summary = read_summary(run_dir)
    return summary is not None and summary["status"] == "finished"


def _count_unrecorded(trial: Trial) -> None:
    """Append the unrecorded tokens per running answer, if the controller could still write how many tokens were
    sampled."""
    summary = read_summary(trial.run_dir)
    *_, earlier, now = [LedgerSnapshot(), LedgerSnapshot(), *trial.snapshots]
    if summary is None or not now.num_running:
        return
    missing = summary["tokens_generated"] - (now.tokens - earlier.tokens)
    trial.unrecorded_tokens.append(max(0, missing) / now.num_running)


def _find_errors(verdict: Verdict, trial: Trial, variant: Variant) -> list[str]:
    """Return a description of everything that went wrong in ``trial``, of which ``verdict`` is the result and
    ``variant`` has the settings."""
    figures = asdict(verdict)
    wrong = [
        f"{key}: {figures[key]}"
        for key in ("lost", "twice", "unbalanced", "broken", "differ", "too_old")
        if figures[key]
    ]
    wrong += ["the books did not balance after a kill"] * sum(not snapshot.is_balanced for snapshot in trial.snapshots)
    wrong += [f"dropped: {verdict.dropped}"] * bool(verdict.dropped)
    for life in trial.lives:
        wrong += _find_wrong_end(life, variant)
    last = trial.lives[-1]
    if last.exit_code and not _is_finished(trial.run_dir):
        wrong.append(f"it did not end: exit code {last.exit_code}: {last.stderr.strip()}")
    if any("other weights than before the restart" in line for life in trial.lives for line in life.stdout_lines):
        wrong.append("a version was made again with other weights")
    return wrong


def _find_wrong_end(life: Life, variant: Variant) -> list[str]:
    """Return how the end of ``life`` differs from the end that is expected with the settings of ``variant``."""
    part = None if life.kill is None else life.kill.part
    if "Traceback" in life.stderr:
        return [f"a traceback: {life.stderr.strip()}"]
    heals = part in ("scorer", "environment") or (
        part in ("engine", "rollout") and variant.restarts > 0 and life.num_steps > 0
    )
    if heals and life.exit_code:
        return [f"the death of the {part} did not heal: {life.stderr.strip()}"]
    if part in ("engine", "learner", "rollout") and life.exit_code:
        name = "rollout-" if part == "rollout" else f"{part} (pid"
        is_reported = f"error: {name}" in life.stderr and "was killed by SIGKILL" in life.stderr
        if life.exit_code != 1 or not is_reported or "remedy: " not in life.stderr:
            return [f"the death of the {part} is told as: exit code {life.exit_code}: {life.stderr.strip()}"]
    return []


def _totals(rows: Sequence[Row]) -> Row:
    kills = Counter(words.split()[0] for row in rows for words in row["killed"])
    return {
        "what": "all",
        "runs": len(rows),
        "kills": dict(kills),
        "lives": sum(row["lives"] for row in rows),
        "synchronous": sum(row["max_age"] == 0 for row in rows),
        "healed": sum(row["lives"] == 1 for row in rows),
        "continued": sum(row["continued"] for row in rows),
        "told_median_s": _median(rows, "told_s"),
        "gone_median_s": _median(rows, "gone_s"),
        "wrong": [row["seed"] for row in rows if row["wrong"]],
    }


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _targets(rows: Sequence[Row]) -> list[Target]:
    """Return the targets of the experiment for the ``rows`` of all trials."""

    def total(key: str) -> float:
        """Return the sum of the figure ``key`` over all trials."""
        return float(sum(row[key] for row in rows))

    def worst(key: str) -> float:
        """Return the largest figure ``key`` of all trials; 0 if no trial has it."""
        return max((row[key] for row in rows if row[key] is not None), default=0.0)

    return [
        at_most("groups lost", total("lost"), 0, "groups"),
        at_most("groups trained twice", total("twice"), 0, "groups"),
        at_most("books that do not balance", total("unbalanced"), 0, "units"),
        at_most("recorded answers that changed", total("broken"), 0, "answers"),
        at_most("versions that are not those of their batches", total("differ"), 0, "versions"),
        at_most("runs in which anything went wrong", float(sum(bool(row["wrong"]) for row in rows)), 0, "runs"),
        at_most("processes, buffers and files left behind", float(sum(len(row["left"]) for row in rows)), 0, "things"),
        at_most("tokens sampled in vain per running answer, worst kill", worst("unrecorded"), RECORD_TOKENS, "tokens"),
        at_most("from the kill of engine, learner or shard to the message, worst", worst("told_s"), 5, "s"),
        at_most("from the kill of the controller to the end of its parts, worst", worst("gone_s"), 5, "s"),
    ]


def _describe(row: Row) -> str:
    verdict = "; ".join(row["wrong"]) or "all accounted for"
    variant = f"max_age={row['max_age']}, restarts={row['restarts']}"
    return f"{row['what']}, {variant}: {', '.join(row['killed'])}: {verdict} ({row['wall_s']:.0f} s)"
