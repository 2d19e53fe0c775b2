"""Computation of log π and entropy under a linear head without all logits at once: only one tile of them exists at a
time, forward and backward.

                 vocabulary ──▶
    tokens  │ tile │ tile │ tile │   each tile: logits = (h·Wᵀ + b) / temperature, which are discarded after they
       │    │ tile │ tile │ tile │   forward   updated a running log-sum-exp and entropy of their tokens
       ▼    │ tile │ tile │ tile │   backward  added to the gradients of h, W and b

The memory beside inputs and gradients does not grow with tokens × vocabulary; the price is computing the logits twice.
A token with a kept-set is renormalised over it: only its entries enter its log-sum-exp. Entropies are always those of
the whole distribution.

Online softmax: Milakov & Gimelshein, arXiv 1805.02867. Entropy: H = log s − d/s with s = Σ eᶻ⁻ᵐ, d = Σ eᶻ⁻ᵐ(z − m), and
∂H/∂z = −p (log p + H).

Shape legend: P tokens, C tokens of a tile, V vocabulary, B entries of a tile, D hidden size, E entries of all
kept-sets, K requested entries of each token beside the sampled one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.base.types.recorded import KeptSets
from headrace.learner.products import add_product, linear

TILES = {"cpu": (512, 2048)}
"""Size of a tile on a CPU, in tokens and vocabulary entries: small enough for the cache."""

LARGE_TILE = (2048, 16384)
"""Size of a tile on other devices: 128 MiB of logits in float32."""

Index = npt.NDArray[np.int64]


class KeptEntries:
    """The kept-sets of P tokens as tensors with one element for each entry, E in all. A token without entries was
    sampled from the whole vocabulary."""

    def __init__(self, kept: KeptSets, device: torch.device) -> None:
        """Take the entries of ``kept``, of P tokens, to ``device``."""
        self.sizes_P = torch.from_numpy(kept.sizes_T.astype(np.int64)).to(device)
        self.owners_E = torch.from_numpy(np.repeat(np.arange(len(kept)), kept.sizes_T)).to(device)
        self._ids_E = kept.ids_E.astype(np.int64)
        self._owners_E = np.repeat(np.arange(len(kept)), kept.sizes_T)
        self._ends_P = np.concatenate([[0], np.cumsum(kept.sizes_T)])

    def within(self, tokens: slice, entries: slice) -> tuple[Tensor, Tensor]:
        """Return the entries that lie in the tile of the ``tokens`` and the vocabulary ``entries``: their indices among
        all E, and their indices in the flattened tile."""
        first, last = self._ends_P[tokens.start], self._ends_P[tokens.stop]
        ids = self._ids_E[first:last]
        inside: Index = np.flatnonzero((ids >= entries.start) & (ids < entries.stop))
        rows = self._owners_E[first + inside] - tokens.start
        flat = rows * (entries.stop - entries.start) + ids[inside] - entries.start
        device = self.owners_E.device
        return torch.from_numpy(first + inside).to(device), torch.from_numpy(flat).to(device)

    def log_sum(self, logits_E: Tensor) -> Tensor:
        """Return the log-sum-exp over each token's entries, ``[P]``; −inf for a token without entries. ``logits_E`` are
        the logits of the entries."""
        if not len(logits_E):
            return logits_E.new_full(self.sizes_P.shape, -torch.inf)
        most_P = torch.segment_reduce(logits_E, "max", lengths=self.sizes_P)
        sums_P = torch.segment_reduce((logits_E - most_P[self.owners_E]).exp(), "sum", lengths=self.sizes_P, initial=0)
        return most_P + sums_P.log()

    def allowed(self, num_tokens: int, vocab_size: int) -> Tensor:
        """Return which entries each token may be, ``[P, V]`` bool, for a caller that has all logits: those of its
        kept-set, or all for a token without one."""
        whole_P = self.sizes_P == 0
        allowed_PV = whole_P[:, None].expand(num_tokens, vocab_size).contiguous()
        _, flat_E = self.within(slice(0, num_tokens), slice(0, vocab_size))
        allowed_PV.view(-1)[flat_E] = True
        return allowed_PV


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRequest:
    """The description of what :func:`linear_logprobs` computes for P tokens, and how."""

    ids_P: Tensor
    """Ids of the sampled tokens."""
    temperature: float
    """Temperature by which logits are divided."""
    kept: KeptEntries | None
    """The kept-sets from which the tokens were sampled; ``None`` for the whole vocabulary."""
    entropy_gradient: bool
    """Whether the entropies have a gradient."""
    keep_logits: bool
    """Whether the logits may stay in memory until the backward pass, so that it does not compute them again."""
    top_PK: Tensor | None = None
    """Ids of further entries of which log π is computed under the whole distribution; ``None`` for none."""

    def further_ids(self, tokens: slice) -> Tensor:
        """Return the ids ``[C, K]`` of the further entries of the tokens in the slice ``tokens``; K = 0 if there are
        none."""
        return self.ids_P[tokens, None][:, :0] if self.top_PK is None else self.top_PK[tokens]


def linear_logprobs(
    hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log π of ``request.ids_P`` and the entropies, ``[P]`` each and in nats, and log π of ``request.top_PK``,
    ``[P, K]`` with K = 0 for ``None``. All are in float32 or wider, with exact gradients.

    The head is ``hidden · weightᵀ + bias``, in the number format of its weights; sums are in float32 or better.
    """
    apply: Any = _LinearLogprobs.apply
    logprobs_P, entropy_P, top_PK = apply(hidden_PD, weight_VD, bias_V, request)
    return logprobs_P, entropy_P, top_PK


