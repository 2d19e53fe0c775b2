"""The comparison of a new engine with transformers: the same model, each sequence alone, no part of the engine.

What an engine adds to a model may be wrong for one model and right for another: attention over blocks, compiled
modules, packed weights. So each engine shows on a few tokens, before its first request, that it gives the distributions
that the model gives under its own attention and modules: prompts in pieces, and sequences that decode beside them.

Shape legend: N tokens of a pass, T tokens of a sequence, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.errors import ModelError
from headrace.models.attention import NAME, forward
from headrace.models.gap import largest_gap
from headrace.models.mixtures import is_mixture
from headrace.models.paged.base import BLOCK, AttentionMaker, Geometry, LayerShape, PagedCache, PagedPlan

_COUNTS = ((1, 5, 20), (1, 1, 13), (1, 1, 1), (1, 1, 1))
"""New tokens of three sequences in each pass: prompts, one of them in two pieces over two blocks; then decoding."""
_KERNELS = "headrace.models.kernels"


def refuse_unequal(
    model: PreTrainedModel, shapes: tuple[LayerShape, ...], maker: AttentionMaker, max_context: int
) -> None:
    """Raise :class:`~headrace.errors.ModelError` unless passes over a paged cache give what transformers gives."""
    counts = np.array(_COUNTS, np.int64)
    lengths_R = np.minimum(counts.sum(0), max_context)
    sequences = [
        (torch.arange(length, device=model.device) * 7 + row * 3 + 1) % model.config.vocab_size
        for row, length in enumerate(lengths_R.tolist())
    ]
    with torch.no_grad():
        found = _paged(model, sequences, shapes, maker)
        wanted = _alone(model, sequences)
    gaps = [_apart(*pair) for pair in zip(found, wanted, strict=True)]
    gap_N = torch.cat(gaps)
    dtype = str(model.dtype).removeprefix("torch.")
    largest, mean = largest_gap(dtype, rerouted=is_mixture(model.config)), gap_N.mean().item()
    if mean <= largest:
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


def _apart(found_TV: Tensor, wanted_TV: Tensor) -> Tensor:
    """Of each token: the expected |Δ logprob| of one that is sampled after it."""
    found, wanted = found_TV.float().log_softmax(-1), wanted_TV.float().log_softmax(-1)
    return torch.where(wanted.exp() > 0, wanted.exp() * (found - wanted).abs(), 0.0).sum(-1).cpu()


def _paged(
    model: PreTrainedModel, sequences: list[Tensor], shapes: tuple[LayerShape, ...], maker: AttentionMaker
) -> list[Tensor]:
    """Logits ``[T, V]`` of each sequence, from passes as an engine makes them."""
    num_blocks = -(-max(len(ids_T) for ids_T in sequences) // BLOCK)
    cache = PagedCache(shapes, num_blocks * len(sequences), dtype=model.dtype, device=model.device)
    tables_RB = np.arange(len(sequences) * num_blocks, dtype=np.int32).reshape(len(sequences), num_blocks)
    starts_R, found = np.zeros(len(sequences), np.int64), [list[Tensor]() for _ in sequences]
    for wanted_R in np.array(_COUNTS, np.int64):
        left_R = np.array([len(ids_T) for ids_T in sequences]) - starts_R
        counts_R = np.minimum(wanted_R, left_R)
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
        logits_NV = forward(model, ids_N, PagedPlan(cache, geometry, maker, model.device))
        for row, part in zip(rows, logits_NV.split(counts_R[rows].tolist()), strict=True):
            found[row].append(part)
        starts_R = starts_R + counts_R
    return [torch.cat(parts) for parts in found]


def _alone(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    """Logits ``[T, V]`` of each sequence from the model's own attention and modules."""
    with _without_kernels(model):
        model.set_attn_implementation("eager")
        try:
            return [model(input_ids=ids_T[None], use_cache=False).logits[0] for ids_T in sequences]
        finally:
            model.set_attn_implementation(NAME)


@contextmanager
def _without_kernels(model: nn.Module) -> Iterator[None]:
    """Let modules that run on kernels compute as their classes say, for a while."""
    swapped = [
        (module, module.__dict__["forward"])
        for module in model.modules()
        if type(module.__dict__.get("forward")).__module__.startswith(_KERNELS)
    ]
    for module, _ in swapped:
        del module.forward
    try:
        yield
    finally:
        for module, kernel in swapped:
            module.forward = kernel
