"""Learning curves over seeds: held-out reward over trained tokens and over seconds, by staleness and by its settings.

    task × variant × seed ──▶ one run that writes snapshots ──▶ held-out rows answered by each ──▶ curve
    curve ──▶ area, seconds and tokens to the goal

Snapshots are judged when the run is over: evaluations on the way would take as much of the engine as training does, and
the ages would be those of another run. Writing the snapshots is part of the seconds.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError, RunError, nearest
from headrace.control.metrics.summary import Summary
from headrace.run.observe import RunData, load_run
from headrace.run.session import load_config, train
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, report
from headrace.wings.bench.user_code import odd
from headrace.wings.recipes.demo import build_demo
from headrace.wings.recipes.demo.reward import reward

FIRST = 12
"""First steps that count for no mean age: without history every group starts at once."""
MARK = 0.9
"""The held-out reward that is raced for, as a share of the way from the first evaluation to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningTask:
    """A task whose held-out reward climbs within minutes on a processor."""

    build: Callable[[Path, int], Path]
    """Makes it in a directory, for a seed, and returns its run file."""
    settings: Sequence[str] = ()
    """Overrides of the run file."""
    steps: int
    every: int
    """Number of steps between two snapshots."""
    reward: Callable[[str, Mapping[str, Any]], float]
    """The reward of an answer to a row, without any delay."""
    new_tokens: int
    """Greatest number of tokens of an answer."""


def _demo(directory: Path, seed: int) -> Path:
    return build_demo(directory, seed=seed).run_file


def _long(directory: Path, seed: int) -> Path:
    """Make a model without training, whose answers have geometric lengths, and rows whose reward is the share of
    characters with odd codes."""
    import numpy as np

    from headrace.models.tiny import TinySpec, make_tiny

    directory.mkdir(parents=True)
    letters = "".join(chr(code) for code in range(0x20, 0x5F))
    spec = TinySpec(
        vocab=letters, seed=seed, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=384,
        max_positions=256, even_ends=True, extra={"tie_word_embeddings": True},
    )  # fmt: skip
    make_tiny(directory / "model", spec)
    rng = np.random.default_rng(seed)
    for name, count in (("train.jsonl", 2048), ("held_out.jsonl", 64)):
        rows = [{"prompt": "".join(rng.choice(list(letters), 8)), "answer": 0} for _ in range(count)]
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with as_file(files("headrace.wings.bench") / "user_code.py") as user_code:
        (directory / "run.toml").write_text(LONG.format(reward=f"{user_code}:odd"), encoding="utf-8")
    return directory / "run.toml"


def _right(completion: str, row: Mapping[str, Any]) -> float:
    return reward(completion, row["answer"])


LONG = """
[model]
path = "model"
[data]
path = "train.jsonl"
eval_path = "held_out.jsonl"
[env]
reward = "{reward}"
[engine]
max_new_tokens = 128
max_sequences = 128
[flow]
groups_per_step = 8
group_size = 8
[learner]
lr = 3e-4
betas = [0.9, 0.99]
"""

TASKS: Mapping[str, LearningTask] = {
    "demo": LearningTask(build=_demo, steps=150, every=10, reward=_right, new_tokens=4),
    "slow": LearningTask(
        build=_demo,
        settings=("flow.groups_per_step=16", "env.reward={code}:slow_sum"),
        steps=60,
        every=10,
        reward=_right,
        new_tokens=4,
    ),
    "long": LearningTask(build=_long, steps=60, every=5, reward=lambda text, row: odd(text), new_tokens=128),
}
"""The tasks: the demo, the demo with rewards that take 300 ms, and answers of geometric lengths."""
PARTS: Mapping[str, Sequence[str]] = {
    "default": (),
    "eager": ("flow.pacing=eager",),
    "idle clip": ("algo.old=learner",),
    "former": ("flow.pacing=eager", "algo.old=learner"),
    "sampled": ("algo.old=sampled",),
    "ess": ("learner.damping.kind=ess",),
}
"""The variants of an asynchronous run: as it is; without just-in-time pacing, the clip against μ, or both (as the
defaults were before); with the exact π_old of every token, or a rate that follows the effective sample size."""


