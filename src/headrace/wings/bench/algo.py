"""The cost of the objective (loss and correction) as a fraction of the learner's step, for several algorithms.

Shape legend: S samples and N tokens of the batch, M tokens of a micro-batch.
"""

from __future__ import annotations

import statistics
import string
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective, usable
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.learner.base import LearnerContext
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerCore
from headrace.learner.intake import layout
from headrace.learner.packing import microbatches
from headrace.learner.work import StepWork
from headrace.models import ModelConfig, load_model
from headrace.models.tiny import TinySpec, make_tiny
from headrace.wings.bench.base import Report, Row, at_most, make_report, measure_s

CASES = {
    "grpo + tis": {"loss": "grpo", "correction": "tis"},
    "gspo + sequence_tis": {"bundle": "gspo"},
    "cispo": {"bundle": "cispo"},
    "decoupled": {"bundle": "decoupled"},
}
"""The ``[algo]`` table of each case, by the name of the case."""
SAMPLES = 256
"""The number of samples in a batch."""
GROUP = 8
"""The number of samples in a group."""
PROMPT, SHORTEST, LONGEST = 8, 8, 32
"""The number of tokens of every prompt, of the shortest answer and of the longest answer."""
REPEATS = 5
"""The number of measured steps of each case; one step before them is not counted."""
TINY = TinySpec(
    vocab=string.ascii_letters + string.digits + "+-*/= ", hidden_size=128, num_layers=6, intermediate_size=384
)
LIMIT = 0.03
"""The largest fraction of a step that the objective should take."""


def measure(on_progress: Callable[[str], None]) -> Report:
    """Measure the time of the objective alone and the time of a whole step of the learner, for each case. Return a
    report with a row of medians for each case, and a target for the fraction of the step that the objective takes.
    ``on_progress`` is called with the name of each case."""
    torch.set_num_threads(1)  # more threads gain little here, and stall if other processes use the cores
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        model_dir = make_tiny(Path(scratch) / "model", TINY)
        for name, table in CASES.items():
            on_progress(name)
            objective = Objective.build(AlgoConfig.model_validate(table))
            core, parameters = _learner(model_dir, objective)
            steps_s, shares_s = [], []
            for step in range(REPEATS + 1):  # alternating, so that other load on the machine affects both figures
                batch = make_batch(step)
                steps_s.append(measure_s(partial(core.train, batch)))
                shares_s += [measure_s(partial(_compute_objective, objective, batch)) for _ in range(3)]
            step_s, share_s = statistics.median(steps_s[1:]), statistics.median(shares_s[3:])
            rows.append(
                {
                    "what": name,
                    "parameters": parameters,
                    "tokens": make_batch(0).num_tokens,
                    "sequences": SAMPLES,
                    "step_s": step_s,
                    "objective_s": share_s,
                    "fraction": share_s / step_s,
                }
            )
    targets = [
        at_most(f"loss and correction as part of a step, {row['what']}", row["fraction"], LIMIT, "fraction")
        for row in rows
    ]
    return make_report(rows, targets)


def make_batch(step: int) -> Batch:
    """Return a batch of random answers of different lengths, sampled by policy versions of ages 0 to 2; the result
    depends on ``step`` alone. Every sample is a prompt of :data:`PROMPT` tokens without loss, followed by an answer
    with loss."""
    rng = np.random.default_rng([0, step])
    lengths_S = (PROMPT + rng.integers(SHORTEST, LONGEST + 1, SAMPLES)).astype(np.int32)
    places_N = np.concatenate([np.arange(length) for length in lengths_S])
    mask_N = places_N >= PROMPT
    versions_S = np.maximum(0, step - rng.integers(0, 3, SAMPLES))
    total = len(mask_N)
    return Batch(
        step=step,
        lengths_S=lengths_S,
        groups_S=(np.arange(SAMPLES) // GROUP).astype(np.int32),
        episodes_S=np.arange(SAMPLES, dtype=np.int32),
        ids_N=rng.integers(3, len(TINY.vocab), total).astype(np.int32),
        mask_N=mask_N,
        logprobs_N=np.where(mask_N, -rng.uniform(3.0, 5.0, total), 0).astype(np.float32),
        versions_N=np.where(mask_N, np.repeat(versions_S, lengths_S), -1).astype(np.int32),
        advantages_N=np.repeat(rng.normal(size=SAMPLES), lengths_S).astype(np.float32),
    )


def _learner(model_dir: Path, objective: Objective) -> tuple[LearnerCore, int]:
    """Return a learner with the model in ``model_dir`` and the loss and correction of ``objective``, and the number of
    parameters of the model."""
    model = load_model(ModelConfig(path=str(model_dir)))
    context = LearnerContext(temperature=1.0, total_steps=REPEATS + 1, model_dir=model_dir, clock=RealClock())
    return LearnerCore(model, LearnerConfig(), objective, context), model.num_parameters()


def _compute_objective(objective: Objective, batch: Batch) -> None:
    """Compute the objective alone for a batch: masks, correction weights, loss, and the gradient of the loss with
    respect to log π. It works in micro-batches, as in the learner, but log π is the recorded logprob plus 0.01 instead
    of the output of a model."""
    log_pi_N = torch.from_numpy(batch.logprobs_N) + 0.01
    mask_N, _ = usable(torch.tensor(batch.mask_N), torch.tensor(batch.logprobs_N))
    weights_N = objective.weights(layout(batch, mask_N))
    work = StepWork(batch=batch, mask_N=mask_N.numpy(), weights_N=weights_N, old=objective.old)
    for micro in microbatches(batch.lengths_S, np.arange(SAMPLES), LearnerConfig().tokens_per_microbatch):
        log_pi_M = log_pi_N[micro.places_M].requires_grad_()
        objective(work.inputs(micro, log_pi_M), weights_N[micro.places_M]).loss.backward()
