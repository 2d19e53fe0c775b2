"""Train a task with Headrace and print the figures as one line of JSON. ``compare.py`` starts this program in a
separate process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headrace.run.observe import load_run
from headrace.run.session import load_config, train


def write_run_file(task: dict) -> Path:
    """Write the run file of ``task``, as a user would write it, into the task's directory, and return its path."""
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
    """Train the task in the first argument, which is JSON, and print the figures."""
    task = json.loads(sys.argv[1])
    train(load_config(write_run_file(task), ["observe.view=none", "observe.report=false"]))
    run = load_run(Path(task["scratch"]))
    begin_s = run.loop[0]
    ends = [record.clock_s - begin_s for record in run.steps]
    tokens = [record.trained_tokens for record in run.steps]
    print(json.dumps({"ends": ends, "tokens": tokens, "curve": []}))


if __name__ == "__main__":
    main()
