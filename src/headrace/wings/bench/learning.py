"""Learning curves over seeds: held-out reward over trained tokens and over seconds, by staleness and by its settings.

    task × variant × seed ──▶ one run that writes snapshots ──▶ evaluation of each snapshot on held-out rows ──▶ curve
    curve ──▶ area, seconds and tokens to the goal ──▶ comparison with the synchronous run of the same seed

Snapshots are evaluated after the run has ended: evaluations during the run would use as much of the engine as training
does, and would change the ages of tokens. The time for writing the snapshots is part of the seconds.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import as_file, files
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import ConfigError, RunError, nearest
from headrace.control.metrics.summary import Summary
from headrace.run.observe import RunData, load_run
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, make_report
from headrace.wings.bench.learning_tasks import TASKS, LearningTask
from headrace.wings.bench.program import train_quietly

FIRST = 12
"""The number of first steps that do not count for the mean age and the speed, since without history every group starts
at once."""
MARK = 0.9
"""The goal: the held-out reward to reach, as a fraction of the distance from the first evaluation to 1."""
NUM_RESAMPLED = 2000
"""The number of resamplings of the seeds (bootstrap) from which an interval is computed."""
ROWS = "learning.jsonl"
"""The file in ``directory`` with the figures of every run that has ended."""
PARTS: Mapping[str, Sequence[str]] = {
    "default": (),
    "eager": ("flow.pacing=eager",),
    "idle clip": ("algo.old=learner",),
    "former": ("flow.pacing=eager", "algo.old=learner"),
    "sampled": ("algo.old=sampled",),
    "ess": ("learner.damping.kind=ess",),
    "age": ("learner.damping.kind=age",),
    "alignment": ("learner.alignment.low=0.1",),
}
"""The settings of each variant of an asynchronous run, by name: the defaults; without just-in-time pacing, without the
clip against μ, or without both (the former defaults); with the exact π_old of every token; with a learning rate that
depends on the effective sample size, or on the mean age; with a bound on the cosine of consecutive gradients."""


def measure(
    on_progress: Callable[[str], None],
    *,
    quick: bool = False,
    seeds: str = "0,1,2,3,4",
    ages: str = "0,1,2,4,8",
    tasks: str = "demo,slow,long",
    parts: str = "default,eager",
    steps: int = 0,
    directory: str = "",
) -> Report:
    """Measure the learning curve of every task, age (``flow.max_age``) and part (a variant of the settings, by its name
    in :data:`PARTS`) over ``seeds``; each of these four options is a list separated by commas. Return a report with a
    row for each run, a row for each comparison with the synchronous runs, and the targets. ``on_progress`` is called
    with a line of text before each run.

    ``steps`` is the number of steps of every run (0: the number that the task defines); ``quick`` makes one run of five
    steps. Models, rows and figures are stored in ``directory`` (empty: nothing is stored). Runs whose figures are
    there are not repeated, so that a call can continue a call that was stopped, and can add runs.
    """
    if quick:
        seeds, ages, tasks, parts, steps = "0", "1", "demo", "default", 5
    chosen, variants = _split_names("tasks", tasks, TASKS), _split_names("parts", parts, PARTS)
    runs = [(age, part) for age in _split_numbers("ages", ages) for part in variants if age or part == "default"]
    kept = Path(directory) if directory else None
    rows: list[Row] = []
    for task, seed in product(chosen, _split_numbers("seeds", seeds)):
        for age, part in runs[:: 1 if seed % 2 else -1]:  # the order alternates, so that no variant is always first
            key = {"task": task, "seed": seed, "max_age": age, "part": part, "steps": steps or TASKS[task].steps}
            found = _find_recorded(kept, key)
            if found is None:
                on_progress(f"{task}, seed {seed}, max_age {age}, {part}")
                found = {**key, **_measure_run(TASKS[task], kept, key)}
                _record(kept, found)
            rows.append(found)
    compared = _comparisons(rows)
    return make_report([*rows, *compared], _targets(rows, compared))


def _find_recorded(directory: Path | None, key: Row) -> Row | None:
    """Return the figures of the run that ``key`` identifies (task, seed, age, part and steps), if an earlier call
    stored them in ``directory``; else ``None``."""
    rows = map(json.loads, _complete_lines(directory))
    return next((row for row in rows if key.items() <= row.items()), None)


def _record(directory: Path | None, row: Row) -> None:
    """Append the figures of a run to :data:`ROWS` in ``directory``, by an atomic replacement of this file; do nothing
    if ``directory`` is ``None``."""
    if directory is None:
        return
    path = directory / ROWS
    fresh = path.with_suffix(".part")
    fresh.write_text("".join([*_complete_lines(directory), f"{json.dumps(row)}\n"]), encoding="utf-8")
    fresh.replace(path)


def _complete_lines(directory: Path | None) -> list[str]:
    """Return the lines of the file of figures in ``directory``, without a last line that a copy or a full disk has cut;
    an empty list if there is no file or no directory."""
    path = None if directory is None else directory / ROWS
    if path is None or not path.exists():
        return []
    return [line for line in path.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]


def _build_task(task: LearningTask, directory: Path, seed: int) -> Path:
    """Create the model, the rows and the run file of a task for a seed in ``directory``, unless an earlier call has
    created them, and return the path of the run file."""
    made = directory / f"{task.build.__name__.strip('_')}-{seed}"
    if not made.exists():
        fresh = directory / f"{made.name}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        task.build(fresh, seed)
        fresh.rename(made)  # so that a call that is stopped leaves no incomplete task
    return next(made.glob("*.toml"))


def _split_names(option: str, text: str, known: Mapping[str, object]) -> list[str]:
    """Return the names in ``text``, which are separated by commas. Raises :class:`~headrace.base.errors.ConfigError`
    for a name that is not in ``known``; ``option`` is the command-line option, for the message."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--{option}: there is no {name!r}", remedy=nearest(name, known))
    return names


