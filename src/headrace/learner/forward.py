"""log π of a batch's tokens, micro-batch by micro-batch, computed as they were sampled.

    batch ──▶ units (singly, or siblings with their shared prefix) ──▶ micro-batches of about equal cost (packing.py)
    micro-batch ──▶ rows of one flat pass ──▶ trunk, under the recorded routing ──▶ hidden states
                ──▶ those before a loss token ──▶ head, within the kept-sets (logits.py) ──▶ log π, entropy

Shape legend: N tokens of the batch, M tokens of a micro-batch, R rows of it that are computed, P tokens of it that
carry loss.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.errors import ModelError
from headrace.learner.config import LearnerConfig
from headrace.learner.cost import cost_of
from headrace.learner.intake import Mask, refuse_unfit
from headrace.learner.logits import LOGITS_PER_CHUNK, TokenLogprobs, halves
from headrace.learner.packing import Index, MicroBatch, Packing, plan, singly
from headrace.learner.prefixes import siblings
from headrace.models.attention import PLAN, PackedPlan
from headrace.models.routing import RoutedModel, RoutingReplay, Seen, find_routing
from headrace.types.batch import Batch
from headrace.types.tokens import FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What one forward pass gave: columns of the micro-batch, 0 outside the mask."""

    log_pi_M: Tensor
    """Carries the gradient."""
    entropy_M: Tensor
    """Carries it where the objective asks for that."""
    seen: Seen | None
    """The replay of its routing, if there was one."""


class Forward:
    """The model of one learner, and how its passes are made."""

    def __init__(
        self, model: PreTrainedModel, config: LearnerConfig, *, temperature: float, entropy_gradient: bool
    ) -> None:
        self._device = model.device
        self._share = config.share_prefixes
        self._routed = _routing_of(model)
        self._replay = None if self._routed is None else RoutingReplay(self._routed)
        self._packing = Packing(budget=config.tokens_per_microbatch, cost=cost_of(model, self._routed))
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._token_logprobs = TokenLogprobs(
            halves(model, self._inputs(np.zeros(2, np.int64), np.array([2]))),
            chunk=max(1, LOGITS_PER_CHUNK // self._vocab_size),
            temperature=temperature,
            entropy_gradient=entropy_gradient,
        )

    def refuse(self, batch: Batch) -> None:
        """Raise :class:`~headrace.errors.RunError` for a batch that this model cannot compute."""
        refuse_unfit(batch, self._vocab_size, self._routed, self._packing.budget)

    def cut(self, batch: Batch, mask_N: Mask) -> list[MicroBatch]:
        """Micro-batches of the samples that have a token of the mask; the others need no forward pass."""
        samples = np.unique(np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)[mask_N])
        units = siblings(batch, samples, self._packing.budget) if self._share else singly(samples)
        return plan(batch.lengths_S, units, self._packing)[0]

    def __call__(self, batch: Batch, mask_N: Mask, micro: MicroBatch) -> Passed:
        """One forward pass. A token came from the logits of the one before it."""
        loss_P = np.flatnonzero(mask_N[micro.places_M])
        places_P = micro.places_M[loss_P]
        before_P = loss_P - 1 if micro.rows_M is None else micro.rows_M[loss_P - 1]
        ids_R = batch.ids_N[micro.places_R]
        with self._replaying(batch, micro) as seen:
            found = self._token_logprobs(
                self._inputs(ids_R, micro.lengths_K, micro.rows_M) if len(ids_R) else self._dummy(),
                torch.from_numpy(before_P).to(self._device),
                torch.from_numpy(batch.ids_N[places_P].astype(np.int64)).to(self._device),
                None if batch.kept is None else batch.kept.take(places_P),
            )
        at_P = torch.from_numpy(loss_P).to(self._device)
        zeros_M = found[0].new_zeros(len(micro.places_M))
        log_pi_M, entropy_M = (zeros_M.index_copy(0, at_P, column_P) for column_P in found)
        return Passed(log_pi_M=log_pi_M, entropy_M=entropy_M, seen=seen)

    @torch.no_grad()
    def logprobs(self, batch: Batch, mask_N: Mask) -> FloatColumn:
        """log π (N) of the tokens of the mask; 0 elsewhere."""
        logprobs_N = np.zeros(batch.num_tokens, np.float32)
        for micro in self.cut(batch, mask_N):
            logprobs_N[micro.places_M] = self(batch, mask_N, micro).log_pi_M.cpu().numpy()
        return logprobs_N

    def _inputs(self, ids_R: np.ndarray[Any, Any], lengths_K: Index, rows_M: Index | None = None) -> dict[str, Any]:
        attend = PackedPlan(lengths_K, self._device, rows_M)
        ids = torch.from_numpy(ids_R.astype(np.int64)).to(self._device)
        return {"input_ids": ids[None], "position_ids": attend.positions_N[None], PLAN: attend}

    def _dummy(self) -> dict[str, Any]:
        """A pass of one token that nothing is asked of: ranks gather their parameters together."""
        return self._inputs(np.zeros(1, np.int64), np.array([1]))

    def _replaying(self, batch: Batch, micro: MicroBatch) -> AbstractContextManager[Seen | None]:
        if batch.routing is None or not len(micro.places_M):
            return nullcontext()
        assert self._replay is not None  # refused at intake
        return self._replay(batch.routing.take(micro.places_R))


def _routing_of(model: PreTrainedModel) -> RoutedModel | None:
    """``None`` also for a mixture that cannot replay its routing: it is trained live; recorded routing is refused."""
    try:
        return find_routing(model)
    except ModelError:
        return None
