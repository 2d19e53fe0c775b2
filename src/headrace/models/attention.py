"""The attention of engine and learner: one function in transformers' own interface, and plans of who sees whom.

A forward pass runs over flattened tokens: ``[1, N]``, with no padding outside attention. Which tokens belong together
is not in the shape but in the *plan* that travels to every layer. :class:`PackedPlan` (here) attends within whole
sequences, with gradients; :class:`~headrace.models.paged.base.PagedPlan` attends over a key-value cache.

Shape legend: N tokens of the pass, T tokens of all sequences (N, unless some share rows), S sequences, B sequences of
one bucket, L padded length of a bucket, H query heads, K key-value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from headrace.base.errors import ModelError

NAME = "headrace"
"""The attention implementation's name in transformers."""

PLAN = "headrace_plan"
"""The keyword under which a plan travels through ``model(**kwargs)``."""

MAX_WASTE = 0.75
"""A sequence shares a bucket with a longer one if it fills at least this much of a row."""

ROW_STEP = 16
"""Or if it falls short of the longer one by no more tokens than this."""

_UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one layer attends, apart from who sees whom."""

    layer: int
    scale: float
    """What scores are multiplied by."""
    window: int | None = None
    """A token sees itself and the ``window - 1`` tokens before it; ``None`` for all before it."""
    softcap: float | None = None
    """Scores are squashed to ±softcap by tanh."""
    sinks_H: Tensor | None = None
    """A learned score per head that takes part in the softmax and has no value."""

    @property
    def plain(self) -> bool:
        """Whether fused kernels know it."""
        return self.softcap is None and self.sinks_H is None


class Plan(Protocol):
    """Says who sees whom in one forward pass."""

    positions_N: Tensor
    """Position of each token in its sequence; int64."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """The attention of one layer: ``[N, H, D]``."""
        ...


def forward(model: nn.Module, ids_N: Tensor, plan: Plan, keep_K: Tensor | None = None) -> Tensor:
    """Logits ``[N, V]`` of flattened tokens, or ``[len(keep_K), V]`` of the places named in ``keep_K``."""
    keep: dict[str, Any] = {} if keep_K is None else {"logits_to_keep": keep_K}
    output = model(
        input_ids=ids_N[None], position_ids=plan.positions_N[None], use_cache=False, **{PLAN: plan}, **keep
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: ``[1, heads, N, D]`` in, ``[1, N, H, D]`` out.

    Dropout is ignored on purpose: log π must be a function of the weights.
    """
    plan: Plan | None = kwargs.get(PLAN)
    if plan is None:
        raise ModelError(
            f"{type(module).__name__} was called without a plan",
            remedy="call headrace.models.attention.forward(model, ids_N, plan), "
            "or model.set_attn_implementation('sdpa') to use the model on its own",
        )
    unknown = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unknown or attention_mask is not None or kwargs.get("is_causal") is False:
        raise ModelError(
            f"{type(module).__name__} wants attention with {', '.join(unknown) or 'a mask that is not causal'}",
            remedy="use a decoder whose attention is causal, optionally with a sliding window, soft cap or sinks",
        )
    scale = kwargs.get("scaling")
    rule = Rule(
        layer=module.layer_idx,  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
    )
    return plan.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), rule)[None], None


AttentionInterface.register(NAME, attention)  # no mask function: transformers then builds no mask at all


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Sequences of about one length, as rows padded on the right."""

    num_rows: int
    length: int
    gather_BL: Tensor | None
    """Flat places of the rows' tokens; padding repeats the first. ``None`` where the bucket is all tokens, in order."""