def _split_numbers(option: str, text: str) -> list[int]:
    """Return the whole numbers in ``text``, which are separated by commas. Raises
    :class:`~headrace.base.errors.ConfigError` for other text; ``option`` is the command-line option, for the
    message."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option}={text!r} is not a list such as 0,1,2", remedy=f"--{option} 0,1,2") from None


def _measure_run(task: LearningTask, directory: Path | None, key: Row) -> Row:
    """Train the run of ``task`` that ``key`` identifies, and return its figures. Its model and rows are created in
    ``directory``, or in a temporary directory if that is ``None``."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        run_file = _build_task(task, directory or Path(scratch), key["seed"])
        run_dir = Path(scratch) / "run"
        return _figures(task, run_file, run_dir, _train_run(task, run_file, run_dir, key))


def _train_run(task: LearningTask, run_file: Path, run_dir: Path, key: Row) -> Summary:
    """Train the run of ``task`` that ``key`` identifies (seed, age, part and steps) in ``run_dir``, with a snapshot
    every few steps, and return its summary. ``run_file`` is the run file of the task. Raises
    :class:`~headrace.base.errors.RunError` if the run does not finish."""
    age, num_steps = key["max_age"], key["steps"]
    with as_file(files("headrace.wings.bench") / "user_code.py") as code:
        settings = [
            *(text.format(code=code) for text in task.settings),
            *(f"flow.max_age={age}", *(PARTS[key["part"]] if age else ())),
            *(f"run.seed={key['seed']}", f"run.steps={num_steps}"),
            "data.eval_path=",
            *(f"run.checkpoint_every={task.eval_interval}", f"run.keep_checkpoints={num_steps}"),
        ]
        summary = train_quietly(run_file, run_dir, *settings)
    if summary.status != "finished":
        raise RunError(
            f"the run of {key} {summary.status} after {summary.steps} of {num_steps} steps",
            remedy="let every run end: half a curve compares with nothing",
        )
    return summary


