"""What a whole learner over two ranks does beyond loss and gradient of a plain batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.objective import Objective
from headrace.algo.reductions import TokenMean
from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied
from headrace.base.types.batch import Batch
from headrace.models.weights import correction_biases, weight_tensors
from tests.learner.builders import random_batch
from tests.learner.rank_cases import Found, _apart, _expected, _learner, _save, gradients
from tests.learner.test_parts import part
from tests.learner.test_prefixes import alike
from tests.learner.test_replay import routed


@dataclass(frozen=True, kw_only=True)
class Special:
    """A batch and settings that a learner must know how to spread."""

    kind: str = "dense"
    batch: Callable[[], Batch] = lambda: random_batch(num_samples=7)
    algo: dict[str, Any] = field(default_factory=lambda: {"bundle": "grpo"})
    config: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[dict[str, int], ...] = ({"data": 2},)


SPECIAL = {
    "replay": Special(
        kind="experts",
        batch=lambda: routed(random_batch(num_samples=7)),
        layouts=({"data": 2, "expert": 2}, {"tensor": 2, "expert": 2}, {"context": 2}),
    ),
    "balanced": Special(
        kind="experts",
        batch=lambda: routed(random_batch(num_samples=7)),
        config={"mixture": {"balance_coef": 0.5, "z_coef": 0.25}},
        layouts=({"data": 2}, {"data": 2, "expert": 2}),
    ),
    "shared": Special(batch=alike, config={"share_prefixes": True, "tokens_per_microbatch": 60}),
    "flex": Special(config={"attention": "flex"}, layouts=({"context": 2}, {"tensor": 2})),
    "selecting": Special(algo={"loss": "m2po", "old": "engine"}, layouts=({"data": 2}, {"context": 2})),
}


def _special(directory: Path, name: str) -> Found:
    special = SPECIAL[name]
    expected = _expected(directory, name)
    found: list[Found] = []
    for layout in special.layouts:
        learner = _learner(directory, layout, kind=special.kind, algo=special.algo, config=special.config)
        gradient = learner.core.forward_backward(special.batch())
        worst = max(_apart(value, expected[key]) for key, value in gradients(learner).items())
        told = {"metrics": gradient.metrics, "log_pi": gradient.log_pi_N.tolist()}
        found.append({"layout": layout, "worst": worst, **told})
    return {"found": found}


def replay(directory: Path) -> Found:
    """Experts that the engine chose."""
    return _special(directory, "replay")


def balanced(directory: Path) -> Found:
    """Losses for the balance of experts."""
    return _special(directory, "balanced")


def biases(directory: Path) -> Found:
    """The biases of a mixture's routers after two steps, and their number in a snapshot."""
    found = []
    for layout in ({"data": 2}, {"data": 2, "expert": 2}):
        learner = _learner(directory, layout, kind="biased", config=MOVING)
        for step in range(2):
            learner.train(random_batch(step=step, num_samples=7))
        found.append({name: bias.tolist() for name, bias in correction_biases(learner.core.model).items()})
    _save(learner, directory / "biased_by_two")
    return {"found": found}


def shared(directory: Path) -> Found:
    """Prompts that are computed once."""
    return _special(directory, "shared")


def flex(directory: Path) -> Found:
    """Flex attention over the keys of all ranks of a context, and over a rank's heads."""
    return _special(directory, "flex")


def selecting(directory: Path) -> Found:
    """An objective that chooses its tokens from the whole batch."""
    return _special(directory, "selecting")


MOVING = {"mixture": {"bias_rate": 0.01}}
PENALTY = {"loss": {"kind": "grpo", "kl_coef": 0.1}}
AVERAGE = {"reference": {"kind": "ema", "decay": 0.8}}
DISTIL = {"loss": "distill"}


LAYOUTS = ("data", "tensor", "context")
"""The ways to lay out two ranks that share the work of a batch."""


