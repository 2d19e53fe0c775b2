"""Attention of a packed pass with torch's flex attention (Dong et al. 2024), which does not store scores in memory.

    sequences ──▶ which token attends to which (reach.py) ──▶ tables of blocks ──▶ one call over the flat pass
                  soft cap ──▶ a function of each score                       └── fused on a GPU: blocks of scores exist
                  sinks ◀── log-sum-exp of the scores ◀─────────────────────      only on the chip

No sequence is padded or copied, and tokens that several sequences share are computed once, as queries and as keys. An
attention sink takes part in the softmax and has no value: with the log-sum-exp L of a row's scores and a sink s, the
output without the sink is multiplied by exp(L) / (exp(L) + exp(s)) = sigmoid(L − s).

On a CPU, torch's fused kernels have no backward pass and no log-sum-exp. There the same functions are applied to scores
in memory: this tests what a GPU computes, but saves no memory.

Shape legend: N tokens of the pass, Q queries, M keys, H query heads, K key-value heads, D head size, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from headrace.models.attention import Choose, ChosenTokens, PackedPlan, Rule
from headrace.models.packed.reach import BLOCK, BlockTables, Queries, Reach
from headrace.models.recurrent.base import Key, Recurrence, Tensors

MOST_VARIANTS = 64
"""The largest number of kernels that are compiled in one process. There is one kernel for each combination of head
sizes, number of heads, dtype, soft cap, sinks, and whether there are gradients."""

ScoreFunction = Callable[..., Tensor]
"""A function of a score, its batch index, head, query and key, as flex attention calls it."""


class Compute(Protocol):
    """The interface of a function that computes flex attention."""

    def __call__(
        self, qkv: Tensors, score: ScoreFunction, mask: BlockMask, *, scale: float, with_sums: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention ``[1, H, Q, D]`` of the queries ``[1, H, Q, D]`` over the keys and values ``[1, K, M,
        D]`` in ``qkv``. With ``with_sums``, also return the log-sum-exp of the scores of each query, ``[1, H, Q]`` in
        float32; otherwise ``None``. Scores are multiplied by ``scale`` before ``score`` changes them."""
        ...


