"""The computation of log π of a batch's tokens, micro-batch by micro-batch, with the temperature, the recorded routing
and the kept-sets under which the tokens were sampled.

    batch ──▶ units (single samples, or prefix trees; tree.py) ──▶ micro-batches of about equal cost (packing.py)
    micro-batch ──▶ rows of one flat pass ──▶ trunk, under the recorded routing ──▶ hidden states
                ──▶ only before loss tokens ──▶ head, within the kept-sets (logits.py) ──▶ log π, entropy

If agents train adapters of their own, the adapters compute one after the other, each the samples in which its agent has
loss tokens.

Shape legend: N tokens of the batch, M tokens of a micro-batch, R rows of a pass, P loss tokens of a micro-batch, K
entries of a distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from headrace.base.clock import RealClock
from headrace.base.errors import ModelError
from headrace.base.types.batch import Batch
from headrace.base.types.tokens import FloatColumn
from headrace.learner import products
from headrace.learner.attention import make_probe, select_attention
from headrace.learner.config import LearnerConfig
from headrace.learner.cost import estimate_cost
from headrace.learner.head import TopRequest
from headrace.learner.intake import Mask, refuse_rescaled, refuse_unfit
from headrace.learner.logits import LOGITS_PER_CHUNK, TokenLogprobs, TopEntries, TrunkAndHead, split_model
from headrace.learner.mixture import MixtureBalance
from headrace.learner.packing import Index, MicroBatch, Packing, Unit, groups_whole, plan, singly
from headrace.learner.parallel.mesh import AnyRanks, SingleRank
from headrace.learner.parallel.split import ShardedLogprobs
from headrace.learner.parallel.view import RankView, make_rank_view
from headrace.learner.progress import Progress
from headrace.learner.tree import PrefixTrees, cut_tree
from headrace.models.kernels.deterministic import InvariantPlan, invariant_log_softmax, is_deterministic
from headrace.models.lora import Switch
from headrace.models.packed.kinds import KindRecorder
from headrace.models.rope import ContextLimit, context_limit
from headrace.models.routing import RoutedModel, RoutingPass, RoutingReplay, find_routing
from headrace.models.weights import count_vocabulary

SHARED_FRAC = 0.1
"""The least fraction of a batch's estimated cost that sharing prefixes must save with ``share_prefixes = "auto"``.
Attention needs copies of shared tokens, which cost less than this fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The result of one forward pass: columns over the tokens of the micro-batch, 0 outside the mask."""

    log_pi_M: Tensor
    """log π of each token, with gradient."""
    entropy_M: Tensor
    """The entropy of each token's distribution in nats, with gradient if the objective needs it."""
    top_MK: Tensor
    """log π of the requested entries, with gradient; K = 0 if none were requested."""
    routing_pass: RoutingPass | None
    """The replay of the recorded routing; ``None`` if the batch has no recorded routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """The K likeliest entries of a policy at each token of a batch, in host memory, for a distillation loss."""

    ids_NK: Tensor
    """Ids of the entries, in int32."""
    logs_NK: Tensor
    """Log-probabilities of the entries."""


class Forward:
    """The forward passes of one model over batches: it packs samples into micro-batches, and computes log π, entropies
    and likeliest entries. A learner has one for the trained model, and one for each auxiliary model with weights of its
    own."""

    _token_logprobs: Callable[..., tuple[Tensor, ...]]
    """The computation of log π and entropies of the sampled tokens."""
    _top_entries: Callable[..., tuple[Tensor, ...]]
    """The computation of the likeliest entries."""
    _share: bool | Literal["auto"]
    """The setting that decides whether tokens at the common beginning of samples are computed once."""
    _offload: bool
    """Whether activations are stored in host memory until the backward pass."""
    _routed: RoutedModel | None
    """The routing of a mixture of experts, if it can be replayed; else ``None``."""
    _replay: RoutingReplay | None
    """The replay of recorded experts; ``None`` if the model has no routing that can be replayed."""
    _packing: Packing
    """The limits by which samples are packed into micro-batches."""
    _limit: ContextLimit | None
    """The longest context for which the model can be used."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        *,
        temperature: float,
        entropy_gradient: bool,
        ranks: AnyRanks | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Prepare the forward passes of ``model`` under the settings ``config``. Logits are divided by the sampling
        ``temperature``; ``entropy_gradient`` says whether entropies have a gradient. ``progress`` records which
        micro-batch is being computed. ``ranks`` are the processes that compute together; ``None``: a single process."""
        self._ranks = ranks or SingleRank(model.device)
        self._progress = progress or Progress(RealClock())
        self.switch = Switch(model)
        self._share = config.share_prefixes if config.parallel.context == 1 else False
        self._offload = config.memory.offload_activations
        self._routed = _find_replayable_routing(model)
        self.mixture = MixtureBalance(config.mixture, model, self._routed, self._ranks)
        # the hooks of the replay run before the hooks of the balance, which then count the replayed experts
        self._replay = None if self._routed is None else RoutingReplay(self._routed)
        self._packing = Packing(
            budget=config.tokens_per_microbatch,
            num_ranks=self._ranks.config.num_shares,
            cost=estimate_cost(model, self._routed),
        )
        self._vocab_size = count_vocabulary(model)
        self._limit = context_limit(model.config)

        invariant = is_deterministic(model)
        fills = not invariant and products.install(model, config.tokens_per_microbatch) and self._routed is None
        self.filled: Callable[[int], int] = products.padded_rows if fills else int
        """A function that returns the number of rows to which a pass of a given number of rows is padded."""
        log_softmax = invariant_log_softmax if invariant else None
        chunk = max(1, LOGITS_PER_CHUNK // self._vocab_size)

        def logprobs(parts: TrunkAndHead) -> TokenLogprobs:
            return TokenLogprobs(parts, chunk, temperature, entropy_gradient, log_softmax)

        top_entries = partial(TopEntries, chunk=chunk, temperature=temperature)
        recorder = KindRecorder(self._ranks.device)
        probe = make_probe(InvariantPlan([2], self._ranks.device) if invariant else recorder)
        if self._ranks.config.world > 1:
            self._token_logprobs = ShardedLogprobs(model, logprobs, probe)
            self._top_entries = ShardedLogprobs(model, top_entries, probe)
        else:
            parts = split_model(model, probe)
            self._token_logprobs, self._top_entries = logprobs(parts), top_entries(parts)
        self.attention = select_attention(model, config.attention, recorder.layers)
        """The attention implementation of the passes."""

    def refuse(self, batch: Batch) -> None:
        """Raise :class:`~headrace.base.errors.RunError` for a batch that this model cannot compute, because of unknown
        token ids or too long samples, for example."""
        refuse_unfit(batch, self._vocab_size, self._routed, self._packing.budget)
        refuse_rescaled(batch, self._limit)

    def split_by_agent(self, batch: Batch, mask_N: Mask) -> list[tuple[str, Mask]]:
        """Return pairs of an agent and its part of the mask ``mask_N``, for all agents whose adapters compute tokens of
        ``batch`` in the mask. :attr:`switch` must be set to an agent while its tokens are packed and computed."""
        return [("", mask_N)] if len(self.switch.agents) == 1 else batch.split_by_agent(mask_N)

    def pack(self, batch: Batch, mask_N: Mask, *, pairs: bool = False) -> list[MicroBatch]:
        """Pack the samples that have a token in the mask into micro-batches, and return this rank's share. All ranks
        get the same number of micro-batches; some may be empty. With ``pairs``, all samples of a group are in one
        micro-batch."""
        samples = np.unique(np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)[mask_N])
        units = self._units(batch, samples, pairs=pairs)
        return plan(batch.lengths_S, units, self._packing)[self._ranks.share]

    def _units(self, batch: Batch, samples: Index, *, pairs: bool) -> list[Unit]:
        """Return ``samples`` grouped into units, which are computed in one pass each: prefix trees, if sharing saves
        enough; whole groups with ``pairs``; otherwise single samples."""
        unshared = groups_whole(batch, samples) if pairs else singly(samples)
        if not self._share:
            return unshared
        trees, lengths_S = PrefixTrees(batch), batch.lengths_S.astype(np.int64)
        if pairs:
            units = [trees.make_unit(unit.samples) for unit in unshared]
        else:
            units = cut_tree(trees.make_unit(samples), lengths_S, self._packing)
        before, after = (sum(unit.cost(lengths_S, self._packing.cost) for unit in each) for each in (unshared, units))
        return units if self._share is True or before - after >= SHARED_FRAC * before else unshared

    def __call__(self, batch: Batch, mask_N: Mask, micro: MicroBatch, top_NK: Tensor | None = None) -> ForwardResult:
        """Run one forward pass over ``micro``, a micro-batch of ``batch``, and return log π and entropies of its tokens
        in ``mask_N``. ``top_NK`` are ids of further entries, in host memory, whose log π is also computed at each
        token; ``None``: none."""
        view = make_rank_view(micro, np.flatnonzero(mask_N[micro.places_M]), self._ranks, self.attention, self.filled)
        places_P = micro.places_M[view.places_P]
        with (
            self._replayed_routing(batch, view) as routing_pass,
            self.mixture.watching(micro, len(view.plan.positions_N)),
            save_on_cpu() if self._offload else nullcontext(),
        ):
            columns = self._token_logprobs(
                view.inputs(batch.ids_N),
                torch.from_numpy(view.before_P).to(self._ranks.device),
                torch.from_numpy(batch.ids_N[places_P].astype(np.int64)).to(self._ranks.device),
                None if batch.kept is None else batch.kept.take(places_P),
                None if top_NK is None else top_NK[places_P].to(self._ranks.device, torch.int64),
            )
            log_pi_M, entropy_M, top_MK = (view.join(column_P) for column_P in columns)
        return ForwardResult(log_pi_M=log_pi_M, entropy_M=entropy_M, top_MK=top_MK, routing_pass=routing_pass)

    @torch.no_grad()
    def logprobs(self, batch: Batch, mask_N: Mask) -> FloatColumn:
        """Return log π ``[N]`` of the tokens of ``batch`` in the mask under the model's present weights; 0 elsewhere.
        All ranks get the whole column."""
        logprobs_N = np.zeros(batch.num_tokens, np.float32)
        for agent, own_N in self.split_by_agent(batch, mask_N):
            with self.switch.on(agent):
                for micro in self._reported(self.pack(batch, own_N), "log-probabilities"):
                    own_M = own_N[micro.places_M]
                    logprobs_N[micro.places_M[own_M]] = self(batch, own_N, micro).log_pi_M.cpu().numpy()[own_M]
        return self._ranks.join_shares(torch.from_numpy(logprobs_N)).numpy()

    @torch.no_grad()
    def top_entries(self, batch: Batch, mask_N: Mask, request: TopRequest) -> TopK:
        """Return the ``request.num`` likeliest entries at every token of ``batch`` in the mask, with their
        log-probabilities; 0 elsewhere. All ranks get the whole columns."""
        ids_NK = torch.zeros(batch.num_tokens, request.num, dtype=torch.int32)
        logs_NK = torch.zeros(batch.num_tokens, request.num)
        for agent, own_N in self.split_by_agent(batch, mask_N):
            with self.switch.on(agent):
                for micro in self._reported(self.pack(batch, own_N), "a teacher's entries"):
                    own_M = own_N[micro.places_M]
                    ids_MK, logs_MK = self._likeliest(batch, micro, own_M, request)
                    ids_NK[micro.places_M[own_M]] = ids_MK.cpu().to(ids_NK.dtype)[own_M]
                    logs_NK[micro.places_M[own_M]] = logs_MK.cpu().to(logs_NK.dtype)[own_M]
        return TopK(ids_NK=self._ranks.join_shares(ids_NK), logs_NK=self._ranks.join_shares(logs_NK))

    def _reported(self, packed: Sequence[MicroBatch], result: str) -> Iterator[MicroBatch]:
        """Yield the micro-batches one after the other, and record each as the present unit of work in the learner's
        progress. ``result`` names the result that is computed."""
        for number, micro in enumerate(packed, 1):
            with self._progress.track(result, f"{result} of micro-batch {number} of {len(packed)}"):
                yield micro

    def _likeliest(self, batch: Batch, micro: MicroBatch, mask_M: Mask, request: TopRequest) -> Iterator[Tensor]:
        """Return the ids and the log-probabilities of the likeliest entries at the masked tokens of a micro-batch,
        ``[M, K]`` each, gathered from the ranks that computed them; 0 outside the mask."""
        view = make_rank_view(micro, np.flatnonzero(mask_M), self._ranks, self.attention, self.filled)
        with self._replayed_routing(batch, view):
            before_P = torch.from_numpy(view.before_P).to(self._ranks.device)
            columns = self._top_entries(view.inputs(batch.ids_N), before_P, request)
        return (view.join(column_PK) for column_PK in columns)

    def _replayed_routing(self, batch: Batch, view: RankView) -> AbstractContextManager[RoutingPass | None]:
        """Return a context in which the model uses the recorded experts, if the batch has recorded routing. It yields
        the replay; ``None`` without recorded routing."""
        if batch.routing is None or not len(view.rows_R):
            return nullcontext()
        assert self._replay is not None  # batches with routing are refused for other models
        return self._replay(batch.routing.take(view.rows_in_batch))


def _find_replayable_routing(model: PreTrainedModel) -> RoutedModel | None:
    """Return the routing of a mixture of experts; ``None`` for other models, and for a mixture that cannot replay its
    routing. The latter is trained with its own routing, and recorded routing is refused."""
    try:
        return find_routing(model)
    except ModelError:
        return None
