"""The synchronous, deterministic core of a learner, in one process or in several ranks that make the same calls.

    batch ──▶ refuse an invalid batch ──▶ drop tokens without a finite μ, count them
          ──▶ one weight per token, over the whole batch (for some objectives, also a selection of tokens)
          ──▶ columns of the auxiliary models: reference, teacher, kept π_old (auxiliary/)
          ──▶ micro-batches of about equal cost (packing.py), dealt to the ranks
          ──▶ each: log π at its loss tokens (forward.py) ──▶ objective ──▶ backward: gradients add up
          ──▶ clip ──▶ the optimizer at the schedule's rate (optim.py, parallel/optim.py) ──▶ version + 1

If agents train adapters of their own, each pass computes one adapter. Token weights are computed over the whole batch,
and the gradient of each adapter is clipped separately.

A batch may be trained in several updates (updates.py), which together are one step and produce one version.

A batch may also be added in parts (whole groups, as they become ready). The gradient is divided by the reduction's
denominator after the last part, and equals the gradient of the whole batch, up to rounding.

Shape legend: N tokens of the batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.algo.metrics import means
from headrace.algo.objective import Objective, usable
from headrace.base.errors import ConfigError, RunError
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.trace import Span
from headrace.learner.auxiliary.base import LearnerParts
from headrace.learner.auxiliary.registry import auxiliary_models, refuse_unserved
from headrace.learner.base import LearnerContext
from headrace.learner.config import LearnerConfig
from headrace.learner.forward import Forward
from headrace.learner.intake import Mask, layout, refuse_unknown_agents
from headrace.learner.memory import HALF_UPDATED, compute_sizes, explained_out_of_memory
from headrace.learner.optim import learning_rate
from headrace.learner.packing import MicroBatch
from headrace.learner.parallel.files import Snapshot
from headrace.learner.parallel.load import keep_inputs_only
from headrace.learner.parallel.mesh import AnyRanks, SingleRank
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.updates import add_log_old, minibatches, stats_of_updates
from headrace.learner.work import Gradient, MicroBatchStats, StepSums, StepWork

MOST_SPANS = 4096
"""The most spans that are kept until :meth:`LearnerCore.take_spans`, since a user's own loop may never call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of one :meth:`LearnerCore.optim_step`."""

    grad_norm: float
    """The global norm of the gradient before clipping."""
    norms: dict[str, float]
    """Metrics: the gradient norm of each agent that trains its own adapter and had tokens; with ``learner.alignment``
    also the cosines of gradients."""
    lr: float
    """The learning rate of this update."""
    seconds: float
    """The duration of the update in seconds."""
    damped: dict[str, float] = field(default_factory=dict)
    """Metrics: the factor of the learning rate, if ``learner.damping`` is set; else empty."""
    biases: dict[str, float] = field(default_factory=dict)
    """Metrics: the spread of the biases of a mixture's routers, if they are updated; else empty."""