def fused(
    qkv: Tensors, score: ScoreFunction, mask: BlockMask, *, scale: float, with_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute flex attention with the kernels that torch compiles for it; see :class:`Compute` for the arguments. If a
    kernel cannot be compiled, an error is raised: the scores are never stored in memory instead."""
    with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):  # beyond it torch raises an error
        found: Any = _compiled()(
            *qkv,
            score_mod=score,
            block_mask=mask,
            scale=scale,
            enable_gqa=qkv[0].shape[1] != qkv[1].shape[1],
            # torch's other kernels have no gradient of the log-sum-exp, or are made for a single query
            kernel_options={"BACKEND": "TRITON"},
            return_aux=AuxRequest(lse=True) if with_sums else None,
        )
    return (found[0], found[1].lse) if with_sums else (found, None)


def written_out(
    qkv: Tensors, score: ScoreFunction, mask: BlockMask, *, scale: float, with_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute flex attention as torch defines it, with all scores in memory; see :class:`Compute` for the arguments.
    The gradients are computed by torch's formulas for the kernels."""
    given = {"BACKEND": "TRITON", "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    out, sums, _ = torch.ops.higher_order.flex_attention(*qkv, score, mask.as_tuple(), scale, given)
    return out, sums * math.log(2.0) if with_sums else None


@cache
def _compiled() -> Callable[..., Any]:
    """Return torch's compiled flex attention, for passes of any length."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


class FlexMask:
    """The attention of some queries to some keys of packed sequences, under the rules of any layer."""

    def __init__(self, queries: Reach, keys: Reach, device: torch.device | str, compute: Compute) -> None:
        """Prepare the attention of tokens with the reach ``queries`` to tokens with the reach ``keys`` of the same
        sequences, on ``device``. ``compute`` is the function that computes flex attention."""
        self._queries, self._keys, self._device, self._compute = queries, keys, torch.device(device), compute
        self._number_Q, self._number_M, self._end_M, self._place_M = (
            self._upload(each) for each in (queries.number_N, keys.number_N, keys.end_N, keys.place_N)
        )
        """The numbers of the reach of queries and keys as tensors on the device (see :class:`Reach`)."""
        self._masks: dict[tuple[int | None, int | None], BlockMask] = {}
        """The masks that layers have used so far, by window and chunk size."""

    def attend(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, rule: Rule) -> Tensor:
        """Return the attention ``[Q, H, D]`` of one layer under its ``rule``, with the head size of the values; zeros
        for a query that attends to no key."""
        qkv = tuple(each.transpose(0, 1)[None] for each in (query_QHD, key_MKD, value_MKD))
        score = (
            _unchanged_score
            if rule.softcap is None
            else _cap_function(_scalar(rule.softcap, qkv[0].dtype, qkv[0].device))
        )
        with_sums = rule.sinks_H is not None
        out, sums_1HQ = self._compute(qkv, score, self._mask(rule), scale=rule.scale, with_sums=with_sums)
        if rule.sinks_H is not None and sums_1HQ is not None:
            share_1HQ = torch.sigmoid(sums_1HQ - rule.sinks_H.to(sums_1HQ.dtype)[:, None])
            out = (out * share_1HQ[..., None]).to(out.dtype)
        return out[0].transpose(0, 1)

    def _mask(self, rule: Rule) -> BlockMask:
        """Return the mask of a layer with this rule. Masks are cached, since layers of one kind have the same mask."""
        key = rule.window, rule.chunk
        if key not in self._masks:
            self._masks[key] = self._make_mask(self._queries.first(*key))
        return self._masks[key]

    def _make_mask(self, first_Q: np.ndarray[Any, Any]) -> BlockMask:
        """Return the mask of queries that attend to no position before ``first_Q``. Its tables are computed on the
        host, so that the host does not wait for the device."""
        tables = BlockTables.create(Queries(number_Q=self._queries.number_N, first_Q=first_Q), self._keys)
        some, every = (_ordered(table) for table in (tables.some_IJ, tables.all_IJ))
        seen = _mask_function(self._number_Q, self._upload(first_Q), self._number_M, self._end_M, self._place_M)
        lengths = len(self._number_Q), len(self._number_M)
        mask = BlockMask.from_kv_blocks(*some, *every, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=lengths)
        return mask.to(self._device)

    def _upload(self, numbers: np.ndarray[Any, Any]) -> Tensor:
        """Return integers as a tensor of 32-bit integers on the device."""
        return torch.from_numpy(numbers.astype(np.int32)).to(self._device)


def _ordered(table_IJ: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Return a table of blocks in the format of flex attention: for each block of queries, the number of its blocks of
    keys, and the indices of these blocks in ascending order, followed by all other indices."""
    counts, indices = table_IJ.sum(1), np.argsort(~table_IJ, axis=1, kind="stable")
    return torch.from_numpy(counts.astype(np.int32))[None, None], torch.from_numpy(indices.astype(np.int32))[None, None]


def _mask_function(
    number_Q: Tensor, first_Q: Tensor, number_M: Tensor, end_M: Tensor, place_M: Tensor
) -> Callable[..., Tensor]:
    """Return the function that computes whether a query attends to a key, from the numbers of both (see reach.py)."""

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return whether the query ``q`` attends to the key ``k``."""
        number = number_Q[q]
        return (number_M[k] <= number) & (number < end_M[k]) & (place_M[k] >= first_Q[q])

    return seen


def _unchanged_score(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the score unchanged."""
    return score


def _cap_function(cap: Tensor) -> ScoreFunction:
    """Return the function that limits a score to ±``cap``. The cap is a tensor, since torch would convert a Python
    number to 64 bits and compute with 64 bits."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the score limited to ±``cap``."""
        return torch.tanh(score / cap) * cap

    return capped


@cache
def _scalar(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor on the device, in the dtype in which scores of ``dtype`` are computed."""
    return torch.tensor(number, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)


class FlexPlan:
    """Block-diagonal causal attention of a packed pass by flex attention; it implements
    :class:`~headrace.models.attention.Plan`. It computes the same as
    :class:`~headrace.models.attention.PackedPlan`, to which it leaves recurrences and layers with an indexer."""

    def __init__(
        self,
        lengths_S: Sequence[int] | np.ndarray[Any, Any],
        device: torch.device | str = "cpu",
        rows_T: Sequence[int] | np.ndarray[Any, Any] | None = None,
        *,
        compute: Compute = fused,
    ) -> None:
        """Arrange sequences of ``lengths_S`` tokens, with index tensors on ``device``. ``rows_T`` is the index in the
        pass of each token of each sequence, so that sequences can share their first tokens; ``None`` if the sequences
        are concatenated. ``compute`` is the function that computes flex attention."""
        self._layout = lengths_S, device, rows_T
        """The arguments with which a :class:`PackedPlan` of the same sequences is made."""
        reach = Reach.from_lengths(lengths_S, rows_T)
        self.positions_N = torch.from_numpy(reach.place_N).to(device)
        self._flex = FlexMask(reach, reach, device, compute)
        """The attention of the tokens of the pass to each other."""

    @cached_property
    def _padded(self) -> PackedPlan:
        """Return the plan of the same sequences in padded rows."""
        return PackedPlan(*self._layout)

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention of all sequences of the pass under one layer's ``rule``; a token attends only to its
        own sequence. A pass of one token is computed in padded rows, since it would need another compiled kernel."""
        if rule.choice is not None or len(self.positions_N) < 2:
            return self._padded.attend(query_NHD, key_NKD, value_NKD, rule)
        return self._flex.attend(query_NHD, key_NKD, value_NKD, rule)

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Return the tokens that the indexer of a layer chooses for each token, among the earlier tokens of its
        sequence."""
        return self._padded.choose(layer, choose, inputs_N)

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence from the beginning of each sequence, and return its outputs ``[N, ...]``."""
        return self._padded.recur(key, recurrence, inputs_N)
