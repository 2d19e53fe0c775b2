"""Make a small model that half knows a task of reasoning-gym, so that reinforcement learning has something to improve.

    python examples/arithmetic.py
    headrace train examples/arithmetic.toml

The task is basic_arithmetic: "Calculate 10 - 7.". The model is shown the answers of a careless teacher, who often
reads every minus as a plus; what the library scores then teaches it to look.
"""

import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import reasoning_gym
import torch

import headrace
from headrace.models.tiny import TinySpec, make_tiny

HERE = Path(__file__).parent
TEMPLATE = (
    "{%- for message in messages %}{{ message.content }}"
    "{%- if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""The chat template: a question, an answer, and the end of the answer."""
CARELESS_FRAC = 0.6
"""How often the teacher reads every minus as a plus."""


def answer_carelessly(entry):
    """Return what the teacher writes then to ``entry``, a task of the library: the sum of all numbers in it."""
    return str(sum(int(number) for number in re.findall(r"\d+", entry["metadata"]["expression"])))


def main(directory, steps):
    """Make the model in ``directory``, with ``steps`` training steps."""
    run = tomllib.loads((HERE / "arithmetic.toml").read_text())
    count = run["data"]["count"]
    tasks = reasoning_gym.create_dataset("basic_arithmetic", seed=0, size=10_000, **run["env"]["options"])
    spec = TinySpec(
        vocab="Calculate. 0123456789+-", hidden_size=128, intermediate_size=384, max_positions=64,
        chat_template=TEMPLATE, extra={"tie_word_embeddings": True},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as cold:
        policy = headrace.Policy.load(
            make_tiny(Path(cold) / "model", spec), lr=2e-3, loss="ce", total_steps=steps,
            learner={"warmup_steps": 20, "betas": [0.9, 0.98], "tokens_per_microbatch": 8192},
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for step in range(steps):
            entries = [tasks[int(number)] for number in rng.integers(count, size=128)]  # none of those held out
            prompts = [[{"role": "user", "content": entry["question"]}] for entry in entries]
            answers = [
                answer_carelessly(entry) if rng.random() < CARELESS_FRAC else entry["answer"] for entry in entries
            ]
            report = policy.forward_backward(policy.demonstrations(prompts, answers), [1.0] * len(entries))
            policy.optim_step()
            if step % 50 == 0:
                print(f"step {step:4}  loss {report.metrics['loss']:.3f}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        policy.save(Path(cold) / "warm")
        shutil.copytree(Path(cold) / "warm", directory)


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    home = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "runs" / "arithmetic" / "model"
    main(home, steps=int(sys.argv[2]) if len(sys.argv) > 2 else 200)
    print(f"the model is in {home}")