@dataclass(frozen=True, slots=True, kw_only=True)
class TopRequest:
    """A request for the likeliest entries of each distribution."""

    num: int
    """K, the number of entries."""
    below: int
    """Only ids below this one are returned; the distribution covers all ids."""


@torch.no_grad()
def linear_top(
    hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, request: TopRequest
) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities ``[P, K]`` of the likeliest entries under the head that :func:`linear_logprobs`
    defines, with logits divided by ``temperature``, the likeliest first."""
    head = _Head(hidden_PD, weight_VD, bias_V, temperature)
    found: list[tuple[Tensor, Tensor]] = []
    for tokens in head.tokens:
        best_CK = hidden_PD.new_empty(tokens.stop - tokens.start, 0, dtype=head.wide)
        ids_CK = best_CK.long()
        running = _RunningSums(hidden_PD.new_empty(len(best_CK), 1, dtype=head.wide))
        for entries in head.entries:
            logits_CB = head.logits(tokens, entries)
            running.add(logits_CB)
            logits_CB = logits_CB[:, : max(0, request.below - entries.start)]
            more_CK, places_CK = logits_CB.topk(min(request.num, logits_CB.shape[1]))
            best_CK, ids_CK = torch.cat([best_CK, more_CK], 1), torch.cat([ids_CK, places_CK + entries.start], 1)
            best_CK, kept_CK = best_CK.topk(min(request.num, best_CK.shape[1]))
            ids_CK = ids_CK.gather(1, kept_CK)
        found.append((ids_CK, best_CK - running.log_sum()[:, None]))
    nothing = hidden_PD.new_empty(0, request.num, dtype=head.wide)
    ids, logs = zip(*found, strict=True) if found else ((nothing.long(),), (nothing,))
    return torch.cat(ids), torch.cat(logs)


class _RunningSums:
    """The log-sum-exp and the entropy of some tokens, updated with one tile of logits after the other."""

    def __init__(self, like_CB: Tensor) -> None:
        """Begin sums over no logits, for as many tokens as ``like_CB`` has rows; only its shape, dtype and device are
        used."""
        self.most_C = like_CB.new_full(like_CB.shape[:1], -1e30)
        self.sum_C = torch.zeros_like(self.most_C)
        self.dot_C = torch.zeros_like(self.most_C)

    def add(self, logits_CB: Tensor) -> None:
        """Add a tile of logits [C, B] to the sums of exponentials and to those of the entropy, which are rescaled to
        the new largest logit."""
        most_C = torch.maximum(self.most_C, logits_CB.amax(1))
        lag_C = self.most_C - most_C
        shifted_CB = logits_CB - most_C[:, None]
        exp_CB = shifted_CB.exp()
        self.dot_C = (self.dot_C + self.sum_C * lag_C) * lag_C.exp()
        self.sum_C = self.sum_C * lag_C.exp() + exp_CB.sum(1)
        self.dot_C += exp_CB.mul_(shifted_CB).sum(1)
        self.most_C = most_C

    def log_sum(self) -> Tensor:
        """Return the log-sum-exp ``[C]`` of the logits so far."""
        return self.most_C + self.sum_C.log()

    def entropy(self) -> Tensor:
        """Return the entropy ``[C]``, in nats, of the softmax of the logits so far."""
        return self.sum_C.log() - self.dot_C / self.sum_C


class _Head:
    """A linear head that computes its logits tile by tile, for both passes. ``tokens`` and ``entries`` are the slices
    into which the tokens and the vocabulary are cut."""

    def __init__(self, hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> None:
        self.hidden_PD, self.weight_VD, self.bias_V = hidden_PD, weight_VD, bias_V
        self.temperature = temperature
        self.wide = torch.promote_types(hidden_PD.dtype, torch.float32)
        rows, columns = TILES.get(hidden_PD.device.type, LARGE_TILE)
        self.tokens = list(_slices(len(hidden_PD), rows))
        self.entries = list(_slices(len(weight_VD), columns))

    def logits(self, tokens: slice, entries: slice) -> Tensor:
        """Return the logits ``[C, B]`` of one tile, the rows of ``tokens`` and the vocabulary ``entries``, divided by
        the temperature, in float32 or wider."""
        bias = None if self.bias_V is None else self.bias_V[entries]
        logits_CB = linear(self.hidden_PD[tokens], self.weight_VD[entries], bias).to(self.wide)
        return logits_CB if self.temperature == 1.0 else logits_CB / self.temperature


class _LinearLogprobs(torch.autograd.Function):
    """The function behind :func:`linear_logprobs`, with its own backward pass. Torch would otherwise keep the logits of
    every tile for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, request: HeadRequest
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logprobs, entropy and the requested entries of each position, tile by tile, without all logits in
        memory at once."""
        head = _Head(hidden_PD, weight_VD, bias_V, request.temperature)
        top_PK = hidden_PD.new_empty(request.further_ids(slice(None)).shape, dtype=head.wide)
        picked_P, log_sum_P, entropy_P = hidden_PD.new_empty(3, len(hidden_PD), dtype=head.wide)
        logits_E = hidden_PD.new_empty(0 if request.kept is None else len(request.kept.owners_E), dtype=head.wide)
        tiles: dict[tuple[int, int], Tensor] = {}
        for tokens in head.tokens:
            running = _RunningSums(picked_P[tokens, None])
            for entries in head.entries:
                logits_CB = head.logits(tokens, entries)
                running.add(logits_CB)
                _write_logits(picked_P[tokens, None], logits_CB, request.ids_P[tokens, None], entries)
                _write_logits(top_PK[tokens], logits_CB, request.further_ids(tokens), entries)
                if request.kept is not None:
                    places, flat = request.kept.within(tokens, entries)
                    logits_E[places] = logits_CB.view(-1)[flat]
                if request.keep_logits:
                    tiles[tokens.start, entries.start] = logits_CB
            log_sum_P[tokens], entropy_P[tokens] = running.log_sum(), running.entropy()
        ctx.request, ctx.tiles = request, tiles
        if request.kept is None:
            logprobs_P, shares_E = picked_P - log_sum_P, None
        else:
            kept_sum_P = request.kept.log_sum(logits_E)
            shares_E = (logits_E - kept_sum_P[request.kept.owners_E]).exp()
            logprobs_P = picked_P - torch.where(request.kept.sizes_P > 0, kept_sum_P, log_sum_P)
        ctx.save_for_backward(hidden_PD, weight_VD, bias_V, log_sum_P, entropy_P, shares_E)
        if not request.entropy_gradient:
            ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P, top_PK - log_sum_P[:, None]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob_P: Tensor, grad_entropy_P: Tensor, grad_top_PK: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the hidden states, the weights and the bias, tile by tile; logits that were not kept
        are computed again."""
        hidden_PD, weight_VD, bias_V, log_sum_P, entropy_P, shares_E = ctx.saved_tensors
        request: HeadRequest = ctx.request
        head = _Head(hidden_PD, weight_VD, bias_V, request.temperature)
        slope = _LogitGradient(
            request, grad_logprob_P, grad_entropy_P if request.entropy_gradient else None, grad_top_PK, shares_E
        )
        sums = _GradientSums(head, ctx.needs_input_grad[:3])
        for entries in head.entries:
            for tokens in head.tokens:
                tile = ctx.tiles.pop((tokens.start, entries.start), None)
                logits_CB = head.logits(tokens, entries) if tile is None else tile
                log_p_CB = logits_CB - log_sum_P[tokens, None]
                sums.add(tokens, entries, slope(log_p_CB, entropy_P, tokens, entries))
            sums.close(entries)
        return *sums.gradients(), None


