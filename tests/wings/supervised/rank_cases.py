"""What the ranks of the tests do with given rows: every loss, over each layout of two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import MessageCodec
from headrace.learner.core import LearnerCore
from headrace.learner.parallel.mesh import Ranks
from headrace.learner.parallel.shards import gather_each, gather_whole, wrap_shard
from headrace.models.weights import weight_tensors
from headrace.wings.supervised.config import VERBS, load_tuning
from headrace.wings.supervised.learner import open_learner

TINY = 1e-12
"""The scale of a gradient that is zero everywhere, such as that of A while B is 0."""
BY_TOKENS: tuple[dict[str, int], ...] = ({"data": 2}, {"context": 2})
"""The layouts that cut a batch: every loss is computed over them."""
BY_WEIGHTS: tuple[dict[str, int], ...] = ({"replicate": 2}, {"tensor": 2})
"""The layouts that copy or cut the weights, of which a loss sees nothing."""


def choose_layouts(loss: str) -> tuple[dict[str, int], ...]:
    """Return the layouts over which a loss is computed every day; the slow tests have the others."""
    return (*BY_TOKENS, *BY_WEIGHTS) if loss.startswith("sft") else BY_TOKENS


def given_rows(directory: Path) -> dict[str, Any]:
    """What :func:`_compared` finds over the layouts of every day."""
    return _compared(directory, choose_layouts)


def given_rows_by_weights(directory: Path) -> dict[str, Any]:
    """What :func:`_compared` finds over the others."""
    return _compared(directory, lambda loss: BY_WEIGHTS)


def _compared(directory: Path, layouts: Callable[[str], Sequence[dict[str, int]]]) -> dict[str, Any]:
    """By loss and layout: the losses of all steps, the loss of the last batch without training, and how far the first
    gradient and the last weights are from those that one process has left in the directory."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.run.json")):
        tree, name = json.loads(path.read_text()), path.name.removesuffix(".run.json")
        batches = MessageCodec(list[Batch]).decode((directory / f"{name}.batches").read_bytes())
        for layout in layouts(name):
            config = load_tuning(VERBS[tree["verb"]], _on(tree["config"], layout))
            core = open_learner(config, Ranks(config.learner.parallel, torch.device("cpu")), "", len(batches))
            found[f"{name} {json.dumps(layout)}"] = _trained(core, batches, directory / name)
    return found


def _on(tree: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    return {**tree, "learner": {**tree["learner"], "parallel": layout}}


def _trained(core: LearnerCore, batches: list[Batch], expected: Path) -> dict[str, Any]:
    losses = [core.forward_backward(batches[0]).metrics["loss"]]
    core._optimizer.norm()  # sums the gradients of adapters
    found = {one.name: gather_whole(wrap_shard(one.master.grad, one.weight)) for one in core._optimizer.trained}
    gradients = load_file(f"{expected}.gradients")
    assert found.keys() == gradients.keys()
    scaled = [_most(found[key] - gradients[key]) / max(_most(gradients[key]), TINY) for key in gradients]
    core.optim_step()
    losses += [core.train(batch).metrics["loss"] for batch in batches[1:]]
    weights = load_file(f"{expected}.weights")
    now = dict(gather_each(weight_tensors(core.model).items()))
    return {
        "losses": losses,
        "gradient": max(scaled),
        "weights": max(_most(now[key] - weights[key]) for key in weights),
        "without training": core.evaluate(batches[-1])["loss"],
    }


def _most(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())
