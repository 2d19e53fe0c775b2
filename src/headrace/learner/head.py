"""The computation of log π and entropy under a linear head, in tiles: only the logits of one tile are in memory at a
time, in the forward and the backward pass.

                 vocabulary ──▶
    tokens  │ tile │ tile │ tile │   each tile: logits = (h·Wᵀ + b) / temperature, which are discarded after use
       │    │ tile │ tile │ tile │   forward:  they update the running log-sum-exp and entropy of their tokens
       ▼    │ tile │ tile │ tile │   backward: their gradient is added to the gradients of h, W and b

The memory besides inputs and gradients does not grow with tokens × vocabulary, but the logits are computed twice.
Tensor-parallel ranks have parts of W and b; each computes the tiles of its own part (vocabulary.py). The log π of a
token with a kept-set is normalised over the kept-set: only its entries are in the log-sum-exp. Entropies are always
computed from the whole distribution.

Online softmax: Milakov & Gimelshein, arXiv 1805.02867. Entropy: H = log s − d/s with s = Σ eᶻ⁻ᵐ, d = Σ eᶻ⁻ᵐ(z − m), and
∂H/∂z = −p (log p + H).

Shape legend: P tokens, C tokens of a tile, V vocabulary, B entries of a tile, D hidden size, E entries of all
kept-sets, K further requested entries of each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.base.types.recorded import KeptSets
from headrace.learner.products import add_product, linear
from headrace.learner.vocabulary import VocabularyPart

TILES = {"cpu": (512, 2048)}
"""The size of a tile on a CPU, in tokens and vocabulary entries: small enough for the cache."""

LARGE_TILE = (2048, 16384)
"""The size of a tile on other devices, in tokens and vocabulary entries: 128 MiB of logits in float32."""

Index = npt.NDArray[np.int64]


class HeadMatrix(NamedTuple):
    """A head that is a single matrix, or the part of such a head that this rank has."""

    weight_VD: Tensor
    """The weight, with one row for each entry of the vocabulary."""
    bias_V: Tensor | None = None
    """The bias of the same entries; ``None``: the head has none."""
    part: VocabularyPart | None = None
    """The part of the vocabulary of weight and bias; ``None``: the whole vocabulary."""


class KeptEntries:
    """The kept-sets of P tokens, as tensors with one element for each of the E entries of all tokens. A token without
    entries was sampled from the whole vocabulary."""

    def __init__(self, kept: KeptSets, device: torch.device) -> None:
        """Copy ``kept``, the kept-sets of P tokens, to ``device``."""
        self.sizes_P = torch.from_numpy(kept.sizes_T.astype(np.int64)).to(device)
        """The number of entries of each token."""
        self.owners_E = torch.from_numpy(np.repeat(np.arange(len(kept)), kept.sizes_T)).to(device)
        """The index of the token to which each entry belongs."""
        self._ids_E = kept.ids_E.astype(np.int64)
        """The id of each entry in the vocabulary, in host memory."""
        self._owners_E = np.repeat(np.arange(len(kept)), kept.sizes_T)
        """A copy of ``owners_E`` in host memory."""
        self._ends_P = np.concatenate([[0], np.cumsum(kept.sizes_T)])
        """The index E at which the entries of each token begin; P + 1 numbers."""

    def within(self, tokens: slice, entries: slice) -> tuple[Tensor, Tensor]:
        """Return the kept entries in the tile of the slices ``tokens`` and ``entries`` (of the vocabulary): their
        indices among all E entries, and their indices in the flattened tile."""
        first, last = self._ends_P[tokens.start], self._ends_P[tokens.stop]
        ids = self._ids_E[first:last]
        inside: Index = np.flatnonzero((ids >= entries.start) & (ids < entries.stop))
        rows = self._owners_E[first + inside] - tokens.start
        flat = rows * (entries.stop - entries.start) + ids[inside] - entries.start
        device = self.owners_E.device
        return torch.from_numpy(first + inside).to(device), torch.from_numpy(flat).to(device)

    def log_sum(self, logits_E: Tensor) -> Tensor:
        """Return the log-sum-exp over each token's entries, ``[P]``; −inf for a token without entries. ``logits_E`` are
        the logits of all E entries."""
        if not len(logits_E):
            return logits_E.new_full(self.sizes_P.shape, -torch.inf)
        most_P = torch.segment_reduce(logits_E, "max", lengths=self.sizes_P)
        sums_P = torch.segment_reduce((logits_E - most_P[self.owners_E]).exp(), "sum", lengths=self.sizes_P, initial=0)
        return most_P + sums_P.log()

    def allowed(self, num_tokens: int, vocab_size: int) -> Tensor:
        """Return for each of the ``num_tokens`` tokens and each of the ``vocab_size`` entries of the vocabulary whether
        it is in the token's kept-set, ``[P, V]`` bool; all true for a token without a kept-set. It is for callers that
        have all logits."""
        whole_P = self.sizes_P == 0
        allowed_PV = whole_P[:, None].expand(num_tokens, vocab_size).contiguous()
        _, flat_E = self.within(slice(0, num_tokens), slice(0, vocab_size))
        allowed_PV.view(-1)[flat_E] = True
        return allowed_PV


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """The arguments of :func:`linear_logprobs` for P tokens."""

    ids_P: Tensor
    """The ids of the sampled tokens."""
    temperature: float
    """The temperature by which logits are divided."""
    kept: KeptEntries | None
    """The kept-sets from which the tokens were sampled; ``None``: the whole vocabulary."""
    entropy_gradient: bool
    """Whether the entropies have a gradient."""
    keep_logits: bool
    """Whether the logits may stay in memory until the backward pass, so that it does not compute them again."""
    top_PK: Tensor | None = None
    """The ids of further entries whose log π is computed under the whole distribution; ``None``: none."""

    def further_ids(self, tokens: slice) -> Tensor:
        """Return the ids ``[C, K]`` of the further entries of the tokens in the slice ``tokens``; K = 0 if there are
        none."""
        return self.ids_P[tokens, None][:, :0] if self.top_PK is None else self.top_PK[tokens]


def linear_logprobs(hidden_PD: Tensor, matrix: HeadMatrix, request: HeadRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the hidden states ``hidden_PD`` and the head ``matrix``, log π of ``request.ids_P`` and the
    entropies, ``[P]`` each, and log π of ``request.top_PK``, ``[P, K]`` (K = 0 for ``None``), in nats. All are in
    float32 or wider, with exact gradients.

    The head is ``hidden · weightᵀ + bias``, in the dtype of its weights; sums are in float32 or wider. Ranks that have
    parts of the head call this together, with the same hidden states, and get the same results.
    """
    apply: Any = _LinearLogprobs.apply
    logprobs_P, entropy_P, top_PK = apply(hidden_PD, matrix.weight_VD, matrix.bias_V, (matrix.part, request))
    return logprobs_P, entropy_P, top_PK


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRequest:
    """A request for the likeliest entries of the distribution at each token."""

    num: int
    """K, the number of entries."""
    below: int
    """Only entries with smaller ids are returned; the distribution covers all ids."""


