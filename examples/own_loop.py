"""Your own loop in plain Python: sample, reward, train, publish. The next batch is sampled while this one trains.

    python examples/own_loop.py [DIRECTORY] [STEPS]

The task is that of `headrace demo`: a small model, taught to add by a careless teacher, learns to carry. It takes about
a minute on two cores, most of it for the teacher. Rewards are printed, and drawn in DIRECTORY/report.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import headrace
from headrace.base.clock import RealClock
from headrace.base.types.observation import StepRecord
from headrace.run.observe import METRICS_FILE, JsonlWriter, write_report
from headrace.wings.recipes.demo import build_demo
from headrace.wings.recipes.demo.reward import reward


async def train(policy, home, metrics, steps):
    files = [(home / name).read_text().splitlines() for name in ("train.jsonl", "held_out.jsonl")]
    rows, held_out = ([json.loads(line) for line in lines] for lines in files)
    rng, clock = np.random.default_rng(0), RealClock()

    async def ask(rows, **options):
        groups = await policy.sample([row["prompt"] for row in rows], max_new_tokens=4, **options)
        pairs = zip(groups, rows, strict=True)
        return groups, [[reward(sample.text, row["answer"]) for sample in group] for group, row in pairs]

    async with policy, asyncio.TaskGroup() as tasks:
        print(f"held-out accuracy {np.mean((await ask(held_out, temperature=0))[1]):.2f}")
        start_s, ahead = clock.now(), tasks.create_task(ask(rng.choice(rows, 64), n=4))
        for step in range(steps):
            groups, rewards = await ahead
            ahead = tasks.create_task(ask(rng.choice(rows, 64), n=4))  # continues while these are trained
            report = await asyncio.to_thread(policy.forward_backward, groups, policy.advantages("grpo", rewards))
            await asyncio.to_thread(policy.optim_step)
            swap = await policy.publish()  # into whatever is being sampled, between two of its steps
            now_s, line = clock.now(), {"reward_mean": float(np.mean(rewards)), "metrics": report.metrics}
            print(f"step {step:3}  reward {line['reward_mean']:.2f}  the engine stood still {swap.gap_s * 1e3:.2f} ms")
            metrics.write([StepRecord(step=step, version=step + 1, clock_s=now_s, wall_s=now_s - start_s, **line)])
        print(f"held-out accuracy {np.mean((await ask(held_out, temperature=0))[1]):.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    home = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="own-loop-"))
    model = home / "model" if (home / "model").exists() else build_demo(home, seed=0).directory / "model"
    policy = headrace.Policy.load(model, lr=3e-4, loss="dapo", engine={"max_sequences": 256})
    with JsonlWriter[StepRecord](home / METRICS_FILE) as metrics:
        asyncio.run(train(policy, home, metrics, steps=int(sys.argv[2]) if len(sys.argv) > 2 else 60))
    policy.save(home / f"step-{policy.version}")  # an ordinary model directory; Policy.load continues from it
    print(f"the curve is in {write_report(home)}")