class _LogitGradient:
    """The gradient of the logits of one tile, for the backward pass of :class:`_LinearLogprobs`. It is a multiple of
    the softmax for every entry, plus a term for the sampled token, the requested entries and the kept-set."""

    def __init__(
        self,
        request: HeadRequest,
        grad_logprob_P: Tensor,
        grad_entropy_P: Tensor | None,
        grad_top_PK: Tensor,
        shares_E: Tensor | None,
    ) -> None:
        """Take the gradients of the three results. ``grad_entropy_P`` is ``None`` if entropies have no gradient;
        ``shares_E`` are the probabilities of the entries within their kept-sets, ``None`` without kept-sets."""
        self._request = request
        self._grad_logprob_P, self._grad_entropy_P, self._grad_top_PK = grad_logprob_P, grad_entropy_P, grad_top_PK
        self._softmax_factor_P = -grad_logprob_P
        if request.kept is not None:
            assert shares_E is not None
            self._softmax_factor_P = self._softmax_factor_P.masked_fill(request.kept.sizes_P > 0, 0.0)
            self._grad_kept_E = -grad_logprob_P[request.kept.owners_E] * shares_E
        self._softmax_factor_P = self._softmax_factor_P - grad_top_PK.sum(1)

    def __call__(self, log_p_CB: Tensor, entropy_P: Tensor, tokens: slice, entries: slice) -> Tensor:
        """Return the gradient ``[C, B]`` of the logits of the tile of ``tokens`` and ``entries``, before their division
        by the temperature. ``log_p_CB`` are its log-probabilities under the whole distribution, and ``entropy_P`` the
        entropies of all tokens."""
        grad_CB = log_p_CB.exp()
        softmax_factor_C = self._softmax_factor_P[tokens, None]
        if self._grad_entropy_P is None:
            grad_CB.mul_(softmax_factor_C)
        else:
            grad_CB.mul_(softmax_factor_C - self._grad_entropy_P[tokens, None] * (log_p_CB + entropy_P[tokens, None]))
        if self._request.kept is not None:
            places, flat = self._request.kept.within(tokens, entries)
            grad_CB.view(-1)[flat] += self._grad_kept_E[places]
        _scatter_add(grad_CB, self._grad_logprob_P[tokens, None], self._request.ids_P[tokens, None], entries)
        _scatter_add(grad_CB, self._grad_top_PK[tokens], self._request.further_ids(tokens), entries)
        return grad_CB if self._request.temperature == 1.0 else grad_CB.div_(self._request.temperature)


