"""A loop of one's own on the device that is named, and what it gave, as JSON. It runs with a claimed device."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from headrace.policy import Policy
from headrace.testing.claimed.device import WORK

TOKENS = 8


async def loop(directory: str, device: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Sample, train, publish and score on a device, and count the work of a pass and of a step."""
    async with Policy.load(directory, device=device, lr=1e-3, loss="grpo", seed=3, **settings) as policy:
        WORK.reset()
        groups = await policy.sample(["abc", "a b c d"], n=3, max_new_tokens=TOKENS, seed=1)
        sampled = dict(WORK.counts)
        WORK.reset()
        step = policy.forward_backward(groups, [[1.0, 0.0, -1.0]] * 2)
        update = policy.optim_step()
        trained = dict(WORK.counts)
        await policy.publish()
        samples = [sample for group in groups for sample in group]
        return {
            "ids": [sample.tokens.ids_T.tolist() for sample in samples],
            "logprobs": [sample.tokens.logprobs_T.tolist() for sample in samples],
            "loss": step.metrics["loss"],
            "grad_norm": update.grad_norm,
            "scores": [scores_F.tolist() for scores_F in await policy.score(samples)],
            "sampled": sampled,
            "trained": trained,
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, where, options = sys.argv
    found = {device: asyncio.run(loop(where, device, json.loads(options))) for device in ("cpu", "cuda")}
    print(json.dumps(found))
