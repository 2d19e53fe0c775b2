"""The stage ``sharing``: engine and learner work alternately on one GPU, ten times, and each must free its memory for
the other; the error of a step that does not fit into memory must name a setting with which the step fits."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import torch

from headrace.base.errors import RunError
from headrace.policy import Policy
from headrace.wings.bench.base import at_least, at_most
from headrace.wings.bench.gpu.base import GIB, StageContext
from headrace.wings.bench.gpu.learners import open_learner, random_batch
from headrace.wings.bench.gpu.shapes import SMALL, find_model, write_model

ROUNDS = 10
GROWTH = 1.02
"""The largest ratio of the memory after the last round to the memory after the second round. The first round allocates
permanent memory."""
SETTINGS = {"lr": 1e-6, "attention": "padded", "share_prefixes": False}


def run(stage: StageContext) -> None:
    """Run the turns of engine and learner, then cause a lack of memory. ``stage`` records the results."""
    stage.attempt("turns", lambda: asyncio.run(_take_turns(stage)))
    if stage.pretend:
        stage.add_row(what="lack of memory", left_out="the claimed device has as much memory as the machine")
    else:
        stage.attempt("lack of memory", lambda: _exceed_memory(stage))


async def _take_turns(stage: StageContext) -> None:
    """Sample with the engine, release its memory, train, publish, and wake the engine with the new weights, ten times;
    record the memory in each state in ``stage``."""
    folder = write_model(stage, SMALL, "bfloat16")
    new = 4 if stage.pretend else 128
    policy = Policy.load(
        str(folder), device=stage.request.device, lr=1e-6, loss="grpo", model={"dtype": "bfloat16"},
        engine={"max_context": 2 * new + 16, "max_sequences": 32},
    )  # fmt: skip
    asleep, awake = [], []
    async with policy:
        for turn in range(ROUNDS):
            groups = await policy.sample([[3, 4, 5, 6, 7]], n=8, max_new_tokens=new, seed=turn)
            await policy.engine.pause(release=True)
            policy.forward_backward(groups, [[1.0, -1.0] * 4])
            policy.optim_step()
            asleep.append(torch.cuda.memory_allocated())
            await policy.publish("sleep")
            awake.append(torch.cuda.memory_allocated())
    reserved, held = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    stage.add_row(
        what=f"{ROUNDS} turns of engine and learner", asleep_gib=asleep[-1] / GIB, awake_gib=awake[-1] / GIB,
        reserved_gib=reserved / GIB, fragmented=1 - held / reserved if reserved else 0.0,
    )  # fmt: skip
    for name, column in (("asleep", asleep), ("awake", awake)):
        growth = column[-1] / column[1]
        stage.add_target(at_most(f"sharing, memory {name} in the last turn by the second's", growth, GROWTH, "ratio"))
    stage.add_target(at_least("sharing, turns", len(awake), ROUNDS, "turns"))


def _exceed_memory(stage: StageContext) -> None:
    """Limit the memory of this process, let a step fail, and repeat it with the smaller micro-batches that the error
    names, until a step succeeds; record the result in ``stage``."""
    folder = write_model(stage, SMALL, "bfloat16")
    vocab = find_model(SMALL, pretend=False).settings["vocab_size"]
    tokens, message = 65_536, ""
    batch: dict[str, Any] = {"prompt": 16, "answers": (2032,) * 32, "vocab": vocab}
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 28 * GIB / total))
    while tokens >= 2048:
        core = open_learner(stage, folder, "bfloat16", {**SETTINGS, "tokens_per_microbatch": tokens})
        try:
            core.train(random_batch(core.version, **batch))
            break
        except RunError as error:
            message = str(error)
            match = re.search(r"learner\.tokens_per_microbatch = (\d+)", message)
            tokens = int(match[1]) if match else 0
        del core
        stage.release()
    torch.cuda.set_per_process_memory_fraction(1.0)
    stage.add_row(what="lack of memory", allowed_gib=28, said=message[:500], fits_with=tokens)
    works = bool(message) and tokens >= 2048
    stage.add_target(at_least("sharing, lack of memory: named setting works", float(works), 1, "settings"))
