"""The stage ``learner``: the speed of training steps compared with the rate of matrix products, packed samples compared
with single samples, gradients compared with float32, and memory compared with the planner's estimate.

    share of products (MFU) = operations of a step (2 forward and 4 backward for each active parameter and token, and
                              attention; costs.TrainingFlops) / seconds / measured rate of bfloat16 products
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.base.types.batch import Batch
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerCore
from headrace.learner.footprint import LearnerSizes
from headrace.models.shape import ModelShape
from headrace.wings.bench.base import at_least, at_most
from headrace.wings.bench.engine import draw_lengths
from headrace.wings.bench.gpu.base import GIB, StageContext
from headrace.wings.bench.gpu.learners import open_learner, random_batch
from headrace.wings.bench.gpu.shapes import LARGE, MEASURED, MIDDLE, MIXTURE, SINKS, SMALL, find_model, write_model
from headrace.wings.plan.costs import TrainingFlops

MFU = 0.4
"""The target for the share of the rate of products."""
DTYPE = "bfloat16"
PACKED = draw_lengths(32, 896, 3840)
"""The lengths of the answers of a step: very different, and about 32 thousand tokens together with their prompts."""
PROMPT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCase:
    """One measurement of the learner: a model, a batch, and settings."""

    description: str
    """The description of the case, for the report."""
    model: str
    needs_s: float
    """The duration of the measurement on a fast GPU, with the creation of the model, in seconds."""
    answers: tuple[int, ...] = PACKED
    """The number of tokens of each answer of the batch."""
    prompt: int = PROMPT
    """The number of tokens of each prompt."""
    settings: Mapping[str, Any] = field(default_factory=lambda: {"tokens_per_microbatch": 4096})
    """The settings of the section ``[learner]``."""
    rank: int = 0
    """The rank of the adapter that is trained; 0: all weights are trained."""
    has_target: bool = False
    """True if the share of the rate of products has a target."""


CASES = (
    LearnerCase(description="4K packed", model=MEASURED[1], needs_s=25, has_target=True),
    LearnerCase(description="4K packed", model=SMALL, needs_s=12),
    LearnerCase(
        description="recompute, optimizer in host memory", model=MIDDLE, needs_s=25,
        settings={"tokens_per_microbatch": 8192, "memory": {"recompute": True, "offload_optimizer": True}},
    ),
    LearnerCase(description="LoRA of rank 16", model=LARGE, needs_s=40, rank=16),
    LearnerCase(
        description="8K tokens in one sample", model=SINKS, needs_s=20, answers=(8000,), prompt=190,
        settings={"tokens_per_microbatch": 8192},
    ),
    LearnerCase(description="4K packed", model=MIXTURE, needs_s=30),
)  # fmt: skip
"""The measurements, the most important first."""
_SMALL = {"tokens_per_microbatch": 64}
TINY = (
    LearnerCase(
        description="packed", model=MEASURED[1], needs_s=0, answers=(5, 9, 12, 7), prompt=4, settings=_SMALL,
        has_target=True,
    ),
    LearnerCase(
        description="recompute, optimizer in host memory", model=MIDDLE, needs_s=0, answers=(5, 9), prompt=4,
        settings={**_SMALL, "memory": {"recompute": True, "offload_optimizer": True}},
    ),
    LearnerCase(description="LoRA", model=LARGE, needs_s=0, answers=(5, 9), prompt=4, rank=4, settings=_SMALL),
    LearnerCase(description="sinks", model=SINKS, needs_s=0, answers=(40,), prompt=4, settings=_SMALL),
    LearnerCase(description="mixture", model=MIXTURE, needs_s=0, answers=(5, 9), prompt=4, settings=_SMALL),
)  # fmt: skip
"""The measurements with ``--pretend``."""


def run(stage: StageContext) -> None:
    """Measure the step with the target, check that packing does not change logprobs and that gradients agree with
    float32, and then measure the other steps. ``stage`` records the results."""
    for case in TINY if stage.pretend else CASES:
        name = f"{case.model}, {case.description}"
        stage.attempt(name, partial(_measure, stage, case, name), needs_s=case.needs_s)
        if case.has_target:
            stage.attempt("packed against alone", partial(_compare_packing, stage))
            stage.attempt("gradients", partial(_compare_gradients, stage))


def _open(stage: StageContext, model: str, dtype: str, settings: Mapping[str, Any], rank: int = 0) -> LearnerCore:
    """Return a learner of the model with the name ``model``, which is written to disk if it is not there yet."""
    folder = write_model(stage, model, dtype)
    return open_learner(stage, folder, dtype, settings, rank=rank)


def _batch(stage: StageContext, core: LearnerCore, model: str, prompt: int, answers: tuple[int, ...]) -> Batch:
    """Return a random batch for the next step of ``core``, a learner of the model with the name ``model``."""
    vocab = find_model(model, pretend=stage.pretend).settings["vocab_size"]
    return random_batch(core.version, prompt=prompt, answers=answers, vocab=vocab)


def _compare_packing(stage: StageContext) -> None:
    """Compare log π of samples that are packed into one pass with log π of each sample in a pass of its own, in
    float32, and record the largest difference."""
    answers = (5, 30, 12, 21) if stage.pretend else (40, 700, 333, 90)
    together, alone = (
        _open(stage, SMALL, "float32", {"lr": 0.0, "tokens_per_microbatch": tokens})
        for tokens in (4096, max(answers) + 8)
    )
    packed_N, alone_N = (core.train(_batch(stage, core, SMALL, 8, answers)).log_pi_N for core in (together, alone))
    worst = float(np.nanmax(np.abs(packed_N - alone_N)))
    stage.add_row(what="packed against alone, float32", tokens=len(packed_N), worst=worst)
    stage.add_target(at_most("learner, packed samples by samples alone: largest |Δ log π|", worst, 2e-3, "nats"))


def _compare_gradients(stage: StageContext) -> None:
    """Compare the norm of a gradient in bfloat16 with its norm in float32, at the same weights, and record the relative
    difference."""
    answers = (5, 30, 12, 21) if stage.pretend else (40, 700, 333, 90)
    folder = write_model(stage, SMALL, DTYPE)
    norms = []
    for dtype in ("float32", DTYPE):
        core = open_learner(stage, folder, dtype, {"tokens_per_microbatch": 4096})
        norms.append(core.train(_batch(stage, core, SMALL, 8, answers)).metrics["grad_norm"])
    error = abs(norms[1] / norms[0] - 1)
    stage.add_row(what="gradient in bfloat16 against float32", float32=norms[0], bfloat16=norms[1], apart=error)
    stage.add_target(at_most("learner, norm of the gradient in bfloat16 by float32's: apart", error, 0.05, "fraction"))


def _measure(stage: StageContext, case: LearnerCase, name: str) -> None:
    """Train one step as a warm-up and three measured steps, count the work of a further step, and record the figures of
    one case. ``stage`` records them under ``name``."""
    torch.cuda.reset_peak_memory_stats()
    core = _open(stage, case.model, DTYPE, case.settings, case.rank)
    times_s = [core.train(_batch(stage, core, case.model, case.prompt, case.answers)).seconds for _ in range(4)]
    seconds = min(times_s[1:])
    sizes = find_model(case.model, pretend=stage.pretend).sizes
    lengths = np.array(case.answers, np.float64) + case.prompt
    rate = stage.request.ceilings.get("product_bfloat16_tflops", float("inf")) * 1e12
    share = (
        _cost_model(sizes, rate, adapter=bool(case.rank)).step_s(float(lengths.sum()), float((lengths**2).sum()))
        / seconds
    )
    counted = stage.work.count(lambda: core.train(_batch(stage, core, case.model, case.prompt, case.answers)))
    stage.add_row(
        what=name, tok_s=float(lengths.sum()) / seconds, step_s=seconds, mfu=share, first_step_s=times_s[0],
        peak_gib=torch.cuda.max_memory_allocated() / GIB, planned_gib=_planned_bytes(sizes, case) / GIB, **counted,
    )  # fmt: skip
    if case.has_target and share:
        stage.add_target(at_least(f"learner, {name}: operations by products", share, MFU, "fraction"), measured=True)
        stage.add_figures(**{f"learner {case.model}": float(lengths.sum()) / seconds, "train_share": share})


def _cost_model(sizes: ModelShape, rate: float, *, adapter: bool) -> TrainingFlops:
    """Return the planner's cost model of a training step; ``rate`` is the rate of products in operations per second.
    With ``adapter``, gradients of the base's weights are not computed."""
    each = 4.0 if adapter else 6.0
    return TrainingFlops(flop_per_token=each * sizes.active, flop_per_square=sizes.flop_per_square, flops=rate)


def _planned_bytes(sizes: ModelShape, case: LearnerCase) -> float:
    """Return the estimated peak of the memory on the device in bytes, by the planner."""
    return (
        LearnerSizes(
            shape=sizes,
            config=LearnerConfig.model_validate(dict(case.settings)),
            itemsize=getattr(torch, DTYPE).itemsize,
            longest=float(max(case.answers) + case.prompt),
            adapter_params=sizes.adapter_params(case.rank),
        )
        .footprint()
        .total_bytes
    )