@torch.no_grad()
def linear_top(hidden_PD: Tensor, matrix: HeadMatrix, temperature: float, request: TopRequest) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities ``[P, K]`` of the likeliest entries that ``request`` describes, for the hidden
    states ``hidden_PD`` and the head ``matrix``, as in :func:`linear_logprobs`, with logits divided by ``temperature``;
    the likeliest entry is first."""
    head = _Head(hidden_PD, matrix, temperature)
    best_PK = hidden_PD.new_full((len(hidden_PD), request.num), -torch.inf, dtype=head.wide)
    ids_PK, sums = best_PK.long().zero_(), []
    for tokens in head.tokens:
        best_CK, ids_CK = best_PK[tokens], ids_PK[tokens]
        running = _RunningSums(best_CK)
        for entries in head.entries:
            logits_CB, ids = head.logits(tokens, entries), head.ids(entries)
            running.add(logits_CB)
            logits_CB = logits_CB[:, : max(0, request.below - ids.start)]
            more_CK, places_CK = logits_CB.topk(min(request.num, logits_CB.shape[1]))
            best_CK, ids_CK = _best(
                torch.cat([best_CK, more_CK], 1), torch.cat([ids_CK, places_CK + ids.start], 1), request.num
            )
        best_PK[tokens], ids_PK[tokens] = best_CK, ids_CK
        sums.append(running)
    running = _RunningSums.combine(sums, best_PK)
    if matrix.part is not None:
        running.join(matrix.part)
        best_PK, ids_PK = _best(matrix.part.gather(best_PK), matrix.part.gather(ids_PK), request.num)
    return ids_PK, best_PK - running.log_sum()[:, None]


def _best(values_CB: Tensor, ids_CB: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return the ``num`` largest values of each row, in descending order, and their ids."""
    best_CK, places_CK = values_CB.topk(num)
    return best_CK, ids_CB.gather(1, places_CK)


