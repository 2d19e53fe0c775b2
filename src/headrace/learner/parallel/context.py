"""Context parallelism: several ranks share the tokens of one micro-batch, and each attends to the keys and values of
all tokens.

    tokens   0 ──────────────────────────── M       divided into 2·C pieces; with C = 2 ranks, rank 0 computes
             └── 0 ──┴── 1 ──┴── 1 ──┴── 0 ──┘      pieces 0 and 3, rank 1 pieces 1 and 2: equal causal work

Outside attention, tokens do not depend on each other. In every layer, each rank gathers the keys and values of all
ranks (Llama 3, §3.3.2, "all-gather based"). In the backward pass, their gradients are summed, and each rank gets the
gradients of its own tokens.

Shape legend: M tokens of a micro-batch, N tokens on this rank (padded to the same number on every rank), C ranks, S
sequences of the micro-batch, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from headrace.base.errors import ModelError
from headrace.models.attention import Choose, ChosenTokens, Rule, attend_masked
from headrace.models.packed.flex import Compute, FlexMask
from headrace.models.packed.reach import Reach
from headrace.models.recurrent.base import Key, Recurrence, Tensors

Index = npt.NDArray[np.int64]

MASKED_ROWS = 2048
"""The most queries in a call with an explicit mask."""

# gate: getattr - torch 2.13 renamed these functions, and warns about the old names
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pieces:
    """The assignment of the ``num_tokens`` tokens of a micro-batch to ``num_ranks`` ranks, two pieces for each.

    >>> pieces = Pieces(7, 2)
    >>> pieces.get_indices(0).tolist(), pieces.get_indices(1).tolist()
    ([0, 1, 6], [2, 3, 4, 5])
    """

    def __init__(self, num_tokens: int, num_ranks: int) -> None:
        """Divide ``num_tokens`` tokens into two pieces for each of ``num_ranks`` ranks."""
        self.num_tokens = num_tokens
        self.num_ranks = num_ranks
        self._size = -(-num_tokens // (2 * num_ranks))
        """The number of tokens of each piece; the last pieces may be shorter."""

    @property
    def per_rank(self) -> int:
        """N, the number of tokens of each rank, including padding at the end."""
        return 2 * self._size

    def get_indices(self, rank: int) -> Index:
        """Return the indices in the micro-batch of the tokens that ``rank`` computes, ascending."""
        pieces = [self._piece(rank), self._piece(2 * self.num_ranks - 1 - rank)]
        return np.concatenate(pieces)

    def _piece(self, number: int) -> Index:
        """Return the indices of the tokens of piece ``number`` (0 to 2·C − 1); the last pieces may be shorter or
        empty."""
        first = min(number * self._size, self.num_tokens)
        return np.arange(first, min(first + self._size, self.num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive tokens of one sequence on this rank, whose attention is computed in one call."""

    rows: slice
    """The rows of these tokens on this rank."""
    first: int
    """The position of the first token of the run in its sequence."""
    start: int
    """The index in the micro-batch of the first token of the sequence."""

    @property
    def length(self) -> int:
        """Return the number of tokens of the run."""
        return int(self.rows.stop - self.rows.start)


