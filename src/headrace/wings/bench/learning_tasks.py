"""The tasks of the benchmark ``learning``, with the functions that create their models, rows and run files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from headrace.wings.bench.user_code import odd
from headrace.wings.recipes.demo import build_demo
from headrace.wings.recipes.demo.build import CARELESS_FRAC
from headrace.wings.recipes.demo.reward import reward
from headrace.wings.recipes.demo.task import CHAT_TEMPLATE


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningTask:
    """A task of the benchmark ``learning``, whose held-out reward rises within minutes on a CPU."""

    build: Callable[[Path, int], Path]
    """The function that creates model, rows and run file in a directory, for a seed, and returns the path of the run
    file."""
    settings: Sequence[str] = ()
    """Overrides of the run file, ``section.key=value``; ``{code}`` is replaced by the path of ``user_code.py``."""
    steps: int
    """The number of steps of a run."""
    eval_interval: int
    """The number of steps between two snapshots."""
    reward: Callable[[str, Mapping[str, Any]], float]
    """The function that returns the reward of an answer to a row, without the delay that it has in the run."""
    new_tokens: int
    """The largest number of tokens of an answer."""


def _demo(directory: Path, seed: int) -> Path:
    """Create the demo, addition of two-digit numbers, in ``directory`` and return its run file."""
    return build_demo(directory, seed=seed).run_file


def _long(directory: Path, seed: int) -> Path:
    """Create the task ``long`` in ``directory`` and return its run file: a model with random weights, whose answers
    have geometric lengths, and rows whose reward is the fraction of characters with odd codes. ``seed`` is the seed of
    the weights and the rows."""
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


def _gym(directory: Path, seed: int) -> Path:
    """Create the task ``gym`` in ``directory`` and return its run file, which names the task ``basic_arithmetic`` of
    reasoning-gym. The model is first trained on demonstrations of sums and differences of single digits, in many of
    which a minus is read as a plus. ``seed`` is the seed of the model and the rows."""
    import numpy as np

    from headrace.models.tiny import TinySpec, make_tiny
    from headrace.policy import Policy
    from headrace.wings.bridges.reasoning_gym import make_dataset

    directory.mkdir(parents=True)
    entries = make_dataset("basic_arithmetic", {**GYM_OPTIONS, "seed": seed, "size": NUM_GYM + NUM_GYM_HELD_OUT})
    spec = TinySpec(
        vocab="Calculate. 0123456789+-", seed=seed, hidden_size=128, intermediate_size=384, max_positions=64,
        chat_template=CHAT_TEMPLATE, extra={"tie_word_embeddings": True},
    )  # fmt: skip
    cold = make_tiny(directory / "untrained", spec)
    policy = Policy.load(
        cold, lr=2e-3, loss="ce", total_steps=GYM_WARM_STEPS,
        learner={"warmup_steps": 20, "betas": [0.9, 0.98], "tokens_per_microbatch": 8192},
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    for _ in range(GYM_WARM_STEPS):
        shown = [entries[int(number)] for number in rng.integers(NUM_GYM, size=128)]
        prompts = [[{"role": "user", "content": entry["question"]}] for entry in shown]
        answers = [_careless(entry) if rng.random() < CARELESS_FRAC else entry["answer"] for entry in shown]
        policy.forward_backward(policy.demonstrations(prompts, answers), [1.0] * len(shown))
        policy.optim_step()
    policy.save(directory / "model")
    shutil.rmtree(cold)
    held_out = [entries[number] for number in range(NUM_GYM, NUM_GYM + NUM_GYM_HELD_OUT)]
    rows = [{"prompt": entry["question"], "answer": entry["answer"]} for entry in held_out]
    (directory / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = json.dumps({**GYM_OPTIONS, "seed": seed}).replace('":', '" =')
    (directory / "run.toml").write_text(GYM.format(count=NUM_GYM, options=options), encoding="utf-8")
    return directory / "run.toml"


def _careless(entry: Mapping[str, Any]) -> str:
    """Return the wrong answer of a demonstration for an entry of reasoning-gym: every minus in the expression is read
    as a plus."""
    return str(sum(int(number) for number in re.findall(r"\d+", entry["metadata"]["expression"])))


def _right(completion: str, row: Mapping[str, Any]) -> float:
    """Return the reward of the demo for an answer to ``row``: 1 if it is the correct sum, otherwise 0."""
    return reward(completion, row["answer"])


NUM_GYM = 6000
"""The number of rows of the task of reasoning-gym that are trained."""
NUM_GYM_HELD_OUT = 400
GYM_WARM_STEPS = 200
"""The number of training steps on demonstrations before the run."""
GYM_OPTIONS: Mapping[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "max_digits": 1,
    "operators": ["+", "-"],
    "allow_parentheses": False,
}
GYM = """
[model]
path = "model"
[data]
count = {count}
[env]
kind = "bridge"
entry = "reasoning_gym/basic_arithmetic"
options = {options}
[engine]
max_new_tokens = 4
max_sequences = 256
[flow]
groups_per_step = 64
group_size = 4
[learner]
lr = 3e-4
warmup_steps = 5
betas = [0.9, 0.99]
"""
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
    "demo": LearningTask(build=_demo, steps=150, eval_interval=10, reward=_right, new_tokens=4),
    "slow": LearningTask(
        build=_demo,
        settings=("flow.groups_per_step=16", "env.reward={code}:slow_sum"),
        steps=60,
        eval_interval=10,
        reward=_right,
        new_tokens=4,
    ),
    "long": LearningTask(build=_long, steps=60, eval_interval=5, reward=lambda text, row: odd(text), new_tokens=128),
    "gym": LearningTask(
        build=_gym,
        steps=120,
        eval_interval=10,
        reward=lambda text, row: float(text.strip() == row["answer"]),
        new_tokens=4,
    ),
}
"""The tasks, by name: the demo, the demo with rewards that take 300 ms, answers of geometric lengths, and a task of
reasoning-gym."""
