"""The attention of engine and learner: a function with transformers' attention interface, and the plans that it uses.

A forward pass runs over flattened tokens, ``[1, N]``, without padding outside attention. A *plan*, which is passed to
every layer, determines which tokens belong to the same sequence. :class:`PackedPlan` (here) computes attention within
whole sequences, with gradients; :class:`~headrace.models.paged.plan.PagedPlan` computes it over a key-value cache.

Shape legend: N tokens of the pass, T tokens of all sequences (N, or more if sequences share tokens), S sequences,
B sequences of one bucket, L padded length of a bucket, Q padded number of its queries, H query heads, K key-value
heads, D head size, V vocabulary.
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
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from headrace.base.errors import ModelError
from headrace.models.padding import PaddedSlots

if TYPE_CHECKING:
    from headrace.models.recurrent.base import Key, Recurrence, Tensors

NAME = "headrace"
"""The name of this attention implementation in transformers."""

PLAN = "headrace_plan"
"""The keyword argument of ``model(**kwargs)`` that contains the plan."""

MIN_FILL = 0.75
"""The smallest length that a sequence of a bucket may have, as a fraction of the longest sequence of the bucket."""

ROW_STEP = 16
"""The number of tokens by which a sequence may be shorter than the longest sequence of its bucket in any case."""

NO_MASK = torch.zeros(1, 1, 1, 1)
"""A placeholder for attention modules that require a mask. It contains no information, since the plan does."""

_UNSUPPORTED = ("position_bias", "block_indices", "sinks")
"""Keyword arguments of transformers' attention interface that are refused if they are not ``None``."""


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens that an indexer has chosen for each token of a pass. An indexer is the part of a sparse attention
    layer that selects the tokens to attend to."""

    masks: tuple[Tensor, ...]
    """The mask ``[B, Q, C]`` of each bucket of the plan that made the choice, where C is the number of positions of a
    sequence."""


Choose = Callable[[tuple[Tensor, ...], Tensor, object], Tensor]
"""A function ``choose(inputs_BL, seen_BLC, cache)`` that returns the mask ``[B, L, C]`` of the tokens that an indexer
chooses among the visible tokens ``seen_BLC``. ``cache`` replaces the keys of the pass by the keys of whole sequences
(:mod:`.indexed`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The parameters of one layer's attention, beyond the plan of which token attends to which."""

    layer: int
    """The index of the layer in the model."""
    scale: float
    """The factor by which scores are multiplied."""
    window: int | None = None
    """The number of latest tokens that a token attends to, itself included; ``None`` for all tokens before it."""
    chunk: int | None = None
    """The number of tokens of a chunk, counted from position 0. A token attends only to tokens of its own chunk.
    ``None`` for no chunks."""
    softcap: float | None = None
    """The soft cap: scores are limited to ±softcap by tanh; ``None`` for no cap."""
    sinks_H: Tensor | None = None
    """A learned score per head, without a value, that takes part in the softmax; ``None`` for none."""
    choice: ChosenTokens | None = None
    """The tokens that an indexer has chosen; ``None`` if there is no indexer."""

    @property
    def plain(self) -> bool:
        """Return whether fused attention kernels can compute this attention: it has no soft cap and no sinks."""
        return self.softcap is None and self.sinks_H is None

    def sees(self, from_Q: Tensor, to_K: Tensor) -> Tensor:
        """Return, as ``[Q, K]`` bool, whether a token at position ``from_Q`` attends to a token of the same sequence at
        position ``to_K``. ``from_Q`` may have further leading axes."""
        from_Q1 = from_Q[..., None]
        seen_QK = to_K <= from_Q1
        if self.window is not None:
            seen_QK &= to_K > from_Q1 - self.window
        if self.chunk is not None:
            seen_QK &= to_K >= from_Q1 // self.chunk * self.chunk
        return seen_QK

    def limits(self, length: int) -> bool:
        """Return whether some token of a sequence of ``length`` tokens attends to fewer than all tokens before it."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


class Plan(Protocol):
    """The plan of one forward pass. It determines which token attends to which tokens, and computes attention."""

    positions_N: Tensor
    """The position of each token in its sequence; int64."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Return the attention of one layer, ``[N, H, D]`` with the head size of the values. Each token of
        ``query_NHD`` attends to the keys and values of the tokens that the plan and ``rule`` allow. ``rule.choice``
        restricts these to the tokens that an indexer has chosen."""
        ...

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence of one layer over ``inputs_N`` within each sequence, and return its outputs ``[N,
        ...]``. The output of a recurrence at a token depends on the tokens before it. ``key`` identifies its state."""
        ...

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Return the tokens of its sequence that each token attends to, as the indexer of a layer chooses them.
        ``choose`` computes the choice from the indexer's inputs ``inputs_N``."""
        ...


def forward(model: nn.Module, ids_N: Tensor, plan: Plan, keep_K: Tensor | None = None) -> Tensor:
    """Run one forward pass of ``model`` over the flattened tokens ``ids_N``. Return their logits ``[N, V]``, or those
    of the tokens at the indices ``keep_K``, ``[len(keep_K), V]``. ``plan`` determines which token attends to which
    tokens."""
    keep: dict[str, Any] = {} if keep_K is None else {"logits_to_keep": keep_K}
    output = model(
        input_ids=ids_N[None], position_ids=plan.positions_N[None], use_cache=False, **{PLAN: plan}, **keep
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of the layer ``module``; transformers calls this function in every layer. The tensors are
    ``[1, heads, N, D]``, the result is ``[1, N, H, D]``. The keyword arguments contain the plan.

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
    query = _with_position_temperature(module, query, plan.positions_N)
    scale = kwargs.get("scaling")
    rule = Rule(
        layer=module.layer_idx,  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=kwargs.get("sliding_window"),
        chunk=_find_chunk_size(module),
        softcap=kwargs.get("softcap"),
        sinks_H=kwargs.get("s_aux"),
        choice=choice,
    )
    return plan.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), rule)[None], None


