"""The computation of logprobs of given tokens, by one prefill in pieces, in blocks borrowed from the engine's cache. No
token is sampled. A *kept-set* is the set of vocabulary entries that survived truncation when a token was sampled;
*routing* is the experts that computed a token. A request may contain both; they are then applied.

Shape legend: T tokens of the request, N of one piece, V vocabulary, E entries of the kept-sets of a piece, K most
likely entries per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import ModelError, RequestError
from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.teacher_scores import TopScores
from headrace.engine.native.blocks import count_blocks
from headrace.engine.native.checks import score_problem
from headrace.engine.native.sampler import LogSoftmax
from headrace.engine.native.states import SequenceStates
from headrace.models.attention import forward
from headrace.models.paged.base import BLOCK, AttentionMaker, Geometry, PagedCache
from headrace.models.paged.plan import PagedPlan
from headrace.models.rope import context_limit
from headrace.models.routing import RoutedModel, RoutingReplay, find_routing

_MAX_PIECE_LOGITS = 2**24
"""The approximate largest number of logits of one piece, which limits its memory."""

Replay = Callable[[Routing], AbstractContextManager[object]]
"""A function that returns a context in which a pass uses the given experts and does not choose its own."""


class PrefillScorer:
    """The scorer of given tokens under the weights that the model has at the time of the call. Each engine has one, and
    passes it blocks of its ``cache``.

    ``maker`` creates the attention over blocks. ``exact`` is the log-softmax of the learner in deterministic mode;
    ``None``: torch's log-softmax. ``states`` are the states of recurrent layers; ``None`` for a model without such
    layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        maker: AttentionMaker,
        exact: LogSoftmax | None,
        states: SequenceStates | None = None,
    ) -> None:
        """Create the scorer of ``model``. The arguments are described at the class."""
        self._model = model
        self._exact = exact
        self._cache = cache
        self._maker = maker
        self._states = states
        self._replay: Replay | None = None
        """The replay of recorded experts, and the model's routing; ``None`` until a request has recorded experts."""
        self._routed_model: RoutedModel | None = None

    def blocks(self, request: ScoreTokens, vocab_size: int) -> int:
        """Return the number of cache blocks that :meth:`score` needs for ``request`` to a model with ``vocab_size``
        tokens. Raises :class:`~headrace.base.errors.RequestError` for a request that cannot be scored."""
        self._refuse_if_unfit(request, vocab_size)
        return count_blocks(len(request.ids_T) - 1) if len(request.ids_T) else 0

    def score(self, request: ScoreTokens, table: list[int], vocab_size: int) -> TopScores:
        """Return the logprobs of the request's tokens, and the ``top_k`` likeliest entries at each position. The first
        token, which nothing precedes, gets zeros. ``table`` are the cache blocks to use, as many as :meth:`blocks`
        returned; their contents are overwritten. ``vocab_size`` is the number of the model's tokens."""
        shape = len(request.ids_T), request.top_k
        scores = TopScores(
            logprobs_T=np.zeros(shape[0], np.float32),
            ids_TK=np.zeros(shape, np.int32),
            logs_TK=np.zeros(shape, np.float32),
        )
        device, total = self._model.device, shape[0] - 1
        if total < 1:
            return scores
        ids_T = torch.from_numpy(np.asarray(request.ids_T, np.int64)).to(device)
        piece = max(16, min(2048, _MAX_PIECE_LOGITS // vocab_size))
        for start in range(0, total, piece):
            end = min(start + piece, total)
            geometry = Geometry(
                tables_RB=np.array([table], np.int32),
                starts_R=np.array([start]),
                counts_R=np.array([end - start]),
                num_decode=0,
            )
            with torch.inference_mode(), self._replayed_routing(request.routing, slice(start, end)):
                states = None if self._states is None else self._states.make_scoring_pass()
                plan = PagedPlan(self._cache, geometry, self._maker, device, states)
                logits_NV = forward(self._model, ids_T[start:end], plan)
                kept = None if request.kept is None else request.kept[start + 1 : end + 1]
                scaled_NV = logits_NV.float() / request.temperature
                logprobs_N = self._logprobs(scaled_NV, ids_T[start + 1 : end + 1], kept)
                best_NK, ids_NK = self._likeliest(scaled_NV, request)
            span = slice(start + 1, end + 1)
            scores.logprobs_T[span] = logprobs_N.cpu().numpy()
            scores.ids_TK[span], scores.logs_TK[span] = ids_NK.cpu().numpy(), best_NK.cpu().numpy()
        return scores

    def _replayed_routing(self, routing: Routing | None, span: slice) -> AbstractContextManager[object]:
        """Return a context in which a pass over the tokens of ``span`` uses their recorded experts; without
        ``routing``, the context changes nothing."""
        if routing is None or self._replay is None:
            return nullcontext()
        return self._replay(routing[span])

    def _logprobs(self, scaled_NV: Tensor, ids_N: Tensor, kept: KeptSets | None) -> Tensor:
        """Return the logprob of each of ``ids_N`` under its row of ``scaled_NV``, the logits divided by the
        temperature. The distribution is restricted to the token's kept-set, if ``kept`` has one for it."""
        if self._exact is None:
            return _logprobs(scaled_NV, ids_N, kept)
        return _exact_logprobs(scaled_NV, ids_N, kept, self._exact)

    def _likeliest(self, scaled_NV: Tensor, request: ScoreTokens) -> tuple[Tensor, Tensor]:
        """Return the logprobs and the ids of the most likely entries of each row, as many as ``request.top_k`` and with
        ids below ``request.top_below``. ``scaled_NV`` are the logits divided by the temperature."""
        if not request.top_k:
            return scaled_NV[:, :0], scaled_NV[:, :0].int()
        best_NK, ids_NK = scaled_NV[:, : request.top_below or None].topk(request.top_k)
        if self._exact is None:
            return best_NK - scaled_NV.logsumexp(-1, keepdim=True), ids_NK
        return self._exact(scaled_NV).gather(1, ids_NK), ids_NK

    def _refuse_if_unfit(self, request: ScoreTokens, vocab_size: int) -> None:
        """Raise :class:`~headrace.base.errors.RequestError` for invalid tokens, for more tokens than the model's
        context or the cache holds, and for routing that cannot be replayed."""
        ids_T, limit = request.ids_T, context_limit(self._model.config)
        problem = score_problem(request, vocab_size)
        if problem:
            pass
        elif limit is not None and len(ids_T) > limit.length:
            why = f": {limit.reason}" if limit.reason else ""
            problem = f"{len(ids_T)} tokens, but the model's context is {limit.length}{why}"
        elif count_blocks(len(ids_T) - 1) > self._cache.num_blocks:
            problem = f"{len(ids_T)} tokens, but the cache has room for {self._cache.num_blocks * BLOCK}"
        elif request.routing is not None:
            problem = self._open_replay() or self._routing_problem(request.routing, len(ids_T))
        if problem:
            raise RequestError(f"tokens to score: {problem}", remedy="score what this model could have sampled")

    def _routing_problem(self, routing: Routing, count: int) -> str:
        """Return why ``routing`` cannot be replayed for ``count`` tokens of this model; an empty string if it can.
        :meth:`_open_replay` must have succeeded."""
        assert self._routed_model is not None
        if routing.known_T.ndim != 1 or routing.known_T.dtype != np.bool_:
            return f"routing of shape {routing.known_T.shape} and dtype {routing.known_T.dtype} for {count} tokens"
        return routing.problem(count) or self._routed_model.problem(routing.experts_RLK)

    def _open_replay(self) -> str:
        """Prepare the replay of routing, and return the reason why it is impossible; an empty string if it is
        possible."""
        if self._replay is not None:
            return ""
        try:
            routed = find_routing(self._model)
        except ModelError as error:
            return error.problem
        if routed is None:
            return "they come with routing, but the model has no experts"
        self._replay, self._routed_model = RoutingReplay(routed), routed
        return ""


def _exact_logprobs(scaled_NV: Tensor, ids_N: Tensor, kept: KeptSets | None, log_softmax: LogSoftmax) -> Tensor:
    """Return the logprob of each token of ``ids_N`` under its scaled logits, computed by ``log_softmax``. Logits
    outside a token's kept-set are masked, if the kept-set is not empty."""
    if kept is not None and len(kept.ids_E):
        owner_E = torch.from_numpy(np.repeat(np.arange(len(kept)), kept.sizes_T))
        allowed_NV = torch.from_numpy(kept.sizes_T == 0)[:, None].repeat(1, scaled_NV.shape[1])
        allowed_NV[owner_E, torch.from_numpy(kept.ids_E.astype(np.int64))] = True
        scaled_NV = scaled_NV.masked_fill(~allowed_NV, -torch.inf)
    return log_softmax(scaled_NV).gather(1, ids_N[:, None])[:, 0]


def _logprobs(scaled_NV: Tensor, ids_N: Tensor, kept: KeptSets | None) -> Tensor:
    """Return the logprob of each token of ``ids_N`` under the softmax of its scaled logits over its kept-set, or over
    the whole vocabulary if the kept-set is empty or ``kept`` is ``None``."""
    total_N = scaled_NV.logsumexp(-1)
    if kept is not None and len(kept.ids_E):
        owner_E = torch.from_numpy(np.repeat(np.arange(len(kept)), kept.sizes_T)).to(scaled_NV.device)
        ids_E = torch.from_numpy(kept.ids_E.astype(np.int64)).to(scaled_NV.device)
        mass_E = (scaled_NV[owner_E, ids_E] - total_N[owner_E]).double().exp()
        mass_N = torch.zeros_like(total_N, dtype=torch.float64).index_add_(0, owner_E, mass_E)
        has_N = torch.from_numpy(kept.sizes_T > 0).to(scaled_NV.device)
        total_N = torch.where(has_N, total_N + mass_N.log().float(), total_N)
    return scaled_NV.gather(1, ids_N[:, None])[:, 0] - total_N
