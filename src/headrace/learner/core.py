"""The machine behind a learner: synchronous, in one process, deterministic.

    batch ──▶ refuse what cannot be trained ──▶ drop tokens without a finite μ, count them
          ──▶ one weight per token, over the whole batch (and the tokens chosen from all of it, where a formula asks)
          ──▶ micro-batches (packing.py)
          ──▶ each: log π at its loss tokens (logits.py) ──▶ objective ──▶ backward: gradients add up
          ──▶ clip ──▶ AdamW at the schedule's rate (optim.py) ──▶ version + 1

Shape legend: S samples and N tokens of the batch, M tokens of a micro-batch, P tokens of it that carry loss.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.algo.objective import Objective, usable
from headrace.clock import Clock
from headrace.errors import ConfigError, RunError
from headrace.learner import snapshot
from headrace.learner.config import COLUMNS, LearnerConfig
from headrace.learner.intake import Mask, layout, refuse_unfit
from headrace.learner.logits import LOGITS_PER_CHUNK, TokenLogprobs, halves
from headrace.learner.optim import build_optimizer, learning_rate
from headrace.learner.packing import MicroBatch, microbatches
from headrace.learner.work import Tally, Work
from headrace.models.attention import PLAN, PackedPlan
from headrace.types.batch import Batch
from headrace.types.messages.controller import StepReport
from headrace.types.tokens import FloatColumn
from headrace.types.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerContext:
    """What a learner must know of its run."""

    temperature: float
    """Of the sampling; logits are divided by it."""
    total_steps: int
    """Where a decaying schedule ends."""
    model_dir: Path
    """Where the tokenizer's files are, which every snapshot gets a copy of."""
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What one :meth:`LearnerCore.forward_backward` added up."""

    metrics: dict[str, float]
    trained_tokens: int
    """Tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """Tokens of the mask that could carry none, by reason."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one :meth:`LearnerCore.optim_step` did."""

    grad_norm: float
    """Global, before clipping."""
    lr: float
    """The rate of this update."""
    seconds: float