def _find_chunk_size(module: nn.Module) -> int | None:
    """Return the size of the layer's attention chunks, which transformers uses only in its mask; ``None`` if the layer
    has no chunks."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or not isinstance(layer, int) or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def _with_position_temperature(module: nn.Module, query: Tensor, positions_N: Tensor) -> Tensor:
    """Return queries scaled by the temperature of their positions, in the layers of Llama 4 without rotary embeddings
    (Nakanishi 2025, "Scalable-Softmax"). Those layers have scaled them by a token's index in the pass instead of its
    position. In other layers, return ``query`` unchanged."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    floor, scale = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]

    def temperature(at_N: Tensor) -> Tensor:
        """Return the scaling factor for queries at these positions, ``[N]``."""
        return torch.log1p(torch.floor((at_N.float() + 1.0) / floor)) * scale + 1.0

    places_N = torch.arange(len(positions_N), device=positions_N.device)
    return query * (temperature(positions_N) / temperature(places_N))[:, None].to(query.dtype)


AttentionInterface.register(NAME, attention)  # no mask function: transformers then builds no mask at all


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Sequences of similar length, as rows that are padded on the right. The queries of a row are its last tokens,
    those that no earlier sequence contains."""

    num_rows: int
    """The number of sequences."""
    length: int
    """The number of tokens to which each row is padded."""
    lengths_B: Tensor
    """The number of tokens of each row, without padding."""
    queries_BQ: Tensor
    """The position of each query in its row: first the row's own queries, then padding."""
    whole: bool
    """Whether all tokens of all rows are queries."""
    alike: bool
    """Whether the queries have the same positions in all rows."""

    def own(self, rows_BL: Tensor) -> Tensor:
        """Select the queries' entries ``[B, Q, ...]`` of ``rows_BL``, the entries ``[B, L, ...]`` of all tokens."""
        if self.whole:
            return rows_BL
        places_BQ = self.queries_BQ.clamp(max=self.length - 1)
        return rows_BL[torch.arange(self.num_rows, device=places_BQ.device)[:, None], places_BQ]