class _GradientSums:
    """The gradients of hidden states, weight and bias, summed in float32 or wider; that of the weight one block at a
    time."""

    def __init__(self, head: _Head, needed: tuple[bool, bool, bool]) -> None:
        """Begin sums of 0. ``needed`` says which of hidden states, weight and bias need a gradient."""
        self._head = head
        need_hidden, need_weight, need_bias = needed
        self._hidden = torch.zeros_like(head.hidden_PD, dtype=head.wide) if need_hidden else None
        self._weight = torch.zeros_like(head.weight_VD) if need_weight else None
        self._bias = (
            torch.zeros(len(head.weight_VD), dtype=head.wide, device=head.weight_VD.device) if need_bias else None
        )
        self._block: Tensor | None = None

    def add(self, tokens: slice, entries: slice, grad_CB: Tensor) -> None:
        """Add a tile's gradient of the logits [C, B] to those of the hidden states, the weights and the bias."""
        if self._bias is not None:
            self._bias[entries] += grad_CB.sum(0)
        narrow_CB = grad_CB.to(self._head.weight_VD.dtype)
        if self._hidden is not None:
            add_product(self._hidden[tokens], narrow_CB, self._head.weight_VD[entries])
        if self._weight is not None:
            if self._block is None:  # the gradient itself if its format is wide enough for sums
                block = self._weight[entries]
                self._block = (
                    block if block.dtype == self._head.wide else torch.zeros_like(block, dtype=self._head.wide)
                )
            add_product(self._block, narrow_CB.t(), self._head.hidden_PD[tokens])

    def close(self, entries: slice) -> None:
        """Finish the block of the vocabulary ``entries`` to which all tokens have added: its gradient is rounded to the
        dtype of the weight."""
        if self._weight is not None and self._block is not None and self._block.dtype != self._weight.dtype:
            self._weight[entries] = self._block.to(self._weight.dtype)
        self._block = None

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias in their own number formats; ``None`` for each that
        needs none."""
        dtype = self._head.weight_VD.dtype
        hidden = None if self._hidden is None else self._hidden.to(self._head.hidden_PD.dtype)
        return hidden, self._weight, None if self._bias is None else self._bias.to(dtype)


def _write_logits(found_CK: Tensor, logits_CB: Tensor, ids_CK: Tensor, entries: slice) -> None:
    """Write the logits of the ids ``ids_CK`` that are among the ``entries`` of this tile into ``found_CK``; its other
    elements stay as they are."""
    inside_CK, column_CK = _column(ids_CK, entries)
    found_CK.copy_(torch.where(inside_CK, logits_CB.gather(1, column_CK), found_CK))


def _scatter_add(grad_CB: Tensor, by_CK: Tensor, ids_CK: Tensor, entries: slice) -> None:
    """Add ``by_CK`` to the gradient ``grad_CB`` at the ids ``ids_CK`` that are among the ``entries`` of this tile."""
    inside_CK, column_CK = _column(ids_CK, entries)
    grad_CB.scatter_add_(1, column_CK, by_CK * inside_CK)


def _column(ids_CK: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Return whether each id is among ``entries``, and its column there (any column if it is not)."""
    column_CK = ids_CK - entries.start
    inside_CK = (column_CK >= 0) & (column_CK < entries.stop - entries.start)
    return inside_CK, column_CK.clamp(0, entries.stop - entries.start - 1)


def _slices(total: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` that cover ``range(total)`` in order."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
