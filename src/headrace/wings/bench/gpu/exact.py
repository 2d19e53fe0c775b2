"""The stage ``exact``: whether engine and learner compute equal logprobs at equal weights, and whether the engine
fulfils the contract of engines on the device.

The prompts are read in small pieces, have common beginnings, are sampled in groups, and need a larger cache than there
is for all sequences at once. The learner's log π of every sampled token is compared with the engine's log μ.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np

from headrace.base.environ import program_environment
from headrace.policy import Policy
from headrace.wings.bench.base import at_least, at_most
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.gpu.shapes import MIXTURE, SINKS, SMALL, find_model, write_model

CONTRACT = "headrace.testing.engine_on_device"
"""The program that checks the contract of engines on one device."""
CLOSE = {"float32": 1e-3, "bfloat16": 0.05}
"""The largest acceptable mean of |log π − log μ| over the tokens, in nats, by number format."""
CONTRACT_SHARE = 0.5
"""The fraction of the stage's time that is reserved for the contract."""


def run(stage: StageContext) -> None:
    """Compare engine and learner for each kind of model, then check the contract. ``stage`` records the results."""
    contract_s = CONTRACT_SHARE * stage.request.seconds
    for model in (SMALL, SINKS, MIXTURE):
        for dtype in ("float32", "bfloat16"):
            if model != SMALL and (dtype == "float32") != stage.pretend:
                continue  # only one format for the large models, which in float32 would not fit on a GPU
            what = f"engine against learner, {model}, {dtype}"
            stage.attempt(what, partial(_compare, stage, model, dtype), needs_s=contract_s + 8)
    _check_contract(stage)


def _compare(stage: StageContext, model: str, dtype: str) -> None:
    """Compare engine and learner on the model with the key ``model`` in one number format."""
    asyncio.run(_sample_and_train(stage, model, dtype))


async def _sample_and_train(stage: StageContext, model: str, dtype: str) -> None:
    """Sample groups of answers from ``model`` in the number format ``dtype`` and train on them; record the mean
    difference of log π and log μ in ``stage``."""
    folder = write_model(stage, model, dtype)
    long, new, room = (24, 12, 96) if stage.pretend else (700, 48, 6_000)
    vocab = find_model(model, pretend=stage.pretend).settings["vocab_size"]
    rng = np.random.default_rng(0)
    start = rng.integers(3, vocab, long).tolist()
    prompts: list[Any] = [start + rng.integers(3, vocab, more).tolist() for more in (1, long // 2)] + [start[:7]]
    settings = {"cache_tokens": room, "max_step_tokens": 16 if stage.pretend else 512, "max_context": 2 * long + new}
    policy = Policy.load(
        str(folder), device=stage.request.device, lr=1e-6, loss="grpo", model={"dtype": dtype}, engine=settings,
        learner={"keep_routing": True},
    )  # fmt: skip
    async with policy:
        groups = await policy.sample(prompts, n=4, max_new_tokens=new, seed=1)
        metrics = policy.forward_backward(groups, [[1.0, -1.0, 0.5, -0.5]] * len(prompts)).metrics
        facts, stats = policy.facts, policy.engine.stats()
    difference = metrics["mismatch_abs"]
    stage.add_row(
        what=f"engine against learner, {model}, {dtype}", mean_apart=difference, kl=metrics["mismatch_kl"],
        attention=facts["attention"], cache_tokens=room, preempted=stats.preempted, cached=stats.cached_tokens,
    )  # fmt: skip
    name = f"engine against learner, {model}, {dtype}: mean |Δ logprob|"
    stage.add_target(at_most(name, difference, CLOSE[dtype], "nats"))


def _check_contract(stage: StageContext) -> None:
    """Check the contract of engines in a process of its own, for as long as ``stage`` has time, and record the result
    of each clause."""
    left_s = max(1.0, stage.left_s() - 4.0)
    command = [sys.executable, "-m", CONTRACT, stage.request.device, f"{0.7 * left_s:g}"]
    if stage.pretend:
        command.append("--few")
    variables = {"OMP_NUM_THREADS": "1"} if stage.pretend else {}  # on the claimed device several threads are slower
    process = subprocess.Popen(command, env=program_environment(variables), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    alarm = threading.Timer(left_s, process.kill)
    alarm.start()
    found = []
    for line in process.stdout:
        if line.startswith("{"):
            found.append(json.loads(line))
            each = found[-1]
            stage.add_row(what=f"contract, {each['suite']}: {each['clause']}", result=each["result"], s=each["s"])
    code = process.wait()
    late = not alarm.is_alive()
    alarm.cancel()
    if late:
        stage.add_row(what="contract", left_out="its time was over: raise --budget, or choose fewer --stages")
    broken = [each["clause"] for each in found if each["result"].startswith("BROKEN")]
    stage.add_target(
        at_most("contract of engines: clauses broken", len(broken) + bool(code and not late), 0, "clauses")
    )
    stage.add_target(at_least("contract of engines: clauses checked", len(found), 1, "clauses"))
