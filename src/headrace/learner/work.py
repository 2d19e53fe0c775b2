"""The data of one batch during a training step (:class:`StepWork`), and the collection of the step's metrics
(:class:`MicroBatchStats`).

Shape legend: N tokens of the batch, M tokens of a micro-batch, P parts of the objective that select tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.algo.base import LossInputs, LossOutput, Metrics, Old, Ratio
from headrace.algo.metrics import add, means
from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn
from headrace.learner.forward import ForwardResult, TopK
from headrace.learner.intake import Mask
from headrace.learner.packing import MicroBatch
from headrace.learner.parallel.mesh import AnyRanks

ROUTED = "routing_differs"
"""The metric of a routing replay; each rank counts only its own rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A batch with its mask, its token weights and the columns that are computed over the whole batch before the first
    training pass. The learner creates it, and auxiliary models add columns."""

    batch: Batch
    mask_N: Mask
    """The tokens that carry loss: the tokens in the batch's mask with a finite log μ."""
    weights_N: Tensor
    """The weight of each token in the batch's loss, computed by the reduction."""
    old: Old = "learner"
    """The policy that is π_old in ratios, as ``algo.old`` sets it."""
    selected_NP: Tensor | None = None
    """Whether each part of the objective has selected each token, as bool; ``None`` if no part selects tokens."""
    log_old_N: Tensor | None = None
    """log π_old of kept weights, in host memory. NaN for tokens whose π_old is the learner before this step; ``None``
    if this holds for all tokens, or if π_old is μ."""
    log_ref_N: Tensor | None = None
    """log π_ref, in host memory; ``None`` if there is no reference."""
    baseline: float | None = None
    """KL(π‖π_ref) per sample, estimated from answers to other prompts; ``None`` if no loss reads it."""
    top: TopK | None = None
    """The likeliest entries of the teacher; ``None`` if no loss reads them."""
    teacher_scores_N: TeacherScores | None = None
    """Log-probabilities of a teacher that this learner computes, for the sampled tokens; ``None`` if they were not
    computed."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics that auxiliary models measured; each rank has its share."""

    def only(self, mask_N: Mask) -> StepWork:
        """Return the same work with loss only on the tokens of ``mask_N``, whose weights do not change."""
        if mask_N is self.mask_N:
            return self
        return replace(self, mask_N=mask_N, weights_N=self.weights_N * torch.from_numpy(mask_N))

    def inputs(
        self,
        micro: MicroBatch,
        log_pi_M: Tensor,
        entropy_M: Tensor | None = None,
        top_MK: Tensor | None = None,
    ) -> LossInputs:
        """Return the columns of ``micro`` from which the objective computes its loss, on the device of ``log_pi_M``.
        ``entropy_M`` are the entropies of its tokens, and ``top_MK`` is log π of the teacher's entries; ``None`` if
        they were not computed.

        If π_old is the learner before this step, log π_old is log π without its gradient.
        """
        device, places = log_pi_M.device, micro.places_M
        columns = {
            "log_mu_N": self.batch.logprobs_N[places],
            "advantages_N": self.batch.advantages_N[places],
            "mask_N": self.mask_N[places],
            "versions_N": self.batch.versions_N[places].astype(np.int64),
            "samples_N": micro.local_samples_M(),
        }
        recorded = {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
        computed = {"log_old": self.log_old_N, "log_ref": self.log_ref_N}
        kept_columns = {
            name: None if column is None else column[places].to(device) for name, column in computed.items()
        }
        log_old_M = recorded["log_mu_N"] if self.old == "engine" else log_pi_M.detach()
        if (kept_M := kept_columns["log_old"]) is not None:
            log_old_M = torch.where(kept_M.isnan(), log_old_M, kept_M) if self.old == "sampled" else kept_M
        return LossInputs(
            log_pi_N=log_pi_M,
            log_old_N=log_old_M,
            log_ref_N=kept_columns["log_ref"],
            num_samples=len(micro.lengths_K),
            groups_S=torch.from_numpy(self.batch.groups_S[micro.samples_K].astype(np.int64)).to(device),
            version_now=self.batch.step,
            entropy_N=entropy_M,
            baseline=None if self.baseline is None else log_pi_M.new_tensor(self.baseline),
            log_pi_NK=None if self.top is None else top_MK,
            log_nu_NK=None if self.top is None else self.top.logs_NK[places].to(device),
            selected_NP=None if self.selected_NP is None else self.selected_NP[places].to(device),
            **recorded,
        )


@dataclass(slots=True, kw_only=True)
class StepSums:
    """The sums over the parts of a step whose batch is added in parts (:meth:`LearnerCore.add`)."""

    tally: MicroBatchStats
    """The losses, metrics and token statistics of all parts so far."""
    denominator: float = 0.0
    """The denominator of the reduction."""
    loss_tokens: int = 0
    """The number of tokens in the masks of the parts, including tokens without a finite log μ."""
    dropped: Counter[str] = field(default_factory=Counter)
    """The number of tokens in the masks that could not carry loss, by reason."""
    seconds: float = 0.0
    """The duration of the forward and backward passes in seconds."""


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over the micro-batches of one rank, as a message to all ranks."""

    loss: float
    """The sum of the losses."""
    metrics: dict[str, tuple[float, float]]
    """The total and the count of each metric; its value is their ratio."""
    stats: TokenStats
    """The columns over the loss tokens of the rank's micro-batches."""


class MicroBatchStats:
    """The losses, metrics and token statistics of the micro-batches of one step. The learner adds to it during the
    passes, and computes the metrics of the step from it."""

    def __init__(self) -> None:
        """Create empty statistics."""
        self._first_token = 0
        """The index of the first token of the present part of the batch among all tokens of the batch."""
        self._num_tokens = 0
        """The number of tokens of all parts of the batch so far."""
        self._teacher_scores: list[TeacherScores] = []
        """The scores of a teacher that the learner computes, one record for each part of the batch."""
        self._losses: list[float] = []
        """The loss of each micro-batch."""
        self._metrics: list[Mapping[str, Ratio]] = []
        """The metrics of each micro-batch and of each part of the batch."""
        self._stats: list[TokenStats] = []
        """The columns over the loss tokens, one record for each micro-batch."""

    @classmethod
    def combine_updates(
        cls, parts: Sequence[MicroBatchStats], work: StepWork, before: Metrics, stats: TokenStats
    ) -> MicroBatchStats:
        """Return the statistics of several updates of the batch of ``work`` from ``parts``, the statistics of each
        update. ``stats`` and ``before`` are token statistics and metrics before the first update; they replace the
        token statistics of the updates, and their metrics of the same names."""
        joined = cls()
        joined._num_tokens = work.batch.num_tokens
        joined._teacher_scores = [] if work.teacher_scores_N is None else [work.teacher_scores_N]
        joined._losses = [loss for part in parts for loss in part._losses]
        measured = [metrics for part in parts for metrics in part._metrics]
        joined._metrics = [
            before, *({name: ratio for name, ratio in each.items() if name not in before} for each in measured)
        ]  # fmt: skip
        joined._stats = [stats]
        return joined

    @property
    def trained_tokens(self) -> int:
        """The number of tokens with loss."""
        return sum(len(stats.ages_L) for stats in self._stats)

    def begin(self, work: StepWork) -> None:
        """Start a batch, or a part of one: the next calls of :meth:`add` are for micro-batches of ``work``."""
        self._first_token, self._num_tokens = self._num_tokens, self._num_tokens + work.batch.num_tokens
        self._metrics.append(work.metrics)
        self._teacher_scores += [] if work.teacher_scores_N is None else [work.teacher_scores_N]

    def add(self, work: StepWork, micro: MicroBatch, result: ForwardResult, output: LossOutput) -> None:
        """Add the results of one micro-batch of ``work``: ``result`` of its forward pass, and ``output``, its loss and
        the metrics of the loss."""
        batch, mask_M = work.batch, work.mask_N[micro.places_M]
        places_L = micro.places_M[mask_M]
        self._losses.append(float(output.loss.detach()))
        self._metrics.append(output.metrics)
        if result.routing_pass is not None:
            self._metrics.append({ROUTED: Ratio(result.routing_pass.differing, result.routing_pass.total)})
        self._stats.append(
            TokenStats(
                log_pi_L=result.log_pi_M.detach().cpu().numpy()[mask_M],
                log_mu_L=batch.logprobs_N[places_L],
                ages_L=batch.step - batch.versions_N[places_L].astype(np.int64),
                places_L=(self._first_token + places_L).astype(np.int32),
            )
        )

    def note(self, metrics: Mapping[str, Ratio]) -> None:
        """Add metrics that every rank has computed with the same values."""
        self._metrics.append(metrics)

    def join(self, ranks: AnyRanks) -> None:
        """Merge the results of all ranks, after the last micro-batch. All ranks call this together and get the same
        results."""
        if ranks.config.num_shares * ranks.config.context == 1:
            return
        codec = MessageCodec(_Share)
        mine = _Share(
            loss=sum(self._losses),
            metrics={name: (float(ratio.total), float(ratio.count)) for name, ratio in add(self._metrics).items()},
            stats=TokenStats.concat([*self._stats, TokenStats.none()]),
        )
        parts: list[_Share] = [codec.decode(words) for words in ranks.gather_parts(codec.encode(mine))]
        # context-parallel ranks of one share have equal results, except for the rows that they route
        shares = parts[:: ranks.config.context]
        routed = [{ROUTED: Ratio(*part.metrics.pop(ROUTED))} for part in parts if ROUTED in part.metrics]
        self._losses = [share.loss for share in shares]
        self._metrics = [*routed, *({name: Ratio(*pair) for name, pair in share.metrics.items()} for share in shares)]
        self._stats = [share.stats for share in shares]

    def log_pi_N(self) -> FloatColumn:
        """Return log π of every token before the update, ``[N]``; NaN for tokens without loss."""
        return TokenStats.concat(self._stats).scatter_log_pi(self._num_tokens)

    def teacher_scores_N(self) -> TeacherScores | None:
        """Return the log-probabilities of a teacher that the learner computes, for every token; ``None`` if they were
        not computed."""
        return TeacherScores.concat(self._teacher_scores) if self._teacher_scores else None

    def metrics(self, scale: float = 1.0) -> dict[str, float]:
        """Return the metrics of the step by name. The losses are multiplied by ``scale``, such as the factor by which
        the gradient of a batch in parts is normalised."""
        own = {"loss": sum(self._losses) * scale, "tokens": float(self._num_tokens)}
        return {**means(add(self._metrics)), **own, **step_metrics(TokenStats.concat(self._stats))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The result of one :meth:`LearnerCore.forward_backward`."""

    metrics: dict[str, float]
    """The metrics of the loss and of the tokens, by name."""
    trained_tokens: int
    """The number of tokens with loss."""
    dropped_tokens: dict[str, int]
    """The number of tokens in the mask that could not carry loss, by reason."""
    log_pi_N: FloatColumn
    """log π under the weights at which the gradient was computed, ``[N]``; NaN for tokens without loss."""
    seconds: float
    """The duration of the passes in seconds."""
    teacher_scores_N: TeacherScores | None
    """Log-probabilities of a teacher that this learner computes, for the sampled tokens; ``None`` if they were not
    computed."""

    @classmethod
    def from_stats(
        cls, tally: MicroBatchStats, dropped: dict[str, int], seconds: float, scale: float = 1.0
    ) -> Gradient:
        """Return the record of a gradient from ``tally``, the statistics of its micro-batches. ``dropped`` is the
        number of tokens that could not carry loss, by reason; the passes took ``seconds`` seconds; the losses are
        multiplied by ``scale``."""
        return cls(
            metrics=tally.metrics(scale),
            trained_tokens=tally.trained_tokens,
            dropped_tokens=dropped,
            log_pi_N=tally.log_pi_N(),
            seconds=seconds,
            teacher_scores_N=tally.teacher_scores_N(),
        )


Ages = npt.NDArray[np.int64]


class TokenStats(msgspec.Struct, frozen=True, kw_only=True):
    """Columns over the L tokens with loss, for the metrics of a step."""

    log_pi_L: FloatColumn
    """log π of each token under the learner's weights."""
    log_mu_L: FloatColumn
    """log μ of each token, recorded by the engine."""
    ages_L: Ages
    """The age of each token: version of the learner − version of the token."""
    places_L: IntColumn
    """The index of each token among the tokens of the batch."""

    @classmethod
    def concat(cls, parts: Sequence[TokenStats]) -> TokenStats:
        """Return the concatenated columns of ``parts``, of which there must be at least one."""
        return cls(
            log_pi_L=np.concatenate([part.log_pi_L for part in parts]),
            log_mu_L=np.concatenate([part.log_mu_L for part in parts]),
            ages_L=np.concatenate([part.ages_L for part in parts]),
            places_L=np.concatenate([part.places_L for part in parts]),
        )

    @classmethod
    def none(cls) -> TokenStats:
        """Return columns of no tokens."""
        nothing = np.zeros(0, np.float32)
        return cls(log_pi_L=nothing, log_mu_L=nothing, ages_L=np.zeros(0, np.int64), places_L=np.zeros(0, np.int32))

    def scatter_log_pi(self, num_tokens: int) -> FloatColumn:
        """Return log π of each of the batch's ``num_tokens`` tokens; NaN for tokens without loss."""
        log_pi_N = np.full(num_tokens, np.nan, np.float32)
        log_pi_N[self.places_L] = self.log_pi_L
        return log_pi_N


def step_metrics(stats: TokenStats) -> dict[str, float]:
    """Return metrics of the ages of the tokens and of the difference between log π and log μ: its maximum over all
    tokens, and means over tokens of age 0. For these tokens the difference is only the mismatch of engine and learner;
    for older tokens staleness adds to it.

    ``mismatch_kl`` estimates KL(μ‖π) as the mean of eˣ − 1 − x with x = log(π/μ), clamped to ±20 (Schulman 2020, "k3");
    ``mismatch_abs`` is the mean of |x|. Both are missing if no token has the age 0.

    >>> log_pi, log_mu = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -4.0], np.float32)
    >>> stats = TokenStats(log_pi_L=log_pi, log_mu_L=log_mu, ages_L=np.array([0, 3]), places_L=np.array([0, 1]))
    >>> {name: round(value, 4) for name, value in step_metrics(stats).items()}
    {'age_mean': 1.5, 'age_max': 3.0, 'log_ratio_abs_max': 2.0, 'mismatch_kl': 0.1487, 'mismatch_abs': 0.5}
    """
    log_ratio = stats.log_pi_L.astype(np.float64) - stats.log_mu_L
    metrics = {
        "age_mean": float(stats.ages_L.mean()),
        "age_max": float(stats.ages_L.max()),
        "log_ratio_abs_max": float(np.abs(log_ratio).max()),
    }
    fresh = log_ratio[stats.ages_L == 0]
    if len(fresh):
        clamped = fresh.clip(-20, 20)
        metrics["mismatch_kl"] = float((np.expm1(clamped) - clamped).mean())
        metrics["mismatch_abs"] = float(np.abs(fresh).mean())
    return metrics