def _kept(directory: Path, layout: str) -> Found:
    """Three steps with a penalty to averaged weights; data-parallel ranks save a snapshot after the second."""
    learner = _learner(directory, {layout: 2}, algo=PENALTY, config=AVERAGE)
    found = penalised(learner.train, range(2))
    if layout == "data":
        _save(learner, directory / "kept_by_two")
    return {"found": found + penalised(learner.train, range(2, 3))}


def kept_resumed(directory: Path) -> Found:
    """The third step, from that snapshot, over tensor-parallel ranks."""
    learner = _learner(directory, {"tensor": 2}, kind="kept_by_two", algo=PENALTY, config=AVERAGE)
    learner.core.restore(directory / "kept_by_two", weights=False)
    return {"found": penalised(learner.train, range(2, 3))}


def penalised(train: Callable[[Batch], dict[str, float]], steps: range) -> list[list[float]]:
    """Loss and distance from the reference."""
    reports = [train(random_batch(step=step, num_samples=7)) for step in steps]
    return [[metrics["loss"], metrics["kl_ref"]] for metrics in reports]


SEVERAL = {"loss": "dapo", "correction": "tis", "epochs": 2, "minibatches": 2}
FLAT = {"eps": 1e-3}
"""An ε at which AdamW does not turn roundings into steps."""


def _updates(directory: Path, layout: str) -> Found:
    """Two batches, with several updates of each."""
    learner = _learner(directory, {layout: 2}, algo=SEVERAL, config=FLAT)
    return {"found": several(learner.train)}


for _layout in LAYOUTS:
    globals()[f"kept_{_layout}"] = lambda directory, layout=_layout: _kept(directory, layout)
    globals()[f"updates_{_layout}"] = lambda directory, layout=_layout: _updates(directory, layout)


def several(train: Callable[[Batch], dict[str, float]]) -> list[list[float]]:
    """Loss, clipped tokens and mismatch of two steps."""
    reports = [train(random_batch(step=step, num_samples=12)) for step in range(2)]
    return [[metrics[name] for name in ("loss", "clip_frac", "mismatch_kl", "updates")] for metrics in reports]


ALIGNED = {**FLAT, "alignment": {"low": 0.05, "high": 0.999}, "lr": 1e-3}
ON_FOUR = ({"data": 4}, {"data": 2, "replicate": 2}, {"data": 2, "tensor": 2}, {"tensor": 2, "context": 2})
"""Layouts of four ranks that hold different shards, or copies of them."""


def _aligned(directory: Path, layouts: Sequence[dict[str, int]]) -> Found:
    """By layout, four steps whose gradients are alike, with a bound on their cosine. The first learner saves a snapshot
    after the second step."""
    found = []
    for layout in layouts:
        learner = _learner(directory, layout, config=ALIGNED)
        before = alike_steps(learner.train, range(2))
        if layout is layouts[0]:
            _save(learner, directory / f"aligned_by_{learner.ranks.config.world}")
        found.append(before + alike_steps(learner.train, range(2, 4)))
    return {"found": found}


def aligned(directory: Path) -> Found:
    """Two ranks."""
    return _aligned(directory, [{layout: 2} for layout in (*LAYOUTS, "replicate")])


def aligned_on_four(directory: Path) -> Found:
    """Four ranks."""
    return _aligned(directory, ON_FOUR)


def aligned_resumed(directory: Path) -> Found:
    """The last two steps, from the snapshot of data-parallel ranks, over tensor-parallel ranks."""
    learner = _learner(directory, {"tensor": 2}, kind="aligned_by_2", config=ALIGNED)
    learner.core.restore(directory / "aligned_by_2", weights=False)
    return {"found": alike_steps(learner.train, range(2, 4))}