class _RunningSums:
    """The log-sum-exp and the entropy of some tokens, updated with one tile of logits after the other."""

    def __init__(self, like_CB: Tensor) -> None:
        """Initialise the sums for as many tokens as ``like_CB`` has rows. Only shape, dtype and device of ``like_CB``
        are used."""
        self.largest_C = like_CB.new_full(like_CB.shape[:1], -1e30)
        self.sum_C = torch.zeros_like(self.largest_C)
        self.dot_C = torch.zeros_like(self.largest_C)

    def add(self, logits_CB: Tensor) -> None:
        """Add a tile of logits ``[C, B]``. The sums are relative to the largest logit of each token, so they are
        rescaled when it changes."""
        largest_C = torch.maximum(self.largest_C, logits_CB.amax(1))
        drop_C = self.largest_C - largest_C
        shifted_CB = logits_CB - largest_C[:, None]
        exp_CB = shifted_CB.exp()
        self.dot_C = (self.dot_C + self.sum_C * drop_C) * drop_C.exp()
        self.sum_C = self.sum_C * drop_C.exp() + exp_CB.sum(1)
        self.dot_C += exp_CB.mul_(shifted_CB).sum(1)
        self.largest_C = largest_C

    @classmethod
    def combine(cls, parts: Sequence[_RunningSums], like_PB: Tensor) -> _RunningSums:
        """Return the sums of the tokens of all ``parts``, concatenated. ``like_PB`` has one row for each of these
        tokens."""
        found = cls(like_PB)
        if parts:
            found.largest_C = torch.cat([part.largest_C for part in parts])
            found.sum_C = torch.cat([part.sum_C for part in parts])
            found.dot_C = torch.cat([part.dot_C for part in parts])
        return found

    def join(self, part: VocabularyPart, *columns: Tensor) -> list[Tensor]:
        """Sum over the logits of all ranks that have a part of the vocabulary (``part``), in place; also return the
        sums of ``columns`` over the ranks."""
        largest_C = part.largest(self.largest_C)
        drop_C = self.largest_C - largest_C
        sum_C = self.sum_C * drop_C.exp()
        dot_C = (self.dot_C + self.sum_C * drop_C) * drop_C.exp()
        self.largest_C = largest_C
        self.sum_C, self.dot_C, *found = part.sum([sum_C, dot_C, *columns])
        return found

    def log_sum(self) -> Tensor:
        """Return the log-sum-exp ``[C]`` of the logits added so far."""
        return self.largest_C + self.sum_C.log()

    def entropy(self) -> Tensor:
        """Return the entropy ``[C]``, in nats, of the softmax of the logits added so far."""
        return self.sum_C.log() - self.dot_C / self.sum_C