class PackedPlan:
    """Block-diagonal causal attention: sequence after sequence in one flat pass, each sees only itself.

    Inside attention, sequences of about one length become the rows of one call. Padding is on the right, where
    causality hides it, so no mask is needed; it wastes at most a quarter of a row, or :data:`ROW_STEP` places of it.

    Sequences that begin alike may share the rows of their beginning: everything outside attention computes these once,
    and inside they stand in every one's row. The gradients of shared rows are the sums over the sequences.

    >>> PackedPlan([2, 3]).positions_N.tolist()
    [0, 1, 0, 1, 2]
    >>> PackedPlan([3, 4], rows_T=[0, 1, 2, 0, 1, 3, 4]).positions_N.tolist()  # the first two tokens are shared
    [0, 1, 2, 2, 3]
    """

    def __init__(
        self,
        lengths_S: Sequence[int] | np.ndarray[Any, Any],
        device: torch.device | str = "cpu",
        rows_T: Sequence[int] | np.ndarray[Any, Any] | None = None,
    ) -> None:
        """``rows_T``: the flat place in the pass of each token of each sequence; ``None`` for one after the other."""
        lengths = np.asarray(lengths_S, np.int64)
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(int(lengths.sum())) if rows_T is None else np.asarray(rows_T, np.int64)
        total = int(rows.max()) + 1 if len(rows) else 0
        positions_N, place_N = np.empty(total, np.int64), np.empty(total, np.int64)
        positions_N[rows] = np.arange(len(rows)) - np.repeat(starts, lengths)
        self.positions_N = torch.from_numpy(positions_N).to(device)
        self._buckets: list[_Bucket] = []
        filled = 0
        for members in cut(lengths):
            length = int(lengths[members[0]])
            column = np.arange(length)
            inside = column[None] < lengths[members, None]
            gather = rows[starts[members, None] + np.where(inside, column[None], 0)]
            place_N[gather[inside]] = filled + np.flatnonzero(inside)  # of a shared row, any of its equal outputs
            filled += gather.size
            in_order = gather.size == total and bool((gather.ravel() == np.arange(total)).all())
            flat = None if in_order else torch.from_numpy(gather.ravel()).to(device)
            self._buckets.append(_Bucket(num_rows=len(members), length=length, gather_BL=flat))
        whole = len(self._buckets) == 1 and self._buckets[0].gather_BL is None
        self._place_N = None if whole else torch.from_numpy(place_N).to(device)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        outputs = [self._attend(bucket, (query_NHD, key_NKD, value_NKD), rule) for bucket in self._buckets]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self._place_N is None else joined.index_select(0, self._place_N)

    def _attend(self, bucket: _Bucket, tensors: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Tensor:
        query, key, value = (_rows(tensor, bucket) for tensor in tensors)
        windowed = rule.window is not None and rule.window < bucket.length
        mask = self._mask(bucket.length, rule, query.device) if windowed or not rule.plain else None
        out_BHLD = attend_masked(query, key, value, mask, rule)
        return out_BHLD.transpose(1, 2).flatten(0, 1)

    def _mask(self, length: int, rule: Rule, device: torch.device) -> Tensor:
        window = rule.window or length
        if (length, window) not in self._masks:
            see = torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)
            self._masks[length, window] = see
        return self._masks[length, window]


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attention ``[B, H, Lq, D]`` over ``[B, K, Lk, D]``; ``mask`` is true where a query sees a key, or is added to
    the scores; without one it is causal.
    """
    if rule.plain:
        return F.scaled_dot_product_attention(
            query, key, value, mask, scale=rule.scale, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
    assert mask is not None
    grouped = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights[..., : key.shape[2]], value[:, :, None]).flatten(1, 2)


def _rows(tensor_NHD: Tensor, bucket: _Bucket) -> Tensor:
    """The bucket's rows: ``[B, heads, L, D]``."""
    flat = tensor_NHD if bucket.gather_BL is None else tensor_NHD.index_select(0, bucket.gather_BL)
    return flat.reshape(bucket.num_rows, bucket.length, *tensor_NHD.shape[1:]).transpose(1, 2)


def cut(lengths_S: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Indices of the sequences of each bucket, the longest first; empty sequences are in none.

    >>> [bucket.tolist() for bucket in cut(np.array([100, 20, 90, 10]))]
    [[0, 2], [1, 3]]
    """
    order = np.argsort(-lengths_S, kind="stable")
    order = order[lengths_S[order] > 0]
    buckets: list[np.ndarray[Any, Any]] = []
    while len(order):
        longest = int(lengths_S[order[0]])
        least = min(MAX_WASTE * longest, longest - ROW_STEP)
        fits = int((lengths_S[order] >= least).sum())
        buckets.append(order[:fits])
        order = order[fits:]
    return buckets