class ContextPlan:
    """The plan of block-diagonal causal attention for one rank's tokens (see :class:`headrace.models.attention.Plan`).
    ``lengths_S`` is the number of tokens of each sequence of the micro-batch, and ``group`` the process group of the C
    ranks that share it."""

    def __init__(
        self,
        lengths_S: Index,
        pieces: Pieces,
        group: dist.ProcessGroup,
        device: torch.device,
        compute: Compute | None = None,
    ) -> None:
        """Compute the positions, runs and gathering order of this rank's tokens, as tensors on ``device``. ``pieces``
        assigns the tokens of the micro-batch to the ranks of ``group``. ``compute`` is the function for flex attention;
        ``None``: attention is one call for each run of tokens. The other arguments are described at the class."""
        self._group = group
        rank = dist.get_rank(group)
        indices_by_rank = [pieces.get_indices(other) for other in range(pieces.num_ranks)]
        starts_M = np.repeat(np.cumsum(lengths_S) - lengths_S, lengths_S)
        mine = indices_by_rank[rank]
        self._runs = _runs(mine, starts_M)
        """The runs of consecutive tokens of one sequence among this rank's tokens."""
        self._padding = pieces.per_rank - len(mine)
        """The number of padding tokens at the end of this rank's tokens, so that all ranks have as many."""
        positions = np.concatenate([mine - starts_M[mine], np.zeros(self._padding, np.int64)])
        self.positions_N = torch.from_numpy(positions).to(device)
        gathered_at_M = np.empty(pieces.num_tokens, np.int64)
        for other, theirs in enumerate(indices_by_rank):
            gathered_at_M[theirs] = other * pieces.per_rank + np.arange(len(theirs))
        self._gathered_at_M = torch.from_numpy(gathered_at_M).to(device)
        """The index of each token of the micro-batch among the tokens that are gathered from all ranks."""
        self._flex: FlexMask | None = None
        """The mask of flex attention; ``None`` if attention is computed run by run."""
        if compute is not None:
            whole = Reach.from_lengths(lengths_S)
            self._flex = FlexMask(whole.take(mine, self._padding), whole, device, compute)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Return the attention ``[N, H, D]`` of this rank's tokens over the keys and values of all ranks, with the mask
        that ``rule`` describes; zeros for the padding. Called by the model's attention layers."""
        if self._flex is not None:
            return self._flex.attend(query_NHD, self._gather(key_NKD), self._gather(value_NKD), rule)
        key, value = (self._gather(tensor).transpose(0, 1)[None] for tensor in (key_NKD, value_NKD))
        query = query_NHD.transpose(0, 1)[None]
        # a run that needs a mask is computed in blocks, to limit the memory of the mask
        blocks = [block for run in self._runs for block in _blocks(run, rule)]
        parts = [self._attend(query, key, value, block, rule) for block in blocks]
        parts.append(query_NHD.new_zeros(self._padding, query_NHD.shape[1], value_NKD.shape[2]))
        return torch.cat(parts)

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Raise :class:`~headrace.base.errors.ModelError`: recurrent layers cannot be computed with context
        parallelism."""
        raise ModelError(
            f"layer {key[0]} is recurrent: its state cannot be handed from rank to rank",
            remedy="set learner.parallel.context = 1",
        )

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Raise :class:`~headrace.base.errors.ModelError`: layers with an indexer cannot be computed with context
        parallelism."""
        raise ModelError(
            f"layer {layer} attends to chosen tokens: the keys of its indexer are not gathered from other ranks",
            remedy="set learner.parallel.context = 1",
        )

    def _gather(self, tensor_NKD: Tensor) -> Tensor:
        """Return the keys or values of all tokens of the micro-batch, in their order, ``[M, K, D]``. ``tensor_NKD`` are
        the keys or values of this rank's tokens."""
        return gather(tensor_NKD, self._group).index_select(0, self._gathered_at_M)

    @staticmethod
    def _attend(query: Tensor, key: Tensor, value: Tensor, run: _Run, rule: Rule) -> Tensor:
        """Return the attention ``[length, H, D]`` of the tokens of one run over the keys that the rule allows.
        ``query`` is ``[1, H, N, D]``; ``key`` and ``value`` are ``[1, K, M, D]``."""
        end = run.first + run.length
        begin = max(0, run.first + 1 - (rule.window or end), run.first // rule.chunk * rule.chunk if rule.chunk else 0)
        keys = slice(run.start + begin, run.start + end)
        query, key, value = query[:, :, run.rows], key[:, :, keys], value[:, :, keys]
        mask: Any = None
        if _masked(run, rule):
            rows = torch.arange(run.first, end, device=query.device)
            mask = rule.sees(rows, torch.arange(begin, end, device=query.device))
        elif run.first:
            mask = causal_lower_right(run.length, end)
        return attend_masked(query, key, value, mask, rule)[0].transpose(0, 1)


def _masked(run: _Run, rule: Rule) -> bool:
    """Return whether the attention of the run needs an explicit mask, because ``rule`` is not plain causal attention
    for its positions."""
    return not rule.plain or rule.limits(run.first + run.length)


def _blocks(run: _Run, rule: Rule) -> list[_Run]:
    """Divide a run whose attention needs a mask into blocks of at most ``MASKED_ROWS`` rows, to limit the memory of the
    mask. Other runs stay whole."""
    if not _masked(run, rule):
        return [run]
    return [
        _Run(
            rows=slice(run.rows.start + skip, min(run.rows.start + skip + MASKED_ROWS, run.rows.stop)),
            first=run.first + skip,
            start=run.start,
        )
        for skip in range(0, run.length, MASKED_ROWS)
    ]


def _runs(indices: Index, starts_M: Index) -> list[_Run]:
    """Return the runs of consecutive tokens of one sequence among this rank's tokens, whose indices in the micro-batch
    are ``indices``. ``starts_M`` is the index at which the sequence of each token begins."""
    breaks = np.flatnonzero((np.diff(indices) != 1) | (np.diff(starts_M[indices]) != 0)) + 1
    edges = [0, *breaks.tolist(), len(indices)] if len(indices) else []
    return [
        _Run(
            rows=slice(begin, end),
            first=int(indices[begin] - starts_M[indices[begin]]),
            start=int(starts_M[indices[begin]]),
        )
        for begin, end in pairwise(edges)
    ]


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first axis. It is for ranks with different losses: the
    backward pass sums the gradients of all ranks."""
    apply: Any = _Gather.apply
    gathered: Tensor = apply(tensor.contiguous(), group)
    return gathered


def gather_shared(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first axis. It is for ranks that compute the same loss
    from the result: the backward pass returns to each rank the gradient of its part, without communication."""
    apply: Any = _GatherShared.apply
    gathered: Tensor = apply(tensor.contiguous(), group)
    return gathered


class _Gather(torch.autograd.Function):
    """The autograd function of :func:`gather`: an all-gather whose backward pass is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the tensors of all ranks of ``group``, concatenated along the first axis."""
        ctx.group = group
        return _all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of all ranks, and return this rank's part."""
        (gradient,) = gradients
        size = dist.get_world_size(ctx.group)
        mine = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        _REDUCE_SCATTER(mine, gradient.contiguous(), group=ctx.group)
        return mine, None


class _GatherShared(_Gather):
    """The autograd function of :func:`gather_shared`: an all-gather whose backward pass does not communicate."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return this rank's part of the gradient, which is the same on all ranks."""
        (gradient,) = gradients
        return gradient.tensor_split(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of ``group``, which must have the same shape, concatenated along the first axis;
    without gradient."""
    out = tensor.new_empty(tensor.shape[0] * dist.get_world_size(group), *tensor.shape[1:])
    _ALL_GATHER(out, tensor, group=group)
    return out
