"""Headrace on a task: run by compare.py in a process of its own. Prints one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.run.observe import load_run
from headrace.run.session import load_config, train


def run_file(task: dict) -> Path:
    """What a user would write."""
    directory = Path(task["directory"])
    path = directory / "run.toml"
    path.write_text(
        f"""
[model]
path = "model"
[data]
path = "train.jsonl"
[env]
reward = "reward.py:reward"
[engine]
max_new_tokens = {task["new_tokens"]}
max_sequences = {min(256, 2 * task["prompts"] * task["group"])}
[flow]
groups_per_step = {task["prompts"]}
group_size = {task["group"]}
max_age = {task["max_age"]}
[learner]
lr = {task["lr"]}
warmup_steps = {task["warmup"]}
betas = [{task["betas"][0]}, {task["betas"][1]}]
[run]
dir = {json.dumps(task["scratch"])}
steps = {task["steps"]}
seed = {task["seed"]}
checkpoint_every = {task["every"] or task["steps"]}
keep_checkpoints = {task["steps"]}
"""
    )
    return path


def main() -> None:
    """The task is the first argument, as JSON."""
    task = json.loads(sys.argv[1])
    train(load_config(run_file(task), ["observe.view=none", "observe.report=false"]))
    run = load_run(Path(task["scratch"]))
    begin_s = run.loop[0]
    ends = [record.clock_s - begin_s for record in run.steps]
    tokens = [record.trained_tokens for record in run.steps]
    print(json.dumps({"ends": ends, "tokens": tokens, "curve": []}))


if __name__ == "__main__":
    main()