def _figures(task: LearningTask, run_file: Path, run_dir: Path, summary: Summary) -> Row:
    """Return the figures of a run of ``task`` in ``run_dir`` that has ended with ``summary``: ages, speed and idle time
    after the first steps, and its learning curve with the area under it. The tokens and the seconds to the goal
    (:data:`MARK`) are ``None`` if the run did not reach the goal. The held-out rows lie beside ``run_file``."""
    run = load_run(run_dir)
    late = run.steps[min(FIRST, len(run.steps) // 2) :]
    tokens = sum(sum(step.ages.values()) for step in late)
    first_s = late[0].clock_s - late[0].seconds - late[0].wait_s
    curve = _curve(task, run_file.parent, run_dir, run)
    goal = curve[0][2] + MARK * (1 - curve[0][2])
    at_goal = next((point for point in curve if point[2] >= goal), None)
    return {
        "mean_age": sum(old * count for step in late for old, count in step.ages.items()) / max(1, tokens),
        "tok_s": tokens / max(1e-9, late[-1].clock_s - first_s),
        "learner_waits": sum(step.wait_s for step in late) / max(1e-9, late[-1].clock_s - first_s),
        "engine_idle": summary.engine_idle_frac,
        "seconds": run.steps[-1].clock_s - run.loop[0],
        "synchronous_s": _synchronous_times_s(summary),
        "area": _area(curve),
        "end": curve[-1][2],
        "lowest_late": min(reward for _, _, reward in curve[len(curve) // 2 :]),
        "goal_tokens": at_goal and at_goal[0],
        "goal_s": at_goal and at_goal[1],
        "curve": curve,
    }


def _synchronous_times_s(summary: Summary) -> tuple[float, float] | None:
    """Return the shortest and the longest time, in seconds, that a synchronous run, in which generation and training
    take turns, would have taken for the same work, as the run's own account estimates; ``None`` without an estimate."""
    spent = summary.account
    if spent is None or not spent.turned_s:
        return None
    scale = spent.seconds / spent.turned_s
    return spent.turns_least_s * scale, spent.turns_s * scale


def _curve(task: LearningTask, directory: Path, run_dir: Path, run: RunData) -> list[tuple[int, float, float]]:
    """Return the learning curve of a run, with one point for its initial model and one for every snapshot, in order. A
    point is the number of tokens trained so far, the seconds since the training loop began, and the held-out reward.
    ``directory`` has the model and the held-out rows of the task."""
    ended, total = {0: (0, 0.0)}, 0
    for step in run.steps:
        total += step.trained_tokens
        ended[step.version] = (total, step.clock_s - run.loop[0])
    snapshots = {int(path.name.removeprefix("step-")): path for path in run_dir.glob("checkpoints/step-*")}
    models = {0: directory / "model", **snapshots}
    return [(*ended[version], _evaluate(task, directory, models[version])) for version in sorted(models)]


def _evaluate(task: LearningTask, directory: Path, model_dir: Path) -> float:
    """Return the mean reward in ``task`` of the model in ``model_dir`` on its held-out rows in ``directory``, with one
    answer to each row, sampled from a fixed seed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # there would be a progress bar for each snapshot
    rows = [json.loads(line) for line in (directory / "held_out.jsonl").read_text("utf-8").splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "model", padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    torch.manual_seed(0)  # noqa: TID251  # transformers samples from the global state alone
    ids = model.generate(
        input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, max_new_tokens=task.new_tokens,
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    texts = tokenizer.batch_decode(ids[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    return statistics.fmean(task.reward(text, row) for text, row in zip(texts, rows, strict=True))


def _area(curve: Sequence[tuple[int, float, float]]) -> float:
    """Return the area under a curve of (tokens, seconds, held-out reward), divided by its width in tokens: the mean
    held-out reward over the trained tokens.

    >>> _area([(0, 0.0, 0.0), (10, 1.0, 1.0), (20, 2.0, 1.0)])
    0.75
    """
    width = curve[-1][0] - curve[0][0]
    parts = [(later[0] - before[0]) * (later[2] + before[2]) / 2 for before, later in pairwise(curve)]
    return sum(parts) / width if width else curve[0][2]


def _comparisons(rows: Sequence[Row]) -> list[Row]:
    """Return a row for every variant (task, age and part) that compares its runs with the synchronous runs (age 0) of
    the same seeds, by the area under the curve and by the seconds to the goal. A run that does not reach the goal
    counts as infinitely long, and two such runs as equal."""
    synchronous = {(row["task"], row["seed"], row["steps"]): row for row in rows if not row["max_age"]}
    variants: dict[tuple[str, int, str], list[tuple[Row, Row]]] = {}
    for row in rows:
        beside = synchronous.get((row["task"], row["seed"], row["steps"]))
        if row["max_age"] and beside is not None:
            variants.setdefault((row["task"], row["max_age"], row["part"]), []).append((row, beside))
    found: list[Row] = []
    for (task, age, part), pairs in variants.items():
        areas = [row["area"] / beside["area"] for row, beside in pairs]
        ages = [row["mean_age"] for row, _ in pairs]
        found.append(
            {
                "what": f"{task}, max_age {age}, {part} / synchronous",
                "seeds": len(pairs),
                "area": statistics.fmean(areas),
                "area_95": confidence_interval(areas),
                "area_worst": min(areas),
                "lowest_late": min(row["lowest_late"] for row, _ in pairs),
                "goal_s": statistics.median(_ratio(row["goal_s"], beside["goal_s"]) for row, beside in pairs),
                "mean_age": statistics.fmean(ages),
            }
        )
    return found


def _ratio(seconds: float | None, other_s: float | None) -> float:
    """Return ``seconds`` divided by ``other_s``, the times of two runs to the goal. ``None`` means that a run did not
    reach the goal: the ratio is then infinite or 0, and 1 if neither run reached it."""
    if seconds is None and other_s is None:
        return 1.0
    return math.inf if seconds is None else 0.0 if other_s is None else seconds / other_s


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of ``values``, by resampling them with replacement (bootstrap).

    >>> confidence_interval([1.0, 1.0])
    (1.0, 1.0)
    """
    drawn = np.random.default_rng(0).choice(np.array(values), (NUM_RESAMPLED, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def _targets(rows: Sequence[Row], compared: Sequence[Row]) -> list[Target]:
    """Return the targets: just-in-time pacing halves the mean age that eager pacing has, at the same speed; and
    asynchronous runs learn as much per token as synchronous runs. ``rows`` are the runs, and ``compared`` their
    comparisons with synchronous runs."""
    found: list[Target] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        by = {(row["seed"], row["max_age"], row["part"]): row for row in rows if row["task"] == task}
        paired = [(row, by.get((*key[:2], "eager"))) for key, row in by.items() if key[1:] == (2, "default")]
        pairs = [(late, eager) for late, eager in paired if eager is not None]
        if pairs:
            ages = [late["mean_age"] / eager["mean_age"] for late, eager in pairs if eager["mean_age"]]
            speeds = [late["tok_s"] / eager["tok_s"] for late, eager in pairs]
            found.append(at_most(f"{task}: mean age, just in time / eager", statistics.median(ages), 0.5, "ratio"))
            found.append(at_least(f"{task}: tokens/s, just in time / eager", statistics.median(speeds), 0.98, "ratio"))
    for row in compared:
        if ", max_age 2, default" in row["what"]:
            found.append(at_least(f"area over tokens: {row['what']}, mean", row["area"], 0.98, "ratio"))
            found.append(at_least(f"area over tokens: {row['what']}, worst seed", row["area_worst"], 0.95, "ratio"))
    return found