class _Head:
    """A linear head that computes its logits tile by tile, in the forward and the backward pass. ``tokens`` and
    ``entries`` are lists of slices that divide the tokens and the rows of its weight."""

    def __init__(self, hidden_PD: Tensor, matrix: HeadMatrix, temperature: float) -> None:
        """Divide the computation of the logits of ``hidden_PD`` by the head ``matrix`` into tiles. Logits are divided
        by ``temperature``."""
        self.hidden_PD = hidden_PD
        self.weight_VD, self.bias_V, self.part = matrix
        self.temperature = temperature
        self.wide = torch.promote_types(hidden_PD.dtype, torch.float32)
        rows, columns = TILES.get(hidden_PD.device.type, LARGE_TILE)
        self.tokens = list(_slices(len(hidden_PD), rows))
        self.entries = list(_slices(len(self.weight_VD), columns))

    def ids(self, entries: slice) -> slice:
        """Return the range of token ids to which the rows ``entries`` of the weight belong."""
        first = 0 if self.part is None else self.part.first
        return slice(entries.start + first, entries.stop + first)

    def logits(self, tokens: slice, entries: slice) -> Tensor:
        """Return the logits ``[C, B]`` of one tile, given by the slices ``tokens`` and ``entries``, divided by the
        temperature, in float32 or wider."""
        bias = None if self.bias_V is None else self.bias_V[entries]
        logits_CB = linear(self.hidden_PD[tokens], self.weight_VD[entries], bias).to(self.wide)
        return logits_CB if self.temperature == 1.0 else logits_CB / self.temperature