def measure(
    tell: Callable[[str], None],
    *,
    quick: bool = False,
    seeds: str = "0,1,2,3,4",
    ages: str = "0,1,2,4,8",
    tasks: str = "demo,slow,long",
    parts: str = "default,eager",
    steps: int = 0,
    directory: str = "",
) -> Report:
    """Measure the curve of every task, age and part over ``seeds``. ``steps`` shortens every run; ``quick`` makes one
    of five steps. Models and rows are kept in ``directory`` for later calls, where it is given."""
    if quick:
        seeds, ages, tasks, parts, steps = "0", "1", "demo", "default", 5
    chosen, variants = _listed("tasks", tasks, TASKS), _listed("parts", parts, PARTS)
    rows: list[Row] = []
    runs = [(age, part) for age in _numbers("ages", ages) for part in variants if age or part == "default"]
    for task, seed in product(chosen, _numbers("seeds", seeds)):
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
            run_file = _built(TASKS[task], Path(directory or scratch), seed)
            for age, part in runs[:: 1 if seed % 2 else -1]:  # neither is always the first
                tell(f"{task}, seed {seed}, max_age {age}, {part}")
                into = Path(scratch) / f"{age}-{part.replace(' ', '-')}"
                found = _measured(TASKS[task], run_file, into, seed=seed, age=age, part=part, steps=steps)
                rows.append({"task": task, "seed": seed, "max_age": age, "part": part, **found})
    return report(rows, _targets(rows))


def _built(task: LearningTask, directory: Path, seed: int) -> Path:
    """Return the run file of a task, which is made unless ``directory`` holds it from before."""
    made = directory / f"{task.build.__name__.strip('_')}-{seed}"
    if not made.exists():
        fresh = directory / f"{made.name}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        task.build(fresh, seed)
        fresh.rename(made)  # a call that is stopped leaves no half of a task
    return next(made.glob("*.toml"))


def _listed(option: str, text: str, known: Mapping[str, object]) -> list[str]:
    """Return the names in ``text``, which are separated by commas."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--{option}: there is no {name!r}", remedy=nearest(name, known))
    return names


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--{option}={text!r} is no list of numbers", remedy=f"--{option} 0,1,2") from None


def _measured(task: LearningTask, run_file: Path, run_dir: Path, *, seed: int, age: int, part: str, steps: int) -> Row:
    """Return the figures of one run."""
    num_steps = steps or task.steps
    with as_file(files("headrace.wings.bench") / "user_code.py") as code:
        settings = [
            *(text.format(code=code) for text in task.settings),
            *(f"flow.max_age={age}", *(PARTS[part] if age else ())),
            *(f"run.seed={seed}", f"run.steps={num_steps}", f"run.dir={run_dir}", "data.eval_path="),
            *(f"run.checkpoint_every={task.every}", f"run.keep_checkpoints={num_steps}"),
            *("observe.view=none", "observe.report=false"),
        ]
        summary = train(load_config(run_file, settings))
    if summary.status != "finished":
        raise RunError(
            f"{run_dir.name} of seed {seed} {summary.status} after {summary.steps} of {num_steps} steps",
            remedy="let every run end: half a curve compares with nothing",
        )
    run = load_run(run_dir)
    late = run.steps[min(FIRST, len(run.steps) // 2) :]
    tokens = sum(sum(step.ages.values()) for step in late)
    first_s = late[0].clock_s - late[0].seconds - late[0].wait_s
    curve = _curve(task, run_file.parent, run_dir, run)
    goal = curve[0][2] + MARK * (1 - curve[0][2])
    reached = next((point for point in curve if point[2] >= goal), None)
    return {
        "mean_age": sum(old * count for step in late for old, count in step.ages.items()) / max(1, tokens),
        "tok_s": tokens / max(1e-9, late[-1].clock_s - first_s),
        "learner_waits": sum(step.wait_s for step in late) / max(1e-9, late[-1].clock_s - first_s),
        "engine_idle": summary.engine_idle_frac,
        "seconds": run.steps[-1].clock_s - run.loop[0],
        "synchronous_s": _of_turns(summary),
        "area": _area(curve),
        "end": curve[-1][2],
        "lowest_late": min(reward for _, _, reward in curve[len(curve) // 2 :]),
        "goal_tokens": reached and reached[0],
        "goal_s": reached and reached[1],
        "curve": curve,
    }


def _of_turns(summary: Summary) -> tuple[float, float] | None:
    """Return between which times a synchronous run would have taken as long, in seconds, by the run's own account."""
    spent = summary.account
    if spent is None or not spent.turned_s:
        return None
    scale = spent.seconds / spent.turned_s
    return spent.turns_least_s * scale, spent.turns_s * scale


