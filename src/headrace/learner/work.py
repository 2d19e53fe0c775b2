"""One batch on its way through the learner.

Shape legend: N tokens of the batch, M tokens of a micro-batch, P parts of the objective that select tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.algo.base import LossInputs, LossOutput, Metrics, Old, Ratio
from headrace.algo.metrics import add, means
from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.taught import Taught
from headrace.base.types.tokens import FloatColumn
from headrace.learner.forward import Passed, TopK
from headrace.learner.intake import Mask
from headrace.learner.packing import MicroBatch
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.stats import TokenStats, step_metrics

ROUTED = "routing_differs"
"""The metric of a replay; each rank counts the rows that it routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A batch, and what was decided about all of it before the first forward pass."""

    batch: Batch
    mask_N: Mask
    """The tokens that carry loss: those of the batch's mask whose μ is finite."""
    weights_N: Tensor
    """The reduction: what each token weighs in the batch's loss."""
    old: Old = "learner"
    """Who is π_old."""
    selected_NP: Tensor | None = None
    """bool; the tokens that parts of the objective chose from the whole batch; ``None`` if none does."""
    log_old_N: Tensor | None = None
    """log π_old of kept weights, in the host's memory."""
    log_ref_N: Tensor | None = None
    """log π_ref, in the host's memory."""
    top: TopK | None = None
    """The teacher's likeliest entries."""
    taught_N: Taught | None = None
    """What a teacher beside this learner says of the sampled tokens; ``None`` where it was not asked that."""
    metrics: Metrics = field(default_factory=dict)
    """What companions measured, this rank's share."""

    def only(self, mask_N: Mask) -> StepWork:
        """The same, with the loss of these tokens alone: what the rest weighs stays what it is."""
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
        """The columns of ``micro``, where ``log_pi_M`` lies. ``top_MK``: log π of the teacher's entries.

        A batch is one update, so the learner before this step is π without its gradient.
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
        held = {name: None if column is None else column[places].to(device) for name, column in computed.items()}
        log_old_M = recorded["log_mu_N"] if self.old == "engine" else log_pi_M.detach()
        return LossInputs(
            log_pi_N=log_pi_M,
            log_old_N=log_old_M if held["log_old"] is None else held["log_old"],
            log_ref_N=held["log_ref"],
            num_samples=len(micro.lengths_K),
            version_now=self.batch.step,
            entropy_N=entropy_M,
            log_pi_NK=None if self.top is None else top_MK,
            log_nu_NK=None if self.top is None else self.top.logs_NK[places].to(device),
            selected_NP=None if self.selected_NP is None else self.selected_NP[places].to(device),
            **recorded,
        )


@dataclass(slots=True, kw_only=True)
class StepSums:
    """What the parts of a step have added up to."""

    tally: MicroBatchStats
    mass: float = 0.0
    """The reduction's denominator."""
    loss_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """What the micro-batches of some ranks said."""

    loss: float
    metrics: dict[str, tuple[float, float]]
    stats: TokenStats


class MicroBatchStats:
    """Gathers what the micro-batches of one step say."""

    def __init__(self) -> None:
        self._before = 0
        self._num_tokens = 0
        self._taught: list[Taught] = []
        self._losses: list[float] = []
        self._metrics: list[Mapping[str, Ratio]] = []
        self._stats: list[TokenStats] = []

    @property
    def trained_tokens(self) -> int:
        """Tokens that carried loss."""
        return sum(len(stats.ages_L) for stats in self._stats)

    def open(self, work: StepWork) -> None:
        """Its micro-batches follow."""
        self._before, self._num_tokens = self._num_tokens, self._num_tokens + work.batch.num_tokens
        self._metrics.append(work.metrics)
        self._taught += [] if work.taught_N is None else [work.taught_N]

    def add(self, work: StepWork, micro: MicroBatch, passed: Passed, output: LossOutput) -> None:
        """One micro-batch's share."""
        batch, mask_M = work.batch, work.mask_N[micro.places_M]
        places_L = micro.places_M[mask_M]
        self._losses.append(float(output.loss.detach()))
        self._metrics.append(output.metrics)
        if passed.seen is not None:
            self._metrics.append({ROUTED: Ratio(passed.seen.differing, passed.seen.total)})
        self._stats.append(
            TokenStats(
                log_pi_L=passed.log_pi_M.detach().cpu().numpy()[mask_M],
                log_mu_L=batch.logprobs_N[places_L],
                ages_L=batch.step - batch.versions_N[places_L].astype(np.int64),
                places_L=(self._before + places_L).astype(np.int32),
            )
        )

    def join(self, ranks: AnyRanks) -> None:
        """The last micro-batch was added: what all ranks added, on each of them."""
        if ranks.config.num_shares * ranks.config.context == 1:
            return
        codec = MessageCodec(_Share)
        mine = _Share(
            loss=sum(self._losses),
            metrics={name: (float(ratio.total), float(ratio.count)) for name, ratio in add(self._metrics).items()},
            stats=TokenStats.concat([*self._stats, TokenStats.none()]),
        )
        parts: list[_Share] = [codec.decode(words) for words in ranks.gather_parts(codec.encode(mine))]
        shares = parts[:: ranks.config.context]  # all of one share say the same, but of the rows that they route
        routed = [{ROUTED: Ratio(*part.metrics.pop(ROUTED))} for part in parts if ROUTED in part.metrics]
        self._losses = [share.loss for share in shares]
        self._metrics = [*routed, *({name: Ratio(*pair) for name, pair in share.metrics.items()} for share in shares)]
        self._stats = [share.stats for share in shares]

    def log_pi_N(self) -> FloatColumn:
        """log π of every token as the step began; NaN for those that carried no loss."""
        return TokenStats.concat(self._stats).log_pi_of(self._num_tokens)

    def taught_N(self) -> Taught | None:
        """What a teacher beside the learner says of every token; ``None`` where it was not asked that."""
        return Taught.concat(self._taught) if self._taught else None

    def metrics(self, scale: float = 1.0) -> dict[str, float]:
        """The step's; ``scale`` multiplies the losses."""
        own = {"loss": sum(self._losses) * scale, "tokens": float(self._num_tokens)}
        return {**means(add(self._metrics)), **own, **step_metrics(TokenStats.concat(self._stats))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What one :meth:`LearnerCore.forward_backward` added up."""

    metrics: dict[str, float]
    trained_tokens: int
    """Tokens that carried loss."""
    dropped_tokens: dict[str, int]
    """Tokens of the mask that could carry none, by reason."""
    log_pi_N: FloatColumn
    """log π under the weights that the gradient is of; NaN for tokens that carried no loss."""
    seconds: float
    taught_N: Taught | None
    """What a teacher beside the learner says of the sampled tokens; ``None`` where it was not asked that."""

    @classmethod
    def of(cls, tally: MicroBatchStats, dropped: dict[str, int], seconds: float, scale: float = 1.0) -> Gradient:
        """``scale``: what the losses are yet to be multiplied by."""
        return cls(
            metrics=tally.metrics(scale),
            trained_tokens=tally.trained_tokens,
            dropped_tokens=dropped,
            log_pi_N=tally.log_pi_N(),
            seconds=seconds,
            taught_N=tally.taught_N(),
        )