class LearnerCore:
    """Owns a model's gradients, its optimizer and its version. Not thread-safe.

    The same weights, batch and number of threads give the same new weights, bit for bit. The model stays in evaluation
    mode: without dropout log π is a function of the weights, as it is in the engine.
    """

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, objective: Objective, context: LearnerContext
    ) -> None:
        _refuse_settings(objective, context.temperature)
        self.model = model.eval()
        self._config = config
        self._objective = objective
        self._context = context
        self._device = model.device
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        probe = self._inputs(np.zeros(2, np.int64), np.array([2]))
        self._token_logprobs = TokenLogprobs(
            halves(model, probe),
            chunk=max(1, LOGITS_PER_CHUNK // self._vocab_size),
            temperature=context.temperature,
            entropy_gradient="entropy" in objective.columns,
        )
        self._optimizer = build_optimizer((p for p in model.parameters() if p.requires_grad), config)
        self._spans: list[Span] = []
        self._step = 0

    @property
    def version(self) -> int:
        """Of the weights: the number of optimizer steps behind them."""
        return self._step

    def train(self, batch: Batch) -> StepReport:
        """One whole optimizer step. ``batch.step`` must be :attr:`version`.

        Raises :class:`~headrace.errors.RunError` before anything has changed for a batch that cannot be trained, and
        for a gradient that is not finite.
        """
        gradient = self.forward_backward(batch)
        update = self.optim_step()
        seconds = {"forward_backward_s": gradient.seconds, "optim_s": update.seconds}
        return StepReport(
            step=batch.step,
            metrics={**gradient.metrics, "grad_norm": update.grad_norm, "lr": update.lr, **seconds},
            trained_tokens=gradient.trained_tokens,
            dropped_tokens=gradient.dropped_tokens,
            seconds=gradient.seconds + update.seconds,
        )

    def forward_backward(self, batch: Batch) -> Gradient:
        """Add the gradient of the batch's objective to what :meth:`optim_step` will use.

        If it fails, no gradient is left. Raises :class:`~headrace.errors.RunError` for a batch that cannot be trained.
        """
        start_s = self._context.clock.now()
        self._refuse(batch)
        mask, dropped = usable(torch.tensor(batch.mask_N), torch.tensor(batch.logprobs_N))
        weights_N = self._objective.weights(layout(batch, mask))
        work = Work(batch=batch, mask_N=mask.numpy(), weights_N=weights_N, old=self._objective.old)
        if not work.mask_N.any():
            raise RunError(
                f"no token of the batch of step {batch.step} can carry loss: {batch.num_loss_tokens} are in its mask, "
                "none of those has a finite engine logprob",
                remedy="check the engine's logits for NaN (weights, dtype, temperature)",
            )
        if self._objective.selects:
            work = replace(work, selected_NP=self._select(work))
        tally = Tally(work)
        with ExitStack() as undo:
            undo.callback(self._optimizer.zero_grad)
            for micro in self._cut(batch, work.mask_N):
                inputs = work.inputs(micro, *self._log_pi(batch, work.mask_N, micro))
                output = self._objective(inputs, work.weights_N[micro.places_M].to(self._device))
                output.loss.backward()
                tally.add(micro, inputs, output)
            undo.pop_all()
        seconds = self._ended("forward_backward", start_s)
        return Gradient(
            metrics=tally.metrics(),
            trained_tokens=int(work.mask_N.sum()),
            dropped_tokens={reason: int(count) for reason, count in dropped.items() if count},
            seconds=seconds,
        )

    def optim_step(self) -> Update:
        """Clip, update the weights at the schedule's rate, and count one version up.

        Raises :class:`~headrace.errors.RunError` if there is no gradient or it is not finite; the weights are as they
        were then.
        """
        start_s = self._context.clock.now()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):
            raise RunError(f"step {self._step} has no gradient", remedy="call forward_backward before optim_step")
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        if not math.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise RunError(
                f"step {self._step}: the global gradient norm is {grad_norm}; weights and optimizer are unchanged",
                remedy="lower learner.lr or set model.dtype='float32'; log_ratio_abs_max shows how it came; "
                "the run resumes from its last snapshot",
            )
        lr = learning_rate(self._config, self._step, self._context.total_steps)
        if lr > 0:  # at 0 even an update by 0 would turn −0.0 into 0.0
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = self._ended("optim_step", start_s)
        self._step += 1
        return Update(grad_norm=grad_norm, lr=lr, seconds=seconds)

    def logprobs(self, batch: Batch) -> FloatColumn:
        """log π (N, float32) of every token of the batch's mask under the current weights and the sampling
        temperature; 0 elsewhere."""
        refuse_unfit(batch, self._vocab_size)
        return self._logprobs(batch, batch.mask_N)

    def save(self, directory: Path) -> None:
        """Write model, tokenizer, optimizer and random state into the existing, empty ``directory``, flushed to disk.

        Raises :class:`~headrace.errors.CheckpointError` where that cannot be done; the directory is removed then.
        """
        start_s = self._context.clock.now()
        snapshot.save(directory, self.model, self._optimizer, self._step, self._context.model_dir)
        self._ended("save", start_s)

    def restore(self, directory: Path) -> None:
        """Go on exactly where :meth:`save` was called: weights, moments, random state, version.

        Raises :class:`~headrace.errors.CheckpointError` for a directory that is damaged or of another model.
        """
        snapshot.restore_weights(directory, self.model)
        self._step = snapshot.restore_optimizer(directory, self.model, self._optimizer)

    def take_spans(self) -> tuple[Span, ...]:
        """What it did since the last call, for the trace."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def _refuse(self, batch: Batch) -> None:
        if batch.step != self._step:
            raise RunError(
                f"the batch is of step {batch.step}, the learner is at step {self._step}",
                remedy="train the batches of a run in order, each once",
            )
        refuse_unfit(batch, self._vocab_size)

    def _cut(self, batch: Batch, mask_N: Mask) -> list[MicroBatch]:
        """Samples without a loss token need no forward pass."""
        samples_N = np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)
        return microbatches(batch.lengths_S, np.unique(samples_N[mask_N]), self._config.tokens_per_microbatch)

    def _inputs(self, ids_M: npt.NDArray[Any], lengths_K: npt.NDArray[np.int64]) -> dict[str, Any]:
        plan = PackedPlan(lengths_K, self._device)
        ids = torch.from_numpy(ids_M.astype(np.int64)).to(self._device)
        return {"input_ids": ids[None], "position_ids": plan.positions_N[None], PLAN: plan}

    def _log_pi(self, batch: Batch, mask_N: Mask, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """log π and entropies (M, each), 0 outside the mask. A token came from the logits of the one before it."""
        inputs = self._inputs(batch.ids_N[micro.places_M], micro.lengths_K)
        loss_P = torch.from_numpy(np.flatnonzero(mask_N[micro.places_M])).to(self._device)
        found = self._token_logprobs(inputs, loss_P - 1, inputs["input_ids"][0, loss_P])
        zeros_M = torch.zeros(len(micro.places_M), device=self._device)
        log_pi_M, entropy_M = (zeros_M.index_copy(0, loss_P, column_P) for column_P in found)
        return log_pi_M, entropy_M

    @torch.no_grad()
    def _logprobs(self, batch: Batch, mask_N: Mask) -> FloatColumn:
        logprobs_N = np.zeros(batch.num_tokens, np.float32)
        for micro in self._cut(batch, mask_N):
            log_pi_M, _ = self._log_pi(batch, mask_N, micro)
            logprobs_N[micro.places_M] = log_pi_M.cpu().numpy()
        return logprobs_N

    def _select(self, work: Work) -> Tensor | None:
        """The tokens that formulas choose from the whole batch, under the present weights."""
        log_pi_N = torch.from_numpy(self._logprobs(work.batch, work.mask_N))
        return self._objective.prepare(work.inputs(MicroBatch.whole(work.batch.lengths_S), log_pi_N))

    def _ended(self, name: str, start_s: float) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end_s = self._context.clock.now()
        self._spans.append(Span(lane="learner", name=name, start_s=start_s, end_s=end_s, step=self._step))
        return end_s - start_s


def _refuse_settings(objective: Objective, temperature: float) -> None:
    if temperature <= 0:
        raise ConfigError(
            f"sampling temperature {temperature} leaves no distribution to learn",
            remedy="sample training episodes at a temperature > 0 (1 is usual)",
        )
    missing = sorted(objective.columns - COLUMNS)
    if missing:
        raise ConfigError(
            f"the objective reads {', '.join(missing)}, which this learner does not compute",
            remedy="choose an algo.loss and algo.correction without it; for log_ref set algo.loss.kl_coef = 0",
        )
