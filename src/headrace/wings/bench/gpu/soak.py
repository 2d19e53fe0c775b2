"""The stage ``soak``: a loop that samples, trains and publishes for as long as there is time, during which memory must
not grow."""

from __future__ import annotations

import asyncio

import torch

from headrace.policy import Policy
from headrace.wings.bench.base import at_least, at_most
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.gpu.shapes import SMALL, write_model
from headrace.wings.bench.learner_worker import memory_bytes

GROWTH = 1.02
"""The largest ratio of the device's memory at the end to its memory after a third of the rounds."""
HOST_GROWTH = 1.10
"""The largest such ratio for the host's memory. It is larger, since the heap of Python grows and shrinks."""
LEAST = 6
"""The smallest number of rounds, whatever their duration."""


def run(stage: StageContext) -> None:
    """Run the stage, a loop in an event loop of its own."""
    asyncio.run(_loop(stage))


async def _loop(stage: StageContext) -> None:
    """Sample, train and publish until a fifth of the time of ``stage`` is left, and record the growth of memory over
    the rounds."""
    folder = write_model(stage, SMALL, "bfloat16")
    new = 4 if stage.pretend else 64
    policy = Policy.load(
        str(folder), device=stage.request.device, lr=1e-6, loss="grpo", model={"dtype": "bfloat16"},
        engine={"max_context": new + 16, "max_sequences": 64},
    )  # fmt: skip
    device: list[int] = []
    host: list[int] = []
    max_rounds = LEAST if stage.pretend else 10_000
    async with policy:
        while len(device) < LEAST or (stage.left_s() > stage.request.seconds / 5 and len(device) < max_rounds):
            groups = await policy.sample([[3, 4, 5, 6]] * 2, n=8, max_new_tokens=new)
            policy.forward_backward(groups, [[1.0, -1.0] * 4] * 2)
            policy.optim_step()
            await policy.publish()
            device.append(torch.cuda.memory_allocated())
            host.append(memory_bytes("VmRSS"))
    for name, column, most_growth in (("device", device, GROWTH), ("host", host, HOST_GROWTH)):
        growth = column[-1] / column[len(column) // 3]
        stage.add_row(what=f"memory of the {name}", rounds=len(column), last_mib=column[-1] / 2**20, growth=growth)
        stage.add_target(at_most(f"soak, memory of the {name}: growth", growth, most_growth, "ratio"))
    stage.add_target(at_least("soak, rounds", len(device), LEAST, "rounds"))
