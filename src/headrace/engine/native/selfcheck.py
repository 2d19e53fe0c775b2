"""The self-check of a new engine: a comparison of its logits with the logits that transformers computes for the same
model.

An engine adds attention over blocks, compiled modules and packed weights to a model, which may be correct for one model
and wrong for another. Before its first request, each engine therefore computes a few sequences in passes of its own
kind (prompts in pieces, beside sequences that decode), and compares the distributions with those of the unmodified
model, which computes each sequence alone.

Shape legend: N tokens of a pass, T tokens of a sequence, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.base.errors import ModelError
from headrace.models.attention import NAME, PackedPlan, Rule, attend_masked, forward
from headrace.models.gap import largest_gap
from headrace.models.kernels.ops import Kernels
from headrace.models.mixtures import is_mixture
from headrace.models.paged.base import BLOCK, AttentionMaker, Geometry, LayerShape, PagedCache
from headrace.models.paged.plan import PagedPlan
from headrace.models.recurrent import StatePass, StatePool, state_shapes

_COUNTS = ((1, 20), (1, 13), (1, 1))
"""The numbers of new tokens of two sequences in each pass: one sequence decodes beside a prompt in two pieces over
several blocks, then both decode. There are few passes, because most of the time of a pass is the reading of all
weights."""
_KERNELS = "headrace.models.kernels"
_NUM_QUERIES = 3
"""The number of queries in the check of sliding windows. The queries are the last tokens of a sequence that is one
block and this many tokens longer than the window."""
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""The largest accepted difference between two attention outputs, relative to the largest number, by dtype."""


