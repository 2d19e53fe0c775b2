"""Kills: the demo's pipeline, a random part of it killed at a random moment, and what became of every group.

Each run is drawn from a seed of its own, so that one that went wrong can be made again:
``python -m lab faults --seed 17 --runs 1``. Even seeds run synchronously and must end with the weights of a run that
nobody disturbed; odd ones run two versions ahead. Of either, every other one starts a dead engine again, and the others
end, to be resumed. All keep short pieces of running answers, and learn from answers of any length.
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
from headrace.wings.bench.base import Report, Row, Target, at_most, report
from headrace.wings.recipes.demo import build_demo
from lab.faults.books import Held, Verdict, held, judge, same_weights
from lab.faults.life import HUNG, Life, Moment, Part, leftovers, live

RUNS = 100
STEPS = 12
SAVE_EVERY = 3
RECORD_TOKENS = 8
SECOND_FRAC = 0.3
"""Of the runs, those of which a part is killed once more, in the life that resumes them."""
START_FRAC, SNAPSHOT_FRAC = 0.25, 0.15
"""Of the kills, those in the first seconds of a life, and those while a snapshot is being written."""
SNAPSHOT_S = 0.1
"""How long after its beginning."""
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
class Way:
    """How a run differs from the others."""

    max_age: int
    restarts: int
    """How many dead engines are started again."""

    @classmethod
    def of(cls, seed: int) -> Way:
        return cls(max_age=0 if seed % 2 == 0 else 2, restarts=0 if seed % 4 < 2 else 2)


UNDISTURBED = Way(max_age=0, restarts=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all runs share."""

    directory: Path
    run_file: Path
    sources: Path
    """Where the environment and the reward are."""
    start_s: float
    """From the start of the program to its first step, where nobody disturbs it."""
    step_s: float
    """From one step to the next there."""
    weights: Path
    """The last snapshot there."""

    def settings(self, run_dir: Path, way: Way) -> list[str]:
        return [
            *SETTINGS,
            f"env.entry={self.sources / 'graded_rollout.py'}:rollout",
            f"env.reward={self.sources / 'graded_reward.py'}:reward",
            f"run.dir={run_dir}",
            f"flow.max_age={way.max_age}",
            f"launch.engine_restarts={way.restarts}",
        ]


@dataclass(slots=True, kw_only=True)
class Trial:
    """One run, from its first life to its last."""

    lives: list[Life]
    before: list[Held]
    """What each kill left."""
    unrecorded: list[float]
    """Tokens that were sampled and not recorded when a part died, for each answer that was running."""
    run_dir: Path


