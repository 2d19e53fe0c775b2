"""The attention of engine and learner: one function with transformers' attention interface, and the plans it follows.

A forward pass runs over flattened tokens: ``[1, N]``, with no padding outside attention. The shape does not say which
tokens belong together: a *plan*, which is passed to every layer, does. :class:`PackedPlan` (here) attends within whole
sequences, with gradients; :class:`~headrace.models.paged.plan.PagedPlan` attends over a key-value cache.

Shape legend: N tokens of the pass, T tokens of all sequences (N, or more if sequences share tokens), S sequences,
B sequences of one bucket, L padded length of a bucket, H query heads, K key-value heads, D head size, V vocabulary.
"""

# gate: getattr - attention modules of transformers differ from family to family

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from headrace.base.errors import ModelError
from headrace.models.padding import PaddedSlots

if TYPE_CHECKING:
    from headrace.models.recurrent.base import Key, Recurrence, Tensors

NAME = "headrace"
"""The name of the attention implementation in transformers."""

PLAN = "headrace_plan"
"""The keyword under which a plan travels through ``model(**kwargs)``."""

MIN_FILL = 0.75
"""The least length, as a fraction of the longest sequence of a bucket, that a sequence of the bucket may have."""

ROW_STEP = 16
"""The largest number of tokens by which a shorter sequence may also fall short of the longest one of its bucket."""

NO_MASK = torch.zeros(1, 1, 1, 1)
"""The mask that is handed to attention modules that need one: it says nothing, since the plan does."""