def alike_steps(train: Callable[[Batch], dict[str, float]], steps: range) -> list[list[float]]:
    """Loss, cosine, norm and number of projections of steps on the same tokens; those of the last step have the
    opposite advantages."""
    batch, found = random_batch(num_samples=7), []
    for step in steps:
        advantages_N = -batch.advantages_N if step == 3 else batch.advantages_N
        metrics = train(replace(batch, step=step, advantages_N=advantages_N))
        found.append([metrics.get(name, 0.0) for name in ("loss", "grad_alignment", "grad_norm", "grad_projected")])
    return found


def taught(directory: Path) -> Found:
    """Distilled from another model: of its own, and in this one's place."""
    cases = (("model", {"data": 2}), ("model", {"tensor": 2}), ("frozen", {"data": 2}), ("frozen", {"context": 2}))
    found = []
    for kind, layout in cases:
        config = {"teachers": [{"kind": kind, "path": str(directory / "other")}], "top_k": 5}
        learner = _learner(directory, layout, algo=DISTIL, config=config)
        metrics = learner.forward_backward(random_batch(num_samples=7))
        expected = _expected(directory, "taught")
        worst = max(_apart(gradient, expected[name]) for name, gradient in gradients(learner).items())
        found.append([metrics["loss"], worst])
    return {"found": found}


def parts(directory: Path) -> Found:
    """The batch in parts, the last of which has less samples than there are ranks."""
    learner = _learner(directory, {"data": 2})
    batch = random_batch(num_samples=7)
    learner.core.add(part(batch, [0, 1]))
    learner.core.add(part(batch, [2]))
    gradient = learner.core.finish()
    expected = _expected(directory, "dense")
    worst = max(_apart(value, expected[name]) for name, value in gradients(learner).items())
    return {"metrics": gradient.metrics, "log_pi": gradient.log_pi_N.tolist(), "worst": worst}


def scores(directory: Path) -> Found:
    """log π of every token, on every rank."""
    batch = random_batch(num_samples=7)
    layouts: tuple[dict[str, int], ...] = ({"data": 2}, {"tensor": 2}, {"context": 2})
    return {"found": [_learner(directory, layout).core.logprobs(batch).tolist() for layout in layouts]}


def from_one(directory: Path) -> Found:
    """A snapshot of one process, read into a learner that holds other weights."""
    learner = _learner(directory, {"data": 2})
    learner.core.restore(directory / "saved_by_one")
    step = learner.core.version
    return {"step": step, "loss": [learner.train(random_batch(step=at, num_samples=7))["loss"] for at in (2, 3)]}


def halves_of_weights(directory: Path) -> Found:
    """The bytes of weights, and of moments after a step, that this rank holds of all."""
    learner = _learner(directory, {"data": 2})
    learner.train(random_batch(num_samples=7))
    named = weight_tensors(learner.model).values()
    held = sum(one.master.numel() for one in learner.optimizer.trained)
    return {"held": held, "all": sum(tensor.numel() for tensor in named)}


class Greedy:
    """A loss that asks for more memory than there is, at its call number ``at``."""

    reduction = "token_mean"

    def __init__(self, at: int) -> None:
        self._left = at

    def columns(self) -> frozenset[Any]:
        return frozenset()

    def penalty(self, inputs: LossInputs) -> None:
        return None

    def corrects(self) -> bool:
        return False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        self._left -= 1
        if not self._left:
            torch.empty(2**48)
        return TokenLoss(tokens_N=-inputs.log_pi_N)


def full(directory: Path) -> Found:
    """The second rank has no memory left: the first hears of its end, and it says why itself. The last of all cases."""
    learner = _learner(directory, {"data": 2})
    learner.core._objective = Objective(Greedy(at=learner.ranks.rank), (), TokenMean())
    start_s = RealClock().now()
    try:
        learner.core.train(random_batch(num_samples=7))
    except ComponentDied as error:
        if learner.ranks.is_leader:
            return {"said": str(error), "kind": type(error).__name__, "seconds": RealClock().now() - start_s}
        (directory / "last-words").write_text(str(error))
        raise SystemExit(1) from None
    return {}