class LearnerCore:
    """The training of one model: its gradients, its optimizer and its version. It is not thread-safe.

    The same weights, batch and number of threads give the same new weights, bit for bit. The model stays in evaluation
    mode: without dropout, log π is a function of the weights, as it is in the engine.

    With several ranks, each rank has a core, and all cores must get the same calls in the same order. Each core gets
    the whole batch, computes its share, and returns the result of all ranks. ``model`` must come from
    :func:`headrace.learner.parallel.load.load_on_ranks`. The result equals the result of one process, up to rounding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        objective: Objective,
        context: LearnerContext,
        ranks: AnyRanks | None = None,
    ) -> None:
        """Create the learner of ``model`` at version 0. ``objective`` is the objective that each step minimises, and
        ``context`` the other settings of the run. ``ranks`` are the learner's processes, including this one; ``None``
        for a single process.

        Raises :class:`~headrace.base.errors.ConfigError` for settings that make training impossible.
        """
        refuse_settings(context.temperature)
        config = config.serving(objective.columns)
        self._ranks = ranks or SingleRank(model.device)
        config.parallel.refuse_world(self._ranks.config.world)
        self.model = model.eval()
        if config.memory.recompute:
            keep_inputs_only(model)
        self._config = config
        self._objective = objective
        self._context = context
        self._device = model.device
        self._forward = Forward(
            model,
            config,
            temperature=context.temperature,
            entropy_gradient="entropy" in objective.columns,
            ranks=self._ranks,
            progress=context.progress,
        )
        """The forward passes of the trained model."""
        self._optimizer = ShardOptimizer(model, config, self._ranks)
        own = {"model": model, "forward": self._forward, "optimizer": self._optimizer, "ranks": self._ranks}
        self._auxiliary = auxiliary_models(LearnerParts(config=config, objective=objective, context=context, **own))
        """The auxiliary models: critic, reference, teachers and others that the settings describe."""
        refuse_unserved(self._objective, self._auxiliary)
        self._files = Snapshot(model, self._optimizer, self._ranks, self._auxiliary)
        """The reader and writer of snapshots."""
        self._memory = compute_sizes(model, config, self._forward.attention)
        """The sizes that determine the memory of the learner, for the advice when memory runs out."""
        self._parts: StepSums | None = None
        """The sums over the parts of a batch that is not complete yet; ``None`` between batches."""
        self._damping = 1.0
        """The factor of the learning rate of the next update: the smallest factor of the batches in its gradient."""
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        """The spans of the last steps."""
        self._step = 0
        """The number of optimizer steps made."""

    @property
    def version(self) -> int:
        """The version of the weights, which is the number of optimizer steps made."""
        return self._step

    @property
    def has_gradient(self) -> bool:
        """Return whether there is a gradient that :meth:`optim_step` has not used yet."""
        return not self._optimizer.empty

    @property
    def swaps_weights(self) -> bool:
        """Return whether the model has the weights of another version temporarily while a batch is trained, so that no
        other thread may read the weights."""
        return any(model.swaps_weights for model in self._auxiliary)

    def train(self, batch: Batch) -> StepReport:
        """Train one whole step and return its report. A step is one update, or several if the objective divides the
        batch.

        ``batch.step`` must equal :attr:`version`. A batch without samples, because a filter masked all its episodes,
        counts as a step and changes no weight. Raises :class:`~headrace.base.errors.RunError` for an invalid batch,
        before any change, and for a gradient that is not finite.
        """
        if not len(batch.lengths_S):
            return self._count_empty_step(batch)
        if self._objective.num_updates > 1:
            return self._train_several(batch)
        gradient = self.forward_backward(batch)
        update = self.optim_step()
        seconds = {"forward_backward_s": gradient.seconds, "optim_s": update.seconds}
        return StepReport(
            step=batch.step,
            metrics={
                **gradient.metrics,
                "grad_norm": update.grad_norm,
                "lr": update.lr,
                **update.norms,
                **update.damped,
                **update.biases,
                **seconds,
            },
            trained_tokens=gradient.trained_tokens,
            dropped_tokens=gradient.dropped_tokens,
            log_pi_N=gradient.log_pi_N,
            teacher_scores_N=gradient.teacher_scores_N,
            seconds=gradient.seconds + update.seconds,
        )

    def _train_several(self, batch: Batch) -> StepReport:
        """Train one step of several updates (epochs × mini-batches of the batch), and return its report. If the step
        fails after an update, the weights have changed, and the run has to continue from its last snapshot."""
        start_s = self._context.clock.now()
        self._refuse(batch)
        work, dropped = self._prepare_whole(batch)
        log_before_N = self._logprobs(work.batch, work.mask_N)
        work = add_log_old(work, log_before_N)
        parts = list(minibatches(work, self._objective))
        parts[0] = replace(parts[0], metrics=work.metrics)
        tallies = [MicroBatchStats() for _ in parts]
        updates: list[Update] = []
        for number, (part, tally) in enumerate(zip(parts, tallies, strict=True)):
            self._backward(part, tally)
            tally.join(self._ranks)
            self._note_damping(Gradient.from_stats(tally, {}, 0.0))
            updates.append(self._update(first=number == 0, last=number == len(parts) - 1))
        self._step += 1
        stats = stats_of_updates(tallies, work, log_before_N)
        agents = dict.fromkeys(name for each in updates for name in each.norms)
        norms = {name: float(np.mean([each.norms[name] for each in updates if name in each.norms])) for name in agents}
        seconds = self._end_span("updates", start_s)
        return StepReport(
            step=batch.step,
            metrics={
                **stats.metrics(1.0 / len(updates)),
                "grad_norm": float(np.mean([each.grad_norm for each in updates])),
                "lr": updates[-1].lr,
                "updates": float(len(updates)),
                **norms,
                **updates[-1].damped,
                **updates[-1].biases,
                "forward_backward_s": seconds - sum(each.seconds for each in updates),
                "optim_s": sum(each.seconds for each in updates),
            },
            trained_tokens=stats.trained_tokens,
            dropped_tokens=dropped,
            log_pi_N=stats.log_pi_N(),
            teacher_scores_N=stats.teacher_scores_N(),
            seconds=seconds,
            updates=len(updates),
        )

    def _count_empty_step(self, batch: Batch) -> StepReport:
        """Count a step without training, for a batch without samples, and return its report. The weights do not change,
        but get the next version number, also in the auxiliary models."""
        start_s = self._context.clock.now()
        self._refuse(batch)
        for model in self._auxiliary:
            model.before_update()
            model.after_update(self._step + 1)
        lr = learning_rate(self._config, self._step, self._context.total_steps)
        self._step += 1
        return StepReport(
            step=batch.step,
            metrics={"grad_norm": 0.0, "lr": lr},
            trained_tokens=0,
            dropped_tokens={},
            log_pi_N=np.zeros(0, np.float32),
            seconds=self._end_span("optim_step", start_s),
        )

    def forward_backward(self, batch: Batch) -> Gradient:
        """Add the gradient of the batch's objective to the gradient that :meth:`optim_step` will use.

        On failure the whole gradient is discarded. Raises :class:`~headrace.base.errors.RunError` for an invalid batch,
        and :class:`~headrace.base.errors.ConfigError` if the objective divides the batch into several updates.
        """
        start_s = self._context.clock.now()
        self._refuse_several()
        self._refuse(batch)
        if self._parts is not None:
            raise RunError(f"step {self._step} has been begun in parts", remedy="call finish before forward_backward")
        work, dropped = self._prepare_whole(batch)
        if self._objective.selects_tokens:
            work = replace(work, selected_NP=self._select(work))
        tally = MicroBatchStats()
        self._backward(work, tally)
        tally.join(self._ranks)
        return self._note_damping(Gradient.from_stats(tally, dropped, self._end_span("forward_backward", start_s)))

    def _note_damping(self, gradient: Gradient) -> Gradient:
        """Return ``gradient`` unchanged, after recording the factor by which its batch lowers the learning rate of the
        next update."""
        if self._config.damping is not None:
            self._damping = min(self._damping, self._config.damping.factor(gradient.metrics))
        return gradient

    def add(self, part: Batch) -> None:
        """Compute the gradient of a part of this step's batch before the rest is available.

        A part consists of whole groups. After the last part, :meth:`finish` returns the same report as
        :meth:`forward_backward` for the whole batch. Raises :class:`~headrace.base.errors.RunError` for an invalid
        part, before any change, and :class:`~headrace.base.errors.ConfigError` if the objective needs the whole batch
        first, or divides it into several updates. On a later failure the gradient of all parts is discarded.
        """
        start_s = self._context.clock.now()
        self._refuse(part)
        if self._config.mixture.balance_coef:
            raise ConfigError(
                "learner.mixture.balance_coef counts the choices of the whole batch first: give no part",
                remedy="leave learner.mixture.balance_coef out, or give the batch as one",
            )
        self._refuse_several()
        needs_all = self._objective.selects_tokens or "baseline" in self._objective.columns
        if needs_all or self._objective.critic is not None:
            raise ConfigError(
                "the objective chooses its tokens from the whole batch, or makes its advantages of it: give no part",
                remedy="choose an algo.loss, algo.correction and algo.advantage that do not, or give the batch as one",
            )
        if self._parts is None:
            if self.has_gradient:
                raise RunError(f"step {self._step} already has a gradient", remedy="call optim_step before add")
            self._parts = StepSums(tally=MicroBatchStats())
        parts = self._parts
        work, denominator, dropped = self._prepare(part)
        self._backward(self.add_columns(work), parts.tally)
        parts.denominator += float(denominator)
        parts.loss_tokens += part.num_loss_tokens
        parts.dropped.update(dropped)
        parts.seconds += self._end_span("forward_backward", start_s)

    def _refuse_several(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the objective divides a batch into several updates."""
        if self._objective.num_updates > 1:
            raise ConfigError(
                f"the objective makes {self._objective.num_updates} updates of a batch, and one gradient is one update",
                remedy="call train, or set algo.epochs and algo.minibatches to 1",
            )

    def finish(self) -> Gradient:
        """Normalise the gradient after the last :meth:`add`, and return the report of all parts. Raises
        :class:`~headrace.base.errors.RunError` if no part had a loss token."""
        parts, self._parts = self._parts or StepSums(tally=MicroBatchStats()), None
        parts.tally.join(self._ranks)
        if not parts.tally.trained_tokens:
            raise nothing_to_learn(self._step, parts.loss_tokens)
        scale = 1.0 / max(parts.denominator, 1.0)
        self._optimizer.scale(scale)
        for model in self._auxiliary:
            model.scale(scale)
        return self._note_damping(Gradient.from_stats(parts.tally, dict(parts.dropped), parts.seconds, scale))

    def optim_step(self) -> Update:
        """Clip the gradient, update the weights at the schedule's rate, and increase the version by one.

        Raises :class:`~headrace.base.errors.RunError` if there is no gradient, or if it is not finite; the weights do
        not change then.
        """
        if self._parts is not None:
            raise RunError(f"step {self._step} has been begun in parts", remedy="call finish before optim_step")
        if not self.has_gradient:
            raise RunError(f"step {self._step} has no gradient", remedy="call forward_backward before optim_step")
        update = self._update()
        self._step += 1
        return update

    def _update(self, *, first: bool = True, last: bool = True) -> Update:
        """Clip the gradient, update the weights, and return the record of the update. ``first`` and ``last`` say
        whether this is the first and the last update of a step: auxiliary models are notified before the first and
        after the last. The caller increases the version.

        Raises :class:`~headrace.base.errors.RunError` if the gradient is not finite, or if there is not enough memory.
        """
        start_s = self._context.clock.now()
        with self._discarding_on_failure():
            compared = [model.before_clip() for model in self._auxiliary]
            norms = self._optimizer.clip_norms(self._config.max_grad_norm)
        if not math.isfinite(grad_norm := math.hypot(*norms.values())):
            self._discard_gradients()
            left = "weights and optimizer are unchanged" if first else "earlier updates of its batch have been made"
            raise RunError(
                f"step {self._step}: the global gradient norm is {grad_norm}; {left}",
                remedy="lower learner.lr or set model.dtype='float32'; log_ratio_abs_max shows how it came; "
                "the run resumes from its last snapshot",
            )
        lr = learning_rate(self._config, self._step, self._context.total_steps) * self._damping
        trained = lr > 0 and self.has_gradient  # an auxiliary model may have removed the gradient
        with self._discarding_on_failure():
            for part in (*([self._optimizer] if trained else ()), *self._auxiliary):
                part.allocate()
        with self._ranks.together(), explained_out_of_memory(self._memory, self._step, HALF_UPDATED):
            for model in self._auxiliary if first else ():
                model.before_update()
            if trained:  # skipped at rate 0, since adding 0 would change −0.0 to 0.0
                with self._context.progress.track("update", f"the optimizer's update of step {self._step}"):
                    self._optimizer.step(lr)
            biases = self._forward.mixture.move_biases(trained=trained)
            self._optimizer.zero_grad()
            for model in self._auxiliary if last else ():
                model.after_update(self._step + 1)
        seconds = self._end_span("optim_step", start_s)
        named = self._forward.switch.agents[1:]
        own = {f"agent/{agent}/grad_norm": norm for agent, norm in norms.items() if agent in named}
        own |= {name: value for metrics in compared for name, value in metrics.items()}
        damped = {} if self._config.damping is None else {"lr_damping": self._damping}
        self._damping = 1.0
        return Update(grad_norm=grad_norm, norms=own, lr=lr, seconds=seconds, damped=damped, biases=biases)

    def logprobs(self, batch: Batch) -> FloatColumn:
        """Return log π of every token in the batch's mask, ``[N]`` in float32, under the current weights and the
        sampling temperature; 0 elsewhere."""
        self._forward.refuse(batch)
        return self._logprobs(batch, batch.mask_N)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss of ``batch`` and its metrics under the current weights, without any change. ``batch.step`` is
        ignored.

        Raises :class:`~headrace.base.errors.RunError` for an invalid batch, or one without a loss token.
        """
        self._forward.refuse(batch)
        work, _ = self._prepare_whole(batch)
        log_pi_N = torch.from_numpy(self._logprobs(work.batch, work.mask_N))
        output = self._objective(work.inputs(MicroBatch.whole(batch.lengths_S), log_pi_N), work.weights_N)
        return {**means(output.metrics), "loss": float(output.loss)}

    def add_columns(self, work: StepWork) -> StepWork:
        """Return ``work`` with the columns that the auxiliary models compute. If one of them fails, the gradient is
        discarded."""
        for model in (each for each in self._auxiliary if each.prepares):
            start_s = self._context.clock.now()
            progress = self._context.progress.track(model.name, f"{model.name} of step {self._step}")
            with self._discarding_on_failure(), progress:
                work = model.prepare(work)
            self._end_span(model.name, start_s)
        return work

    def save(self, directory: Path) -> None:
        """Write model, tokenizer, optimizer and random state into the existing, empty ``directory``, flushed to disk.

        Raises :class:`~headrace.base.errors.CheckpointError` on failure; the directory is then removed.
        """
        self.begin_save(directory)()

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Execute the part of :meth:`save` during which the weights must not change, and return a function that
        completes the save. The function must be called once before the next save; with several ranks it may run in a
        thread beside the training. With one process, and for an adapter, everything is written at once and the function
        does nothing. Both raise the same errors as :meth:`save`."""
        start_s = self._context.clock.now()
        rest = self._files.begin(directory, self._step, self._context.model_dir)
        self._end_span("save", start_s)
        return rest

    def restore(self, directory: Path, *, weights: bool = True) -> None:
        """Restore weights, moments, random state and version from ``directory``, which :meth:`save` has written with
        any number of ranks.

        With ``weights=False``, the weights are not read, because the model was loaded from ``directory``. Raises
        :class:`~headrace.base.errors.CheckpointError` for a damaged directory, and for the snapshot of another model.
        """
        if weights:
            self._files.restore_weights(directory)
        self._step = self._files.restore_optimizer(directory)
        self._files.restore_auxiliary(directory)

    def take_spans(self) -> tuple[Span, ...]:
        """Remove and return the spans of time that were recorded since the last call. The caller adds them to the event
        trace."""
        spans = tuple(self._spans)
        self._spans.clear()
        return spans

    def _refuse(self, batch: Batch) -> None:
        """Raise :class:`~headrace.base.errors.RunError` for a batch of another step than the learner's, and for a batch
        that the model cannot compute; raise :class:`~headrace.base.errors.ConfigError` if the objective reads a column
        that no auxiliary model computes."""
        if batch.step != self._step:
            raise RunError(
                f"the batch is of step {batch.step}, the learner is at step {self._step}",
                remedy="train the batches of a run in order, each once",
            )
        refuse_unserved(self._objective, self._auxiliary)
        self._forward.refuse(batch)
        refuse_unknown_agents(batch, self._forward.switch.agents)

    def _prepare(self, batch: Batch) -> tuple[StepWork, Tensor, dict[str, int]]:
        """Return the work of this batch with a weight for each token; the denominator of the reduction, by which the
        caller must divide the weights or the gradient; and the number of tokens that cannot carry loss, by reason."""
        mask, dropped = usable(torch.tensor(batch.mask_N), torch.tensor(batch.logprobs_N))
        shares = self._objective.shares(layout(batch, mask))
        work = StepWork(batch=batch, mask_N=mask.numpy(), weights_N=shares.weights_N, old=self._objective.old)
        return work, shares.mass, {reason: int(count) for reason, count in dropped.items() if count}

    def _prepare_whole(self, batch: Batch) -> tuple[StepWork, dict[str, int]]:
        """Return the work of a whole batch, with the final weight of each token and the columns of the auxiliary
        models, and the number of tokens that cannot carry loss, by reason. Raises
        :class:`~headrace.base.errors.RunError` if no token can."""
        work, denominator, dropped = self._prepare(batch)
        if not work.mask_N.any():
            raise nothing_to_learn(self._step, batch.num_loss_tokens)
        return self.add_columns(replace(work, weights_N=work.weights_N / denominator.clamp(min=1.0))), dropped

    @contextmanager
    def _discarding_on_failure(self) -> Iterator[None]:
        """Return a context for a computation of all ranks; if it fails, the gradient of the step is discarded."""
        with self._ranks.together(), explained_out_of_memory(self._memory, self._step), ExitStack() as undo:
            undo.callback(self._discard_gradients)
            yield
            undo.pop_all()

    def _backward(self, work: StepWork, tally: MicroBatchStats) -> None:
        """Add the gradients of all micro-batches of ``work``, agent by agent, and add their metrics to ``tally``.
        On failure the whole gradient is discarded."""
        with self._discarding_on_failure():
            tally.begin(work)
            for agent, mask_N in self._forward.split_by_agent(work.batch, work.mask_N):
                with self._forward.switch.on(agent):
                    self._backward_agent(work.only(mask_N), tally)
                tally.note(self._forward.mixture.finish())

    def _backward_agent(self, work: StepWork, tally: MicroBatchStats) -> None:
        """Add the gradients of all micro-batches of one agent, and add their metrics to ``tally``. ``work``
        contains only the tokens of this agent, whose adapter is active."""
        start_s = self._context.clock.now()
        packed = self._forward.pack(work.batch, work.mask_N, pairs="pairs" in self._objective.columns)
        self._end_span("pack", start_s)
        self._count_choices(work, packed)
        for number, micro in enumerate(packed, 1):
            with self._context.progress.track(
                "micro-batch", f"micro-batch {number} of {len(packed)} of step {self._step}"
            ):
                self._optimizer.expect(last=number == len(packed))
                self._backward_micro(work, micro, tally)
                self._optimizer.collect()

    def _count_choices(self, work: StepWork, packed: list[MicroBatch]) -> None:
        """Pass the micro-batches ``packed`` of the step to the balance of the mixture. If the balance loss is trained,
        count the experts that the routers choose for the tokens of the whole step, in forward passes without
        gradients."""
        mixture = self._forward.mixture
        mixture.begin(packed)
        if not mixture.config.balance_coef:
            return
        start_s = self._context.clock.now()
        with torch.no_grad():
            for micro in packed:
                self._forward(work.batch, work.mask_N, micro)
        mixture.counted()
        self._end_span("count experts", start_s)

    def _backward_micro(self, work: StepWork, micro: MicroBatch, tally: MicroBatchStats) -> None:
        """Run the forward and backward pass of one micro-batch of ``work``, and add its metrics to ``tally``."""
        start_s = self._context.clock.now()
        result = self._forward(work.batch, work.mask_N, micro, None if work.top is None else work.top.ids_NK)
        self._end_span("forward", start_s)
        if not len(micro.places_M):  # an empty micro-batch joins the collectives of the other ranks
            (result.log_pi_M.sum() * 0.0).backward()
            return
        inputs = work.inputs(micro, result.log_pi_M, result.entropy_M, result.top_MK)
        output = self._objective(inputs, work.weights_N[micro.places_M].to(self._device))
        start_s = self._context.clock.now()
        balance = self._forward.mixture.loss()
        loss = output.loss if balance is None else output.loss + balance
        (loss * self._ranks.config.num_averaged).backward()
        self._end_span("backward", start_s)
        tally.add(work, micro, result, output)

    def _logprobs(self, batch: Batch, mask_N: Mask) -> FloatColumn:
        """Return log π ``[N]`` of the tokens in ``mask_N``; 0 elsewhere. All ranks call this together. Raises
        :class:`~headrace.base.errors.RunError` if there is not enough memory."""
        with self._ranks.together(), explained_out_of_memory(self._memory, self._step):
            return self._forward.logprobs(batch, mask_N)

    def _discard_gradients(self) -> None:
        """Discard the gradients of the present step, including those of the auxiliary models."""
        self._optimizer.zero_grad()
        self._forward.mixture.forget_choices()
        for model in self._auxiliary:
            model.discard_gradient()
        self._parts, self._damping = None, 1.0

    def _select(self, work: StepWork) -> Tensor | None:
        """Return whether each token of the whole batch is selected by each of the P parts of the objective under the
        current weights, ``[N, P]`` bool; ``None`` if no part selects tokens."""
        log_pi_N = torch.from_numpy(self._logprobs(work.batch, work.mask_N))
        return self._objective.prepare(work.inputs(MicroBatch.whole(work.batch.lengths_S), log_pi_N))

    def _end_span(self, name: str, start_s: float) -> float:
        """Record a span ``name`` from ``start_s`` to now, and return its duration in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        end_s = self._context.clock.now()
        self._spans.append(Span(lane="learner", name=name, start_s=start_s, end_s=end_s, step=self._step))
        return end_s - start_s


def nothing_to_learn(step: int, loss_tokens: int) -> RunError:
    """Return the error for a batch of ``step`` in which no token can carry loss; ``loss_tokens`` is the number of
    tokens in its mask."""
    return RunError(
        f"no token of the batch of step {step} can carry loss: {loss_tokens} are in its mask, "
        "none of those has a finite engine logprob",
        remedy="check the engine's logits for NaN (weights, dtype, temperature)",
    )


def refuse_settings(temperature: float) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a sampling temperature that makes training impossible."""
    if temperature <= 0:
        raise ConfigError(
            f"sampling temperature {temperature} leaves no distribution to learn",
            remedy="sample training episodes at a temperature > 0 (1 is usual)",
        )
