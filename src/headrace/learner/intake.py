"""The checks of a batch before the learner computes anything from it, and its layout for reductions.

Shape legend: S samples and N tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.algo.base import BatchLayout
from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.models.rope import ContextLimit
from headrace.models.routing import RoutedModel

Mask = npt.NDArray[np.bool_]


def refuse_unfit(batch: Batch, vocab_size: int, routed: RoutedModel | None, budget: int) -> None:
    """Raise :class:`~headrace.base.errors.RunError` for a batch that is invalid for a model with ``vocab_size`` tokens
    and the experts of ``routed`` (``None``: no mixture), or with a sample of more than ``budget`` tokens, the size of a
    micro-batch."""
    problem = (
        _misaligned_column(batch) or _reason_untrainable(batch, vocab_size) or _invalid_kept(batch, vocab_size)
        or _invalid_routing(batch, routed) or _invalid_teaching(batch, vocab_size)
    )  # fmt: skip
    if problem:
        raise RunError(
            f"the batch of step {batch.step} cannot be trained: {problem}; nothing was changed",
            remedy="build batches with Batch.collate, from samples whose tokens the engine or its tokenizer made",
        )
    longest = int(np.argmax(batch.lengths_S)) if len(batch.lengths_S) else 0
    if len(batch.lengths_S) and batch.lengths_S[longest] > budget:
        raise RunError(
            f"sample {longest} of the batch has {batch.lengths_S[longest]} tokens, "
            f"but one micro-batch holds learner.tokens_per_microbatch={budget}; nothing was changed",
            remedy=f"set learner.tokens_per_microbatch >= {batch.lengths_S[longest]}, or sample fewer new tokens",
        )


def refuse_rescaled(batch: Batch, limit: ContextLimit | None) -> None:
    """Raise :class:`~headrace.base.errors.RunError` for a batch with a sample that is longer than ``limit``. For a
    longer sample, the model would rescale the positions of all samples in the same pass. ``None``: there is no
    limit."""
    if limit is None or not limit.reason or not len(batch.lengths_S):
        return
    longest = int(np.argmax(batch.lengths_S))
    if batch.lengths_S[longest] > limit.length:
        raise RunError(
            f"sample {longest} of the batch has {batch.lengths_S[longest]} tokens, and the model's context is "
            f"{limit.length}: {limit.reason}; nothing was changed",
            remedy=f"sample at most {limit.length} tokens of prompt and answer: engine.max_context <= {limit.length}",
        )


def refuse_unknown_agents(batch: Batch, agents: Sequence[str]) -> None:
    """Raise :class:`~headrace.base.errors.RunError` for a batch with tokens of an agent that is not in ``agents``."""
    places = () if batch.agents_N is None else np.unique(batch.agents_N).tolist()
    named = dict(enumerate(batch.agents))
    unknown = [named.get(place, f"number {place}") for place in places if named.get(place) not in agents]
    if unknown:
        raise RunError(
            f"the batch of step {batch.step} has tokens of agent {unknown[0]!r}, which trains no adapter here; "
            "nothing was changed",
            remedy=f"name it in model.lora.agents, which is {[agent for agent in agents if agent]}",
        )


def _misaligned_column(batch: Batch) -> str:
    """Return, in words, the first column of a batch with a wrong length, and the expected length; empty if all lengths
    are right."""
    num_samples, num_tokens = len(batch.lengths_S), batch.num_tokens
    sizes = {
        "groups_S": (len(batch.groups_S), num_samples),
        "episodes_S": (len(batch.episodes_S), num_samples),
        "lengths_S (summed)": (int(batch.lengths_S.sum()), num_tokens),
        "mask_N": (len(batch.mask_N), num_tokens),
        "logprobs_N": (len(batch.logprobs_N), num_tokens),
        "versions_N": (len(batch.versions_N), num_tokens),
        "advantages_N": (len(batch.advantages_N), num_tokens),
        "agents_N": (num_tokens if batch.agents_N is None else len(batch.agents_N), num_tokens),
    }
    wrong = [f"{name} is {size}, expected {expected}" for name, (size, expected) in sizes.items() if size != expected]
    return wrong[0] if wrong else ""


def _reason_untrainable(batch: Batch, vocab_size: int) -> str:
    """Return why the learner cannot train on a batch, in words; empty if it can. Token ids must be in the vocabulary,
    the first token of a sample must not carry loss, and advantages must be finite."""
    outside = np.flatnonzero((batch.ids_N < 0) | (batch.ids_N >= vocab_size))
    if len(outside):
        return f"token {outside[0]} has id {batch.ids_N[outside[0]]}, the model knows 0 to {vocab_size - 1}"
    lengths = batch.lengths_S.astype(np.int64)
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    first = np.flatnonzero(batch.mask_N[starts])
    if len(first):
        return f"the first token of sample {np.flatnonzero(lengths > 0)[first[0]]} carries loss, but follows no token"
    unlearnable = batch.mask_N & ~np.isfinite(batch.advantages_N)
    return f"token {np.flatnonzero(unlearnable)[0]} has a non-finite advantage" if unlearnable.any() else ""


def _invalid_kept(batch: Batch, vocab_size: int) -> str:
    """Return why the kept-sets of a batch are invalid for a vocabulary of ``vocab_size`` tokens, in words; empty if
    they are valid."""
    if batch.kept is None:
        return ""
    if problem := batch.kept.problem(batch.ids_N):
        return problem
    ids_E = batch.kept.ids_E
    outside = np.flatnonzero((ids_E < 0) | (ids_E >= vocab_size))
    if len(outside):
        return f"a kept-set holds id {ids_E[outside[0]]}, the model knows 0 to {vocab_size - 1}"
    sizes_N = batch.kept.sizes_T
    ends = np.cumsum(sizes_N, dtype=np.int64)
    descends_E = ids_E[1:] <= ids_E[:-1]
    starts = (ends - sizes_N)[sizes_N > 0]
    descends_E[starts[1:] - 1] = False  # from one kept-set to the next
    unordered = np.flatnonzero(descends_E)
    owner = np.searchsorted(ends, unordered[:1], side="right")
    return f"the kept-set of token {owner[0]} is not ascending" if len(unordered) else ""


def _invalid_routing(batch: Batch, routed: RoutedModel | None) -> str:
    """Return why the batch's recorded routing cannot be replayed, in words; empty if it can."""
    if batch.routing is None:
        return ""
    if routed is None:
        return "it holds the routing of a mixture of experts, and the model has none that can be replayed"
    return batch.routing.problem(batch.num_tokens) or routed.problem(batch.routing.experts_RLK)


def _invalid_teaching(batch: Batch, vocab_size: int) -> str:
    """Return why the teacher's scores in the batch cannot be used, in words; empty if they can."""
    if batch.teacher_scores is None:
        return ""
    if problem := batch.teacher_scores.problem(batch.num_tokens):
        return problem
    ids_NK = batch.teacher_scores.ids_TK
    outside = ids_NK[(ids_NK < 0) | (ids_NK >= vocab_size)]
    return f"a teacher's entry is {outside[0]}, the model knows 0 to {vocab_size - 1}" if len(outside) else ""


def layout(batch: Batch, mask_N: Tensor) -> BatchLayout:
    """Return the layout of the batch for a reduction of the loss. ``mask_N`` marks the tokens that carry loss."""
    lengths = torch.from_numpy(batch.lengths_S.astype(np.int64))
    return BatchLayout(
        mask_N=mask_N,
        samples_N=torch.arange(len(lengths)).repeat_interleave(lengths),
        episodes_S=torch.from_numpy(batch.episodes_S.astype(np.int64)),
        groups_S=torch.from_numpy(batch.groups_S.astype(np.int64)),
    )