_UNSUPPORTED = ("position_bias", "block_indices", "sinks")


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens that an indexer, the part of a sparse attention layer that selects what is attended to, has chosen for
    each token of a pass."""

    masks: tuple[Tensor, ...]
    """A mask ``[B, L, C]`` for each bucket of the plan that made it, where C counts the positions of a sequence."""


Choose = Callable[[tuple[Tensor, ...], Tensor, object], Tensor]
"""A function ``choose(inputs_BL, seen_BLC, cache)`` that returns the mask ``[B, L, C]`` of what an indexer chooses of
the tokens that are seen; ``cache`` replaces the keys of the pass by those of whole sequences (:mod:`.indexed`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The parameters of one layer's attention, beyond the plan of which token attends to which."""

    layer: int
    """The index of the layer in the model."""
    scale: float
    """The factor that scores are multiplied by."""
    window: int | None = None
    """The number of tokens that a token attends to, itself included: the last ``window`` ones; ``None`` for all
    before it."""
    chunk: int | None = None
    """The number of tokens of a chunk, counted from position 0: a token attends to its own chunk only; ``None`` for
    no chunks."""
    softcap: float | None = None
    """The soft cap: scores are limited to ±softcap by tanh; ``None`` for no cap."""
    sinks_H: Tensor | None = None
    """A learned score per head that takes part in the softmax and has no value; ``None`` for none."""
    choice: ChosenTokens | None = None
    """The tokens that an indexer has chosen; ``None`` for all."""

    @property
    def plain(self) -> bool:
        """Return whether fused attention kernels can compute it: there is neither a soft cap nor sinks."""
        return self.softcap is None and self.sinks_H is None

    def sees(self, from_Q: Tensor, to_K: Tensor) -> Tensor:
        """Return which of the positions ``to_K`` are seen from each of the positions ``from_Q`` of the same sequence:
        ``[Q, K]`` bool."""
        seen_QK = to_K <= from_Q[:, None]
        if self.window is not None:
            seen_QK &= to_K > from_Q[:, None] - self.window
        if self.chunk is not None:
            seen_QK &= to_K >= from_Q[:, None] // self.chunk * self.chunk
        return seen_QK

    def limits(self, length: int) -> bool:
        """Return whether a token of a sequence of ``length`` tokens may see less than all tokens before it."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


class Plan(Protocol):
    """The plan of one forward pass: it decides which token attends to which, and computes attention."""

    positions_N: Tensor
    """The position of each token in its sequence; int64."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Return the attention of one layer, ``[N, H, D]`` with the head size of the values: for each token of
        ``query_NHD``, over the keys and values of the tokens that the plan and ``rule`` let it see. ``rule.choice``
        limits them to the tokens that an indexer has chosen."""
        ...

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence of one layer, whose output at a token depends on the tokens before it, within each
        sequence, and return its outputs ``[N, ...]``. ``key`` names its state."""
        ...

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Let the indexer of a layer choose the tokens that each token attends to, within its sequence. ``choose``
        scores the indexer's inputs ``inputs_N``."""
        ...


def forward(model: nn.Module, ids_N: Tensor, plan: Plan, keep_K: Tensor | None = None) -> Tensor:
    """Run one forward pass and return the logits ``[N, V]`` of the flattened tokens ``ids_N``, or ``[len(keep_K), V]``
    of the tokens at the indices ``keep_K``. ``plan`` decides which token attends to which."""
    keep: dict[str, Any] = {} if keep_K is None else {"logits_to_keep": keep_K}
    output = model(
        input_ids=ids_N[None], position_ids=plan.positions_N[None], use_cache=False, **{PLAN: plan}, **keep
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it in every layer: ``[1, heads, N, D]`` in, ``[1, N, H, D]`` out.

    Dropout is ignored on purpose: log π must be a function of the weights.
    """
    plan: Plan | None = kwargs.get(PLAN)
    if plan is None:
        raise ModelError(
            f"{type(module).__name__} was called without a plan",
            remedy="call headrace.models.attention.forward(model, ids_N, plan), "
            "or model.set_attn_implementation('sdpa') to use the model on its own",
        )
    choice = kwargs.get("indices")
    unknown = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    unknown += ["indices"] if not isinstance(choice, ChosenTokens | None) else []
    masked = attention_mask is not None and attention_mask is not NO_MASK
    if unknown or masked or kwargs.get("is_causal") is False:
        raise ModelError(
            f"{type(module).__name__} wants attention with {', '.join(unknown) or 'a mask that is not causal'}",
            remedy="use a decoder whose attention is causal, optionally with a sliding window, soft cap or sinks",
        )
    query = _retuned(module, query, plan.positions_N)
    scale = kwargs.get("scaling")
    rule = Rule(
        layer=module.layer_idx,  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=kwargs.get("sliding_window"),
        chunk=_chunk_of(module),
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
        choice=choice,
    )
    return plan.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), rule)[None], None


def _chunk_of(module: nn.Module) -> int | None:
    """Return the size of the chunks of a layer, which transformers puts into a mask; ``None`` if there are none."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or not isinstance(layer, int) or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def _retuned(module: nn.Module, query: Tensor, positions_N: Tensor) -> Tensor:
    """Return queries with the temperature of their positions, in Llama 4's layers without rotary embeddings, which
    take a token's place in the pass for its position (Nakanishi 2025, "Scalable-Softmax")."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    floor, scale = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]

    def tuned(at_N: Tensor) -> Tensor:
        """Return the factor of the queries at these positions, ``[N]``."""
        return torch.log1p(torch.floor((at_N.float() + 1.0) / floor)) * scale + 1.0

    places_N = torch.arange(len(positions_N), device=positions_N.device)
    return query * (tuned(positions_N) / tuned(places_N))[:, None].to(query.dtype)


AttentionInterface.register(NAME, attention)  # no mask function: transformers then builds no mask at all


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Sequences of similar length, as rows padded on the right."""

    num_rows: int
    """The number of sequences."""
    length: int
    """The number of tokens to which each row is padded."""
    lengths_B: Tensor
    """The number of tokens of each row."""


class PackedPlan:
    """Block-diagonal causal attention: sequences follow each other in one flat pass, and each attends to itself only.

    Inside attention, sequences of similar length become the rows of one call. Padding is on the right, where causality
    hides it, so no mask is needed. It wastes at most a quarter of a row, or :data:`ROW_STEP` tokens of it.

    Sequences with a common beginning may share its tokens: everything outside attention computes these once, and inside
    attention they are part of each sequence's row. Gradients of shared tokens are summed over the sequences.

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
        """Lay out sequences of ``lengths_S`` tokens. ``rows_T`` gives the index in the pass of each token of each
        sequence, so that sequences can share tokens; ``None`` for one sequence after the other."""
        lengths = np.asarray(lengths_S, np.int64)
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(int(lengths.sum())) if rows_T is None else np.asarray(rows_T, np.int64)
        total = int(rows.max()) + 1 if len(rows) else 0
        positions_N, slot_N = np.empty(total, np.int64), np.empty(total, np.int64)
        positions_N[rows] = np.arange(len(rows)) - np.repeat(starts, lengths)
        self.positions_N = torch.from_numpy(positions_N).to(device)
        self._buckets: list[_Bucket] = []
        token_S: list[np.ndarray[Any, Any]] = []
        filled = 0
        for members in cut(lengths):
            length = int(lengths[members[0]])
            column = np.arange(length)
            inside = column[None] < lengths[members, None]
            gather = rows[starts[members, None] + np.where(inside, column[None], 0)]
            slot_N[gather[inside]] = filled + np.flatnonzero(inside)  # any row of a shared token will do
            filled += gather.size
            token_S.append(gather.ravel())
            counts_B = torch.from_numpy(lengths[members]).to(device)
            self._buckets.append(_Bucket(num_rows=len(members), length=length, lengths_B=counts_B))
        self._slots: PaddedSlots | None = None
        """The slots of the tokens in the rows of all buckets, one bucket after the other; ``None`` if these are the
        tokens in order."""
        if len(self._buckets) > 1 or filled != total or (total and (token_S[0] != np.arange(total)).any()):
            tokens = torch.from_numpy(np.concatenate([*token_S, np.zeros(0, np.int64)])).to(device)
            self._slots = PaddedSlots(tokens, torch.from_numpy(slot_N).to(device), shared=len(rows) > total)
        self._masks: dict[tuple[int, int | None, int | None], Tensor] = {}

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention of all sequences of the pass by one layer's ``rule``; each token sees only its own
        sequence. Sequences of similar length are computed together, padded."""
        parts = zip(*(self._by_bucket(each) for each in (query_NHD, key_NKD, value_NKD)), strict=True)
        chosen = [None] * len(self._buckets) if rule.choice is None else rule.choice.masks
        return self._join(
            [
                self._attend(bucket, rows, rule, mask)
                for bucket, rows, mask in zip(self._buckets, parts, chosen, strict=True)
            ]
        )

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Let the indexer of a layer choose, for each token, among the tokens before it in its sequence."""
        parts = zip(*map(self._by_bucket, inputs_N), strict=True)
        return ChosenTokens(
            tuple(self._choose(bucket, choose, rows) for bucket, rows in zip(self._buckets, parts, strict=True))
        )

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence from the beginning of each sequence, with a state of zeros, and return its outputs ``[N,
        ...]``."""
        parts = zip(*map(self._by_bucket, inputs_N), strict=True)
        return self._join(
            [self._recur(bucket, recurrence, rows) for bucket, rows in zip(self._buckets, parts, strict=True)]
        )

    def _by_bucket(self, tensor_N: Tensor) -> Sequence[Tensor]:
        """Return the tokens of the pass as the padded rows of each bucket, ``[B, L, ...]``."""
        slots = tensor_N if self._slots is None else self._slots.spread(tensor_N)
        parts = slots.split([bucket.num_rows * bucket.length for bucket in self._buckets])
        return [
            part.unflatten(0, (bucket.num_rows, bucket.length))
            for part, bucket in zip(parts, self._buckets, strict=True)
        ]

    def _join(self, outputs: list[Tensor]) -> Tensor:
        """Return the outputs of all buckets' rows, one bucket after the other, as outputs ``[N, ...]`` in the order of
        the pass."""
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self._slots is None else self._slots.collect(joined)

    def _attend(self, bucket: _Bucket, rows: Iterable[Tensor], rule: Rule, chosen_BLL: Tensor | None) -> Tensor:
        """Compute the attention of the sequences of one bucket, of whose rows ``rows`` are queries, keys and values.
        ``chosen_BLL`` is true where an indexer lets a token see another; ``None`` without one."""
        query, key, value = (each.transpose(1, 2) for each in rows)
        masked = rule.limits(bucket.length) or not rule.plain
        mask = self._mask(bucket.length, rule, query.device) if masked else None
        if chosen_BLL is not None:
            mask = chosen_BLL[:, None] if mask is None else chosen_BLL[:, None] & mask
        out_BHLD = attend_masked(query, key, value, mask, rule)
        return out_BHLD.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _choose(bucket: _Bucket, choose: Choose, inputs_BL: tuple[Tensor, ...]) -> Tensor:
        """Return the mask ``[B, L, L]`` of the tokens that an indexer chooses in the sequences of one bucket."""
        whole = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=inputs_BL[0].device)
        return choose(inputs_BL, whole.tril().expand(bucket.num_rows, -1, -1), None)

    @staticmethod
    def _recur(bucket: _Bucket, recurrence: Recurrence, inputs_BL: Tensors) -> Tensor:
        """Return the outputs of a recurrence over the sequences of one bucket, one row after the other."""
        return recurrence.chunk(inputs_BL, bucket.lengths_B, None)[0].flatten(0, 1)

    def _mask(self, length: int, rule: Rule, device: torch.device) -> Tensor:
        """Return which tokens see which under ``rule`` in a sequence of ``length`` tokens, ``[length, length]`` bool;
        masks are cached."""
        key = length, rule.window, rule.chunk
        if key not in self._masks:
            places = torch.arange(length, device=device)
            self._masks[key] = rule.sees(places, places)
        return self._masks[key]


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Compute attention ``[B, H, Lq, D]`` over keys and values ``[B, K, Lk, D]``. A boolean ``mask`` is true where a
    query sees a key; a float mask is added to the scores; without a mask attention is causal.
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


def cut(lengths_S: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Group sequences of similar length, so that little of a bucket is padding, and return the indices of those in each
    bucket, the longest first. Each is at least :data:`MIN_FILL` of the longest of its bucket, or at most
    :data:`ROW_STEP` shorter. Empty sequences are left out.

    >>> [bucket.tolist() for bucket in cut(np.array([100, 20, 90, 10]))]
    [[0, 2], [1, 3]]
    """
    order = np.argsort(-lengths_S, kind="stable")
    order = order[lengths_S[order] > 0]
    buckets: list[np.ndarray[Any, Any]] = []
    while len(order):
        longest = int(lengths_S[order[0]])
        least = min(MIN_FILL * longest, longest - ROW_STEP)
        fits = int((lengths_S[order] >= least).sum())
        buckets.append(order[:fits])
        order = order[fits:]
    return buckets