def refuse_unequal(
    model: PreTrainedModel,
    shapes: tuple[LayerShape, ...],
    maker: AttentionMaker,
    max_context: int,
    ops: Kernels | None = None,
) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` unless passes over a paged cache compute the logits that
    transformers computes, up to rounding, for sequences of at most ``max_context`` tokens. ``shapes`` are the shapes of
    keys and values per layer, ``maker`` creates the attention over blocks that the engine will use, and ``ops`` are the
    kernels that update the states of recurrent layers; ``None``: torch updates them. A new engine calls this before its
    first request."""
    counts = np.array(_COUNTS, np.int64)
    lengths_R = np.minimum(counts.sum(0), max_context)
    sequences = [
        (torch.arange(length, device=model.device) * 7 + row * 3 + 1) % model.config.vocab_size
        for row, length in enumerate(lengths_R.tolist())
    ]
    with torch.no_grad():
        computed = _paged_logits(model, sequences, shapes, maker, ops)
        expected = _reference_logits(model, sequences)
    gaps = [_expected_gap(*pair) for pair in zip(computed, expected, strict=True)]
    gap_N = torch.cat(gaps)
    dtype = str(model.dtype).removeprefix("torch.")
    largest, mean = largest_gap(dtype, rerouted=is_mixture(model.config)), gap_N.mean().item()
    if mean <= largest:
        _check_windows(model, shapes, maker)
        return
    row = int(torch.stack([gap_T.nan_to_num(torch.inf).max() for gap_T in gaps]).argmax())
    worst = gaps[row].nan_to_num(torch.inf)
    raise ModelError(
        f"the engine does not compute what transformers computes of this {type(model).__name__}: mean |Δ logprob| "
        f"{mean:.2g} over {len(gap_N)} tokens, and rounding explains {largest:g}; the largest is {worst.max():.2g} "
        f"after {int(worst.argmax()) + 1} of {lengths_R[row]} tokens",
        remedy="set engine.kernels = 'off' or another model.dtype; where that does not help, report the model's "
        "config.json: nothing that such an engine samples could be trained on",
    )


class _ProbeRequest(PackedPlan):
    """A plan of a pass over one token that records by layer how the layer attends: its :class:`Rule` (window, chunk)
    and its number of query heads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device)
        self.rules: dict[int, tuple[Rule, int]] = {}

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        """Record the rule and the number of query heads of the layer, and compute its attention as usual."""
        self.rules[rule.layer] = rule, query_NHD.shape[1]
        return super().attend(query_NHD, key_NKD, value_NKD, rule)


@torch.no_grad()
def _check_windows(model: PreTrainedModel, shapes: tuple[LayerShape, ...], maker: AttentionMaker) -> None:
    """Compare the attention over blocks, which ``maker`` creates for layers with ``shapes``, with masked attention on
    sequences longer than each sliding window or chunk of the model. Raises :class:`~headrace.base.errors.ModelError` if
    they differ. Only the attention is computed, because a pass of the whole model over so many tokens would take too
    long."""
    probe = _ProbeRequest(model.device)
    forward(model, torch.zeros(1, dtype=torch.long, device=model.device), probe)
    limited = {(rule.window, rule.chunk, shapes[layer]): (rule, heads) for layer, (rule, heads) in probe.rules.items()}
    for (window, chunk, shape), (rule, heads) in limited.items():
        if window is None and chunk is None:
            continue
        difference = _window_difference(model, shape, maker, rule, heads)
        if not difference <= _TOLERANCES[model.dtype]:
            raise ModelError(
                f"the attention of this {type(model).__name__} over blocks does not keep to the "
                f"{'chunks' if window is None else 'sliding window'} of layer {rule.layer}, of {window or chunk} "
                f"tokens: beyond it, it is {difference:.2g} off (relative)",
                remedy="set another model.dtype or engine.device, and report the model's config.json",
            )


def _window_difference(
    model: PreTrainedModel, shape: LayerShape, maker: AttentionMaker, rule: Rule, heads: int
) -> float:
    """Return the largest difference between attention over blocks (``maker``) and masked attention over all keys,
    relative to the largest number, for the last tokens of a random sequence that is longer than the window or chunk of
    ``rule``, in the dtype of ``model``. ``shape`` has the layer's key-value heads, and ``heads`` is its number of query
    heads."""
    length = max(rule.window or 0, rule.chunk or 0) + BLOCK + _NUM_QUERIES
    draw = torch.Generator().manual_seed(0)
    key_TKE, value_TKE, query_QHE = (
        torch.randn(count, many, size, generator=draw).to(model.device, model.dtype)
        for count, many, size in (
            (length, shape.heads, shape.key_size),
            (length, shape.heads, shape.value_size),
            (_NUM_QUERIES, heads, shape.key_size),
        )
    )
    blocks = -(-length // BLOCK)
    cache = PagedCache([shape], blocks, dtype=model.dtype, device=model.device)
    for pool, tensor in zip(cache.layers[0], (key_TKE, value_TKE), strict=True):
        padded = nn.functional.pad(tensor, (0, 0, 0, 0, 0, blocks * BLOCK - length))
        pool.copy_(padded.unflatten(0, (blocks, BLOCK)).transpose(1, 2))
    geometry = Geometry(
        tables_RB=np.arange(blocks, dtype=np.int32)[None],
        starts_R=np.array([length - _NUM_QUERIES]),
        counts_R=np.array([_NUM_QUERIES]),
        num_decode=0,
    )
    last = slice(length - _NUM_QUERIES, length)
    computed = maker(geometry, model.device).attend((query_QHE, key_TKE[last], value_TKE[last]), cache.layers[0], rule)
    places_T = torch.arange(length, device=model.device)
    sees_QT = rule.sees(places_T[last], places_T)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query_QHE, key_TKE, value_TKE))
    expected = attend_masked(query, key, value, sees_QT, rule)[0].transpose(0, 1)
    return float((computed.float() - expected.float()).abs().max() / expected.float().abs().max())


def _expected_gap(computed_TV: Tensor, expected_TV: Tensor) -> Tensor:
    """Return for each token the expected |Δ logprob| of the next token: the mean over the vocabulary of the difference
    between the two log-softmaxes, weighted by the expected probabilities. The arguments are logits."""
    computed, expected = computed_TV.float().log_softmax(-1), expected_TV.float().log_softmax(-1)
    return torch.where(expected.exp() > 0, expected.exp() * (computed - expected).abs(), 0.0).sum(-1).cpu()


def _paged_logits(
    model: PreTrainedModel,
    sequences: list[Tensor],
    shapes: tuple[LayerShape, ...],
    maker: AttentionMaker,
    ops: Kernels | None,
) -> list[Tensor]:
    """Return the logits ``[T, V]`` of each of ``sequences`` (token ids), computed over a paged cache in the same way as
    by an engine, in the passes of :data:`_COUNTS`. The other arguments are the same as in :func:`refuse_unequal`."""
    num_blocks = -(-max(len(ids_T) for ids_T in sequences) // BLOCK)
    cache = PagedCache(shapes, num_blocks * len(sequences), dtype=model.dtype, device=model.device)
    tables_RB = np.arange(len(sequences) * num_blocks, dtype=np.int32).reshape(len(sequences), num_blocks)
    slots_R, states = np.arange(len(sequences)), state_shapes(model)
    pool = StatePool(states, len(sequences), model.device, ops) if states else None
    starts_R, computed = np.zeros(len(sequences), np.int64), [list[Tensor]() for _ in sequences]
    for planned_R in np.array(_COUNTS, np.int64):
        remaining_R = np.array([len(ids_T) for ids_T in sequences]) - starts_R
        counts_R = np.minimum(planned_R, remaining_R)
        rows = np.flatnonzero(counts_R)
        if not len(rows):  # the context is shorter than the probe
            break
        geometry = Geometry(
            tables_RB=tables_RB[rows],
            starts_R=starts_R[rows],
            counts_R=counts_R[rows],
            num_decode=int(np.cumprod(counts_R[rows] == 1).sum()),
        )
        ids_N = torch.cat([sequences[row][starts_R[row] : starts_R[row] + counts_R[row]] for row in rows])
        kept = None if pool is None else StatePass(pool, slots_R[rows])
        logits_NV = forward(model, ids_N, PagedPlan(cache, geometry, maker, model.device, kept))
        for row, part in zip(rows, logits_NV.split(counts_R[rows].tolist()), strict=True):
            computed[row].append(part)
        starts_R = starts_R + counts_R
    return [torch.cat(parts) for parts in computed]


def _reference_logits(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    """Return the logits ``[T, V]`` of each sequence, computed by the model's own attention and modules."""
    with _without_kernels(model):
        model.set_attn_implementation("eager")
        try:
            return [model(input_ids=ids_T[None], use_cache=False).logits[0] for ids_T in sequences]
        finally:
            model.set_attn_implementation(NAME)


@contextmanager
def _without_kernels(model: nn.Module) -> Iterator[None]:
    """Return a context in which the modules of ``model`` that run on compiled kernels compute with the code of
    transformers."""
    kernel_modules = [
        (module, module.__dict__["forward"])
        for module in model.modules()
        if type(module.__dict__.get("forward")).__module__.startswith(_KERNELS)
    ]
    for module, _ in kernel_modules:
        del module.forward
    try:
        yield
    finally:
        for module, kernel in kernel_modules:
            module.forward = kernel