def _curve(task: LearningTask, directory: Path, run_dir: Path, run: RunData) -> list[tuple[int, float, float]]:
    """Return trained tokens, seconds and held-out reward of the model that the run began with and of every snapshot."""
    ended, total = {0: (0, 0.0)}, 0
    for step in run.steps:
        total += step.trained_tokens
        ended[step.version] = (total, step.clock_s - run.loop[0])
    snapshots = {int(path.name.removeprefix("step-")): path for path in run_dir.glob("checkpoints/step-*")}
    judged = {0: directory / "model", **snapshots}
    return [(*ended[version], _judge(task, directory, judged[version])) for version in sorted(judged)]


def _judge(task: LearningTask, directory: Path, model_dir: Path) -> float:
    """Return the mean reward of one answer to each held-out row, sampled from a seed that is always the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in (directory / "held_out.jsonl").read_text("utf-8").splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "model", padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    asked = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    torch.manual_seed(0)  # noqa: TID251  # transformers samples from the global state alone
    ids = model.generate(
        input_ids=asked.input_ids, attention_mask=asked.attention_mask, max_new_tokens=task.new_tokens,
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    texts = tokenizer.batch_decode(ids[:, asked.input_ids.shape[1] :], skip_special_tokens=True)
    return statistics.fmean(task.reward(text, row) for text, row in zip(texts, rows, strict=True))


def _area(curve: Sequence[tuple[int, float, float]]) -> float:
    """Return the mean held-out reward over the trained tokens.

    >>> _area([(0, 0.0, 0.0), (10, 1.0, 1.0), (20, 2.0, 1.0)])
    0.75
    """
    width = curve[-1][0] - curve[0][0]
    parts = [(later[0] - before[0]) * (later[2] + before[2]) / 2 for before, later in pairwise(curve)]
    return sum(parts) / width if width else curve[0][2]


def _targets(rows: Sequence[Row]) -> list[Target]:
    """Return what is aimed at: ages halved at no cost where the engine is idle, and no loss over tokens."""
    found: list[Target] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        by = {(row["seed"], row["max_age"], row["part"]): row for row in of_task}
        paired = [(row, by.get((*key[:2], "eager"))) for key, row in by.items() if key[1:] == (2, "default")]
        pairs = [(late, eager) for late, eager in paired if eager is not None]
        if pairs:
            ages = [late["mean_age"] / eager["mean_age"] for late, eager in pairs if eager["mean_age"]]
            speeds = [late["tok_s"] / eager["tok_s"] for late, eager in pairs]
            found.append(at_most(f"{task}: mean age, just in time / eager", statistics.median(ages), 0.5, "ratio"))
            found.append(at_least(f"{task}: tokens/s, just in time / eager", statistics.median(speeds), 0.98, "ratio"))
        areas = [
            row["area"] / by[row["seed"], 0, "default"]["area"]
            for key, row in by.items()
            if key[1:] == (2, "default") and (row["seed"], 0, "default") in by
        ]
        if areas:
            found.append(
                at_least(f"{task}: area over tokens, age 2 / 0, median", statistics.median(areas), 0.98, "ratio")
            )
            found.append(at_least(f"{task}: area over tokens, age 2 / 0, worst seed", min(areas), 0.95, "ratio"))
    return found