class PackedPlan:
    """Block-diagonal causal attention: the sequences are concatenated in one flat pass, and each attends only to
    itself.

    Inside attention, sequences of similar length become the rows of one call. Padding is on the right, where causality
    excludes it, so that no mask is needed. At most a quarter of a row, or :data:`ROW_STEP` tokens, is padding.

    Sequences with a common beginning may share its tokens, like the paths of a tree. Everything outside attention
    computes shared tokens once. Attention computes them once as queries, in the first sequence that contains them, but
    as keys and values they are in the row of every sequence. Gradients of shared tokens are summed over the sequences.

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
        """Arrange sequences of ``lengths_S`` tokens, with index tensors on ``device``. ``rows_T`` is the index in the
        pass of each token of each sequence, so that sequences can share their first tokens; ``None`` if the sequences
        are concatenated."""
        lengths = np.asarray(lengths_S, np.int64)
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(int(lengths.sum())) if rows_T is None else np.asarray(rows_T, np.int64)
        total = int(rows.max()) + 1 if len(rows) else 0
        place_T = np.arange(len(rows)) - np.repeat(starts, lengths)
        positions_N = np.empty(total, np.int64)
        positions_N[rows] = place_T
        self.positions_N = torch.from_numpy(positions_N).to(device)
        own = lengths if rows_T is None else _count_unshared(lengths, rows, place_T)
        members = bucket_by_length(lengths)
        if rows_T is not None:
            members = [bucket[part] for bucket in members for part in bucket_by_length(own[bucket])]
        keys = [_Slots.from_ranges(rows, starts[each], np.zeros_like(each), lengths[each]) for each in members]
        queries = [_Slots.from_ranges(rows, starts[each], (lengths - own)[each], lengths[each]) for each in members]
        self._buckets = [_bucket(*each, device) for each in zip(keys, queries, strict=True)]
        """The sequences in buckets of similar length, each with the index tensors of its padded rows."""
        self._keys = _padded(keys, total, device)
        """The slots of the tokens in the rows of all buckets, concatenated; ``None`` if they are the tokens of the pass
        in order."""
        self._shared = len(rows) > total
        """Whether sequences share tokens."""
        self._queries = _padded(queries, total, device) if self._shared else self._keys
        """The slots of the queries of all buckets, concatenated, in which each token occurs once; ``None`` if they are
        the tokens of the pass in order."""
        self._masks: dict[tuple[int, int | None, int | None], Tensor] = {}
        """The attention masks that layers have used so far, by bucket, window and chunk size."""

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention of all sequences of the pass under one layer's ``rule``; a token attends only to its
        own sequence. Sequences of similar length are computed together, with padding. If sequences share tokens,
        attention is computed again in the backward pass, so that the copies of shared keys and values are not stored
        until then."""
        if self._shared and torch.is_grad_enabled():
            found: Tensor = checkpoint(
                self._attend_all, query_NHD, key_NKD, value_NKD, rule, use_reentrant=False, preserve_rng_state=False
            )
            return found
        return self._attend_all(query_NHD, key_NKD, value_NKD, rule)

    def _attend_all(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Compute the attention of all sequences of the pass, without recomputation in the backward pass."""
        parts = zip(
            self._split_into_buckets(query_NHD, of_queries=True),
            self._split_into_buckets(key_NKD),
            self._split_into_buckets(value_NKD),
            strict=True,
        )
        chosen = [None] * len(self._buckets) if rule.choice is None else rule.choice.masks
        outputs = [
            self._attend(place, rows, rule, mask) for place, (rows, mask) in enumerate(zip(parts, chosen, strict=True))
        ]
        return self._join(outputs)

    def choose(self, layer: int, choose: Choose, inputs_N: tuple[Tensor, ...]) -> ChosenTokens:
        """Return the tokens that the indexer of a layer chooses by ``choose`` and its inputs ``inputs_N`` for each
        token, among the earlier tokens of its sequence."""
        parts = zip(*map(self._split_into_buckets, inputs_N), strict=True)
        return ChosenTokens(
            tuple(self._choose(bucket, choose, rows) for bucket, rows in zip(self._buckets, parts, strict=True))
        )

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence over ``inputs_N`` from the beginning of each sequence, with an initial state of zeros,
        and return its outputs ``[N, ...]``. Tokens that several sequences share are computed for each sequence."""
        parts = zip(*map(self._split_into_buckets, inputs_N), strict=True)
        outputs = [
            bucket.own(recurrence.chunk(rows, bucket.lengths_B, None)[0]).flatten(0, 1)
            for bucket, rows in zip(self._buckets, parts, strict=True)
        ]
        return self._join(outputs)

    def _split_into_buckets(self, tensor_N: Tensor, *, of_queries: bool = False) -> Sequence[Tensor]:
        """Return the tokens of the pass as the padded rows of each bucket, ``[B, L, ...]``; with ``of_queries``, only
        the queries, ``[B, Q, ...]``."""
        slots = self._queries if of_queries else self._keys
        rows = tensor_N if slots is None else slots.spread(tensor_N)
        shapes = [
            tuple(bucket.queries_BQ.shape) if of_queries else (bucket.num_rows, bucket.length)
            for bucket in self._buckets
        ]
        parts = rows.split([count * length for count, length in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _join(self, outputs: list[Tensor]) -> Tensor:
        """Return ``outputs``, the outputs of the queries of each bucket, as outputs ``[N, ...]`` in the order of the
        pass."""
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self._queries is None else self._queries.collect(joined)

    def _attend(self, index: int, rows: Iterable[Tensor], rule: Rule, chosen_BQL: Tensor | None) -> Tensor:
        """Compute the attention of the bucket with index ``index``. ``rows`` are its queries, keys and values.
        ``chosen_BQL`` is true where an indexer has chosen a token for a query; ``None`` without an indexer."""
        bucket = self._buckets[index]
        query, key, value = (each.transpose(1, 2) for each in rows)
        masked = not bucket.whole or rule.limits(bucket.length) or not rule.plain
        mask = self._mask(index, rule) if masked else None
        if chosen_BQL is not None:
            mask = chosen_BQL[:, None] if mask is None else chosen_BQL[:, None] & mask
        out_BHQD = attend_masked(query, key, value, mask, rule)
        return out_BHQD.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _choose(bucket: _Bucket, choose: Choose, inputs_BL: tuple[Tensor, ...]) -> Tensor:
        """Return the mask ``[B, Q, L]`` of the tokens that an indexer chooses for the queries of one bucket."""
        whole = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=inputs_BL[0].device)
        return bucket.own(choose(inputs_BL, whole.tril().expand(bucket.num_rows, -1, -1), None))

    def _mask(self, index: int, rule: Rule) -> Tensor:
        """Return the attention mask, bool, of the bucket with index ``index`` under ``rule``: ``[Q, L]`` if it is the
        same for all sequences of the bucket, otherwise ``[B, 1, Q, L]``. Masks are cached."""
        key = index, rule.window, rule.chunk
        if key not in self._masks:
            bucket = self._buckets[index]
            # padding queries after the row's end would see no token under a window: 0 / 0 would enter the gradients
            from_BQ = bucket.queries_BQ.clamp(max=bucket.length - 1)
            from_BQ = from_BQ[0] if bucket.alike else from_BQ[:, None]
            self._masks[key] = rule.sees(from_BQ, torch.arange(bucket.length, device=from_BQ.device))
        return self._masks[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """Tokens of the sequences of one bucket as rows that are padded on the right. Padding repeats the first token of
    its row."""

    places_BL: np.ndarray[Any, Any]
    """The position in its sequence of the token in each slot; in padding, the positions continue."""
    tokens_BL: np.ndarray[Any, Any]
    """The index in the pass of the token in each slot."""
    padding_BL: np.ndarray[Any, Any]
    """Whether the slot is padding."""

    @classmethod
    def from_ranges(
        cls,
        rows_T: np.ndarray[Any, Any],
        starts_B: np.ndarray[Any, Any],
        begins_B: np.ndarray[Any, Any],
        ends_B: np.ndarray[Any, Any],
    ) -> _Slots:
        """Return the slots of the tokens from position ``begins_B`` to position ``ends_B`` of each sequence. The first
        token of a sequence is at ``starts_B`` in ``rows_T``, the indices in the pass of the tokens of all sequences."""
        places_BL = begins_B[:, None] + np.arange(int((ends_B - begins_B).max()))
        padding_BL = places_BL >= ends_B[:, None]
        tokens_BL = rows_T[starts_B[:, None] + np.where(padding_BL, begins_B[:, None], places_BL)]
        return cls(places_BL=places_BL, tokens_BL=tokens_BL, padding_BL=padding_BL)


def _count_unshared(
    lengths_S: np.ndarray[Any, Any], rows_T: np.ndarray[Any, Any], places_T: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return, for each sequence, of ``lengths_S`` tokens, the number of its tokens that no earlier sequence contains,
    ``[S]``. They are its last tokens. ``rows_T`` are the indices in the pass of the tokens, and ``places_T`` their
    positions in their sequences."""
    is_first_T = np.zeros(len(rows_T), np.bool_)
    is_first_T[np.unique(rows_T, return_index=True)[1]] = True
    sequence_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
    own_S = np.bincount(sequence_T[is_first_T], minlength=len(lengths_S))
    assert (is_first_T == (places_T >= (lengths_S - own_S)[sequence_T])).all(), (
        "sequences share their first tokens only"
    )
    return own_S


def _bucket(keys: _Slots, queries: _Slots, device: torch.device | str) -> _Bucket:
    """Return the bucket whose rows are the slots ``keys``, and whose queries are the slots ``queries``."""
    count, length = keys.places_BL.shape
    return _Bucket(
        num_rows=count,
        length=length,
        lengths_B=torch.from_numpy((~keys.padding_BL).sum(1)).to(device),
        queries_BQ=torch.from_numpy(queries.places_BL).to(device),
        whole=np.array_equal(queries.places_BL, keys.places_BL),
        alike=bool((queries.places_BL == queries.places_BL[:1]).all()),
    )


def _padded(parts: Sequence[_Slots], total: int, device: torch.device | str) -> PaddedSlots | None:
    """Return the index maps that copy rows of tokens into the padded slots of all buckets, ``parts``, and back.
    ``total`` is the number of tokens in the pass. ``None``: no copy is needed, since the slots contain every token
    once, in order."""
    tokens = np.concatenate([*(part.tokens_BL.ravel() for part in parts), np.zeros(0, np.int64)])
    if np.array_equal(tokens, np.arange(total)):
        return None
    padding = np.concatenate([part.padding_BL.ravel() for part in parts])
    return PaddedSlots(tokens, padding, device)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Compute attention ``[B, H, Lq, D]`` of queries ``[B, H, Lq, D]`` over keys and values ``[B, K, Lk, D]``. A
    boolean ``mask`` is true where a query attends to a key; a float mask is added to the scores; without a mask,
    attention is causal. A mask is the same for all heads: ``[Lq, Lk]``, or ``[B, 1, Lq, Lk]``.
    """
    if rule.plain:
        return F.scaled_dot_product_attention(
            query, key, value, mask, scale=rule.scale, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
    assert mask is not None
    mask = mask[:, None] if mask.dim() == 4 else mask
    grouped = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])  # query heads by key-value head
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if rule.sinks_H is not None:
        # a sink is one more score in the softmax; its weight is dropped below, since it has no value
        sinks = rule.sinks_H.view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights[..., : key.shape[2]], value[:, :, None]).flatten(1, 2)


def bucket_by_length(lengths_S: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Divide sequences into buckets of similar length, so that a bucket contains little padding. Return the indices of
    the sequences of each bucket, the longest first. The length of each sequence is at least :data:`MIN_FILL` times that
    of the longest in its bucket, or at most :data:`ROW_STEP` tokens less. Empty sequences are left out.

    >>> [bucket.tolist() for bucket in bucket_by_length(np.array([100, 20, 90, 10]))]
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
