"""One micro-batch over several ranks: each computes some of its tokens, and attends to the keys and values of all.

    tokens   0 ──────────────────────────── M       cut into 2·C pieces; of C = 2 ranks the first computes
             └── 0 ──┴── 1 ──┴── 1 ──┴── 0 ──┘      pieces 0 and 3, the second 1 and 2: equal work under causality

Outside attention, tokens do not depend on each other. In every layer each rank gathers the keys and values of all ranks
(Llama 3, §3.3.2, "all-gather based"); in the backward pass their gradients are summed and returned to the ranks that
computed the tokens.

Shape legend: M tokens of a micro-batch, L tokens of it on this rank (the same number on every rank, padded), C ranks,
P tokens that carry loss and are computed here, H query heads, K key-value heads, D head size.
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
from headrace.models.recurrent.base import Key, Recurrence, Tensors

Index = npt.NDArray[np.int64]

MASKED_ROWS = 2048
"""Greatest number of queries in one call that needs an explicit mask."""

# gate: getattr - torch 2.13 renamed them and warns of the old names
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pieces:
    """The assignment of the tokens of a micro-batch to ``num_ranks`` ranks.

    >>> pieces = Pieces(7, 2)
    >>> pieces.of(0).tolist(), pieces.of(1).tolist()
    ([0, 1, 6], [2, 3, 4, 5])
    """

    def __init__(self, num_tokens: int, num_ranks: int) -> None:
        self.num_tokens = num_tokens
        self.num_ranks = num_ranks
        self._size = -(-num_tokens // (2 * num_ranks))

    @property
    def per_rank(self) -> int:
        """L, the number of positions of each rank; the last of them may hold no token."""
        return 2 * self._size

    def of(self, rank: int) -> Index:
        """Return the indices in the micro-batch of the tokens that ``rank`` computes, ascending."""
        both = [self._piece(rank), self._piece(2 * self.num_ranks - 1 - rank)]
        return np.concatenate(both)

    def _piece(self, number: int) -> Index:
        first = min(number * self._size, self.num_tokens)
        return np.arange(first, min(first + self._size, self.num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive tokens of one sequence that are computed on this rank."""

    rows: slice
    """The rows of these tokens on this rank."""
    first: int
    """Position of the first token in its sequence."""
    start: int
    """Index of the first token of the sequence in the micro-batch."""

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)


class ContextPlan:
    """Block-diagonal causal attention of one rank's tokens (see :class:`headrace.models.attention.Plan`)."""

    def __init__(self, lengths_K: Index, pieces: Pieces, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        rank = dist.get_rank(group)
        places = [pieces.of(other) for other in range(pieces.num_ranks)]
        starts_M = np.repeat(np.cumsum(lengths_K) - lengths_K, lengths_K)
        mine = places[rank]
        self._runs = _runs(mine, starts_M)
        self._padding = pieces.per_rank - len(mine)
        positions = np.concatenate([mine - starts_M[mine], np.zeros(self._padding, np.int64)])
        self.positions_N = torch.from_numpy(positions).to(device)
        found_M = np.empty(pieces.num_tokens, np.int64)
        for other, theirs in enumerate(places):
            found_M[theirs] = other * pieces.per_rank + np.arange(len(theirs))
        self._found_M = torch.from_numpy(found_M).to(device)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention of this rank's tokens over the keys and values that all ranks hold."""
        key, value = (self._gather(tensor).transpose(0, 1)[None] for tensor in (key_NKD, value_NKD))
        query = query_NHD.transpose(0, 1)[None]
        parts = [self._attend(query, key, value, run, rule) for whole in self._runs for run in _blocks(whole, rule)]
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
        return gather(tensor_NKD, self._group).index_select(0, self._found_M)

    @staticmethod
    def _attend(query: Tensor, key: Tensor, value: Tensor, run: _Run, rule: Rule) -> Tensor:
        """Return the attention of one run of rows over the keys that they may see."""
        end = run.first + run.length
        begin = max(0, run.first + 1 - (rule.window or end), run.first // rule.chunk * rule.chunk if rule.chunk else 0)
        seen = slice(run.start + begin, run.start + end)
        query, key, value = query[:, :, run.rows], key[:, :, seen], value[:, :, seen]
        mask: Any = None
        if _masked(run, rule):
            rows = torch.arange(run.first, end, device=query.device)
            mask = rule.sees(rows, torch.arange(begin, end, device=query.device))
        elif run.first:
            mask = causal_lower_right(run.length, end)
        return attend_masked(query, key, value, mask, rule)[0].transpose(0, 1)


def _masked(run: _Run, rule: Rule) -> bool:
    """Return whether the run needs an explicit mask."""
    return not rule.plain or rule.limits(run.first + run.length)


def _blocks(run: _Run, rule: Rule) -> list[_Run]:
    """Divide a run whose attention needs a mask into blocks of at most ``MASKED_ROWS`` rows, to bound the mask's
    memory."""
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


def _runs(mine: Index, starts_M: Index) -> list[_Run]:
    """Return the runs of consecutive tokens of one sequence among this rank's tokens. ``starts_M`` holds the place at
    which the sequence of each token begins."""
    breaks = np.flatnonzero((np.diff(mine) != 1) | (np.diff(starts_M[mine]) != 0)) + 1
    edges = [0, *breaks.tolist(), len(mine)] if len(mine) else []
    return [
        _Run(rows=slice(begin, end), first=int(mine[begin] - starts_M[mine[begin]]), start=int(starts_M[mine[begin]]))
        for begin, end in pairwise(edges)
    ]


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first axis, for ranks with different losses: the backward
    pass sums the gradients of all ranks."""
    apply: Any = _Gather.apply
    gathered: Tensor = apply(tensor.contiguous(), group)
    return gathered


def gather_shared(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first axis, for ranks that compute the same loss from
    them: the backward pass gives each rank the gradient of its part."""
    apply: Any = _GatherShared.apply
    gathered: Tensor = apply(tensor.contiguous(), group)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of all ranks, and return this rank's part."""
        (gradient,) = gradients
        size = dist.get_world_size(ctx.group)
        mine = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        _REDUCE_SCATTER(mine, gradient.contiguous(), group=ctx.group)
        return mine, None


class _GatherShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient.tensor_split(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def _all(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = tensor.new_empty(tensor.shape[0] * dist.get_world_size(group), *tensor.shape[1:])
    _ALL_GATHER(out, tensor, group=group)
    return out