def measure(tell: Callable[[str], None], runs: int = RUNS, seed: int = 0) -> Report:
    """``runs`` runs, of the seeds from ``seed`` on."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        sources = stack.enter_context(as_file(files("headrace.wings.bench")))
        scene = _undisturbed(directory, sources, tell)
        rows = []
        for each in range(seed, seed + runs):
            rows.append(_trial(scene, each))
            tell(_in_words(rows[-1]))
    return report([_totals(rows), *rows], _targets(rows))


def _undisturbed(directory: Path, sources: Path, tell: Callable[[str], None]) -> Scene:
    """The demo, and a synchronous run of it that nobody disturbs."""
    tell("the demo's model")
    demo = build_demo(directory / "demo", seed=0)
    run_dir = directory / "undisturbed"
    scene = Scene(
        directory=directory, run_file=demo.run_file, sources=sources, start_s=0.0, step_s=0.0,
        weights=run_dir / CHECKPOINTS / f"step-{STEPS:06d}",
    )  # fmt: skip
    life = asyncio.run(live(_arguments(scene, run_dir, UNDISTURBED), run_dir, None, resume=False))
    if life.exit_code:
        raise RunError(f"the run that nobody disturbs failed: {life.words}", remedy="mend that first")
    step_s = (life.seconds - life.started_s) / STEPS
    tell(f"undisturbed: first step after {life.started_s:.1f} s, then one every {step_s:.2f} s")
    return replace(scene, start_s=life.started_s, step_s=step_s)


def _arguments(scene: Scene, run_dir: Path, way: Way) -> list[str]:
    settings = scene.settings(run_dir, way)
    return [str(scene.run_file), *(word for setting in settings for word in ("--set", setting))]


def draw(scene: Scene, rng: np.random.Generator) -> Moment:
    """A part, and a moment of a run's life."""
    parts: tuple[Part, ...] = get_args(Part)
    part = parts[rng.integers(len(parts))]
    sort = rng.random()
    if sort < START_FRAC:
        return Moment(part=part, phase="start", delay_s=rng.uniform(0.0, scene.start_s))
    if sort < START_FRAC + SNAPSHOT_FRAC:
        step = SAVE_EVERY * int(rng.integers(1, STEPS // SAVE_EVERY + 1))
        return Moment(part=part, phase="snapshot", step=step, delay_s=rng.uniform(0.0, SNAPSHOT_S))
    step = int(rng.integers(1, STEPS + 1))
    return Moment(part=part, phase="step", step=step, delay_s=rng.uniform(0.0, scene.step_s))


def _trial(scene: Scene, seed: int) -> Row:
    """One run that is killed at least once, and what it came to."""
    clock = RealClock()
    start_s = clock.now()
    rng = np.random.default_rng(seed)
    way = Way.of(seed)
    run_dir = scene.directory / f"run-{seed}"
    while True:
        moments = [draw(scene, rng) for _ in range(2 if rng.random() < SECOND_FRAC else 1)]
        trial = asyncio.run(_live_through(scene, run_dir, way, moments))
        if any(life.killed or life.exit_code for life in trial.lives):
            break
        shutil.rmtree(run_dir)  # it was over before the moment came
    config = load_config(scene.run_file, scene.settings(run_dir, way))
    ended = trial.lives[-1].exit_code == 0 or _finished(run_dir)
    verdict = judge(run_dir, config, trial.before) if ended else Verdict.hopeless(config)
    wrong = _wrong(verdict, trial, way)
    if ended and way.max_age == 0 and not same_weights(run_dir / CHECKPOINTS / scene.weights.name, scene.weights):
        wrong.append("other weights than the undisturbed run")
    if not wrong:
        shutil.rmtree(run_dir)
    told = [life.told_s for life in trial.lives if life.told_s is not None]
    gone = [life.gone_s for life in trial.lives if life.gone_s is not None]
    return {
        "what": f"seed {seed}",
        "seed": seed,
        **asdict(way),
        "killed": [str(life.killed) for life in trial.lives if life.killed],
        "at_step": [life.num_steps for life in trial.lives if life.killed],
        "lives": len(trial.lives),
        **asdict(verdict),
        "told_s": max(told, default=None),
        "gone_s": max(gone, default=None),
        "unrecorded": max(trial.unrecorded, default=None),
        "left": leftovers(trial.lives, run_dir),
        "wrong": wrong,
        "wall_s": clock.now() - start_s,
    }


async def _live_through(scene: Scene, run_dir: Path, way: Way, moments: Sequence[Moment]) -> Trial:
    """Start, kill, resume, until it has ended by itself."""
    trial = Trial(lives=[], before=[], unrecorded=[], run_dir=run_dir)
    arguments = _arguments(scene, run_dir, way)
    ahead = list(moments)
    while len(trial.lives) < MAX_LIVES:
        resume = has_ledger(run_dir)
        life = await live(arguments, run_dir, ahead.pop(0) if ahead else None, resume=resume)
        trial.lives.append(life)
        if life.exit_code in (0, HUNG) or life.killed is None or _finished(run_dir):
            break
        if has_ledger(run_dir):
            trial.before.append(held(run_dir, scene.directory / "held"))
            if life.killed.part != "controller":
                _count_unrecorded(trial)
    return trial


def _finished(run_dir: Path) -> bool:
    """Whether the last life had told its end already when it was killed: there is nothing left to resume."""
    summary = read_summary(run_dir)
    return summary is not None and summary["status"] == "finished"


def _count_unrecorded(trial: Trial) -> None:
    """Of a life whose controller could still say how many tokens the engine had told it of."""
    summary = read_summary(trial.run_dir)
    *_, earlier, now = [Held(), Held(), *trial.before]
    if summary is None or not now.running:
        return
    lacking = summary["tokens_generated"] - (now.tokens - earlier.tokens)
    trial.unrecorded.append(max(0, lacking) / now.running)


def _wrong(verdict: Verdict, trial: Trial, way: Way) -> list[str]:
    """Everything that should not be, in words."""
    figures = asdict(verdict)
    wrong = [
        f"{key}: {figures[key]}"
        for key in ("lost", "twice", "unbalanced", "broken", "differ", "too_old")
        if figures[key]
    ]
    wrong += ["the books did not balance after a kill"] * sum(not each.balanced for each in trial.before)
    wrong += [f"dropped: {verdict.dropped}"] * bool(verdict.dropped)
    for life in trial.lives:
        wrong += _unseemly(life, way)
    last = trial.lives[-1]
    if last.exit_code and not _finished(trial.run_dir):
        wrong.append(f"it did not end: exit code {last.exit_code}: {last.words.strip()}")
    if any("other weights than before the restart" in line for life in trial.lives for line in life.lines):
        wrong.append("a version was made again with other weights")
    return wrong


def _unseemly(life: Life, way: Way) -> list[str]:
    """How the end of a life differs from what it should be."""
    part = None if life.killed is None else life.killed.part
    if "Traceback" in life.words:
        return [f"a traceback: {life.words.strip()}"]
    heals = part in ("scorer", "environment") or (part == "engine" and way.restarts > 0 and life.num_steps > 0)
    if heals and life.exit_code:
        return [f"the death of the {part} did not heal: {life.words.strip()}"]
    if part in ("engine", "learner") and life.exit_code:
        said = f"error: {part} (pid" in life.words and "was killed by SIGKILL" in life.words
        if life.exit_code != 1 or not said or "remedy: " not in life.words:
            return [f"the death of the {part} is told as: exit code {life.exit_code}: {life.words.strip()}"]
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
    def total(key: str) -> float:
        return float(sum(row[key] for row in rows))

    def worst(key: str) -> float:
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
        at_most("from the kill of engine or learner to the message, worst", worst("told_s"), 5, "s"),
        at_most("from the kill of the controller to the end of its parts, worst", worst("gone_s"), 5, "s"),
    ]


def _in_words(row: Row) -> str:
    verdict = "; ".join(row["wrong"]) or "all accounted for"
    way = f"max_age={row['max_age']}, restarts={row['restarts']}"
    return f"{row['what']}, {way}: {', '.join(row['killed'])}: {verdict} ({row['wall_s']:.0f} s)"