class _LinearLogprobs(torch.autograd.Function):
    """The autograd function of :func:`linear_logprobs`. Its own backward pass computes the logits again, where torch
    would keep the logits of every tile in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        part_and_request: tuple[VocabularyPart | None, HeadRequest],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log π, the entropy and log π of the requested entries for each token, tile by tile."""
        part, request = part_and_request
        head = _Head(hidden_PD, HeadMatrix(weight_VD, bias_V, part), request.temperature)
        # logits of single entries: the rank with the entry writes them, and they stay 0 on other ranks, for a sum
        top_PK = hidden_PD.new_zeros(request.further_ids(slice(None)).shape, dtype=head.wide)
        sampled_logits_P = hidden_PD.new_zeros(len(hidden_PD), dtype=head.wide)
        logits_E = hidden_PD.new_zeros(0 if request.kept is None else len(request.kept.owners_E), dtype=head.wide)
        tiles: dict[tuple[int, int], Tensor] = {}
        sums = [_RunningSums(sampled_logits_P[tokens, None]) for tokens in head.tokens]
        for tokens, running in zip(head.tokens, sums, strict=True):
            for entries in head.entries:
                logits_CB, ids = head.logits(tokens, entries), head.ids(entries)
                running.add(logits_CB)
                _write_logits(sampled_logits_P[tokens, None], logits_CB, request.ids_P[tokens, None], ids)
                _write_logits(top_PK[tokens], logits_CB, request.further_ids(tokens), ids)
                if request.kept is not None:
                    places, flat = request.kept.within(tokens, ids)
                    logits_E[places] = logits_CB.view(-1)[flat]
                if request.keep_logits:
                    tiles[tokens.start, entries.start] = logits_CB
        running = _RunningSums.combine(sums, sampled_logits_P[:, None])
        if part is not None:
            sampled_logits_P, top_PK, logits_E = running.join(part, sampled_logits_P, top_PK, logits_E)
        log_sum_P, entropy_P = running.log_sum(), running.entropy()
        ctx.request, ctx.tiles, ctx.part = request, tiles, part
        if request.kept is None:
            logprobs_P, shares_E = sampled_logits_P - log_sum_P, None
        else:
            kept_sum_P = request.kept.log_sum(logits_E)
            shares_E = (logits_E - kept_sum_P[request.kept.owners_E]).exp()
            logprobs_P = sampled_logits_P - torch.where(request.kept.sizes_P > 0, kept_sum_P, log_sum_P)
        ctx.save_for_backward(hidden_PD, weight_VD, bias_V, log_sum_P, entropy_P, shares_E)
        if not request.entropy_gradient:
            ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P, top_PK - log_sum_P[:, None]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_P: Tensor, grad_entropy_P: Tensor, grad_top_PK: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the hidden states, the weights and the bias, tile by tile. Logits that were not kept
        are computed again."""
        hidden_PD, weight_VD, bias_V, log_sum_P, entropy_P, shares_E = ctx.saved_tensors
        request: HeadRequest = ctx.request
        head = _Head(hidden_PD, HeadMatrix(weight_VD, bias_V, ctx.part), request.temperature)
        logit_gradient = _LogitGradient(
            request, grad_logprob_P, grad_entropy_P if request.entropy_gradient else None, grad_top_PK, shares_E
        )
        sums = _GradientSums(head, ctx.needs_input_grad[:3])
        for entries in head.entries:
            for tokens in head.tokens:
                tile = ctx.tiles.pop((tokens.start, entries.start), None)
                logits_CB = head.logits(tokens, entries) if tile is None else tile
                log_p_CB = logits_CB - log_sum_P[tokens, None]
                sums.add(tokens, entries, logit_gradient(log_p_CB, entropy_P, tokens, head.ids(entries)))
            sums.close(entries)
        return *sums.gradients(), None


class _LogitGradient:
    """The gradient of the logits of a tile, for the backward pass of :class:`_LinearLogprobs`: a multiple of the
    softmax for every entry, plus terms for the sampled token, the requested entries and the kept-set."""

    def __init__(
        self,
        request: HeadRequest,
        grad_logprob_P: Tensor,
        grad_entropy_P: Tensor | None,
        grad_top_PK: Tensor,
        shares_E: Tensor | None,
    ) -> None:
        """Store the gradients of the three results of the forward pass for ``request``: of the log-probabilities
        (``grad_logprob_P``), of the entropies (``grad_entropy_P``; ``None`` if they have no gradient) and of the
        requested entries (``grad_top_PK``). ``shares_E`` are the probabilities of the kept entries within their
        kept-sets; ``None`` without kept-sets."""
        self._request = request
        self._grad_logprob_P, self._grad_entropy_P, self._grad_top_PK = grad_logprob_P, grad_entropy_P, grad_top_PK
        self._softmax_factor_P = -grad_logprob_P
        """The factor of the softmax over the whole vocabulary in the gradient of each token."""
        if request.kept is not None:
            assert shares_E is not None
            self._softmax_factor_P = self._softmax_factor_P.masked_fill(request.kept.sizes_P > 0, 0.0)
            self._grad_kept_E = -grad_logprob_P[request.kept.owners_E] * shares_E
            """The term that each kept entry adds to the gradient of its logit."""
        self._softmax_factor_P = self._softmax_factor_P - grad_top_PK.sum(1)

    def __call__(self, log_p_CB: Tensor, entropy_P: Tensor, tokens: slice, ids: slice) -> Tensor:
        """Return the gradient ``[C, B]`` with respect to the logits of the tile (``tokens`` × ``ids``) before their
        division by the temperature. ``log_p_CB`` are the tile's log-probabilities under the whole distribution, and
        ``entropy_P`` the entropies of all tokens."""
        grad_CB = log_p_CB.exp()
        softmax_factor_C = self._softmax_factor_P[tokens, None]
        if self._grad_entropy_P is None:
            grad_CB.mul_(softmax_factor_C)
        else:
            grad_CB.mul_(softmax_factor_C - self._grad_entropy_P[tokens, None] * (log_p_CB + entropy_P[tokens, None]))
        if self._request.kept is not None:
            places, flat = self._request.kept.within(tokens, ids)
            grad_CB.view(-1)[flat] += self._grad_kept_E[places]
        _scatter_add(grad_CB, self._grad_logprob_P[tokens, None], self._request.ids_P[tokens, None], ids)
        _scatter_add(grad_CB, self._grad_top_PK[tokens], self._request.further_ids(tokens), ids)
        return grad_CB if self._request.temperature == 1.0 else grad_CB.div_(self._request.temperature)


class _GradientSums:
    """The gradients of hidden states, weight and bias, summed over tiles in float32 or wider. The sum for the weight is
    computed for one block of rows at a time."""

    def __init__(self, head: _Head, needed: tuple[bool, bool, bool]) -> None:
        """Start with zeros. ``head`` is the output layer with the hidden states of the P tokens. ``needed`` says for
        hidden states, weight and bias whether a gradient is needed."""
        self._head = head
        need_hidden, need_weight, need_bias = needed
        self._hidden = torch.zeros_like(head.hidden_PD, dtype=head.wide) if need_hidden else None
        """The gradient of the hidden states; ``None`` if it is not needed."""
        self._weight = torch.zeros_like(head.weight_VD) if need_weight else None
        """The gradient of the weight; ``None`` if it is not needed."""
        self._bias = (
            torch.zeros(len(head.weight_VD), dtype=head.wide, device=head.weight_VD.device) if need_bias else None
        )
        """The gradient of the bias; ``None`` if it is not needed."""
        self._block: Tensor | None = None
        """The sum for the block of the weight's rows that is being computed; ``None`` between blocks."""

    def add(self, tokens: slice, entries: slice, grad_CB: Tensor) -> None:
        """Add the contribution of the tile ``tokens`` × ``entries``, with the gradient ``grad_CB`` of its logits, to
        all gradients."""
        if self._bias is not None:
            self._bias[entries] += grad_CB.sum(0)
        narrow_CB = grad_CB.to(self._head.weight_VD.dtype)
        if self._hidden is not None:
            add_product(self._hidden[tokens], narrow_CB, self._head.weight_VD[entries])
        if self._weight is not None:
            if self._block is None:  # sum in the gradient itself, if its dtype is wide enough
                block = self._weight[entries]
                self._block = (
                    block if block.dtype == self._head.wide else torch.zeros_like(block, dtype=self._head.wide)
                )
            add_product(self._block, narrow_CB.t(), self._head.hidden_PD[tokens])

    def close(self, entries: slice) -> None:
        """Complete the weight gradient of the block ``entries``, after the tiles of all tokens have been added: round
        it to the dtype of the weight."""
        if self._weight is not None and self._block is not None and self._block.dtype != self._weight.dtype:
            self._weight[entries] = self._block.to(self._weight.dtype)
        self._block = None

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias in their own dtypes; ``None`` if a gradient is not
        needed. The gradient of the hidden states is summed over the ranks with parts of the vocabulary."""
        dtype, part = self._head.weight_VD.dtype, self._head.part
        if self._hidden is not None and part is not None:
            (self._hidden,) = part.sum([self._hidden])
        hidden = None if self._hidden is None else self._hidden.to(self._head.hidden_PD.dtype)
        return hidden, self._weight, None if self._bias is None else self._bias.to(dtype)


def _write_logits(found_CK: Tensor, logits_CB: Tensor, ids_CK: Tensor, ids: slice) -> None:
    """Write the logits of those ids of ``ids_CK`` that are in the range ``ids`` of this tile into ``found_CK``, in
    place; other elements do not change."""
    inside_CK, column_CK = _column(ids_CK, ids)
    found_CK.copy_(torch.where(inside_CK, logits_CB.gather(1, column_CK), found_CK))


def _scatter_add(grad_CB: Tensor, by_CK: Tensor, ids_CK: Tensor, ids: slice) -> None:
    """Add ``by_CK`` to the gradient ``grad_CB`` at those ids of ``ids_CK`` that are in the range ``ids`` of this
    tile."""
    inside_CK, column_CK = _column(ids_CK, ids)
    grad_CB.scatter_add_(1, column_CK, by_CK * inside_CK)


def _column(ids_CK: Tensor, ids: slice) -> tuple[Tensor, Tensor]:
    """Return whether each id of ``ids_CK`` is in the range ``ids``, and its column in the tile (any valid column if
    not)."""
    column_CK = ids_CK - ids.start
    inside_CK = (column_CK >= 0) & (column_CK < ids.stop - ids.start)
    return inside_CK, column_CK.clamp(0, ids.stop - ids.start - 1)


def _slices(total: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover ``range(total)`` in order."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
