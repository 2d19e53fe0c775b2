"""The sampling of one token per row from its logits, each row with its own temperature, truncation and seed.

A draw depends only on the row's logits, the request's seed and the token's position, not on the other rows of the
batch: every operation here works row by row, and the order of summation within a row does not depend on other rows.
*Survivors* are the tokens that remain after truncation by top-k, top-p and min-p; *shifted* logits are the logits minus
the largest logit of the row; a *uniform* is a random number in [0, 1).

Shape legend: R rows, V vocabulary, K the size of the largest support, W candidates of a search, A rows that are
searched, N blocks of B tokens, E survivors of all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.types.recorded import KeptSets
from headrace.base.types.teacher_scores import TopScores

# the constants of splitmix64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_WIDTHS = (64, 1024)
"""The numbers of most likely tokens that are searched for survivors, before the whole vocabulary is; few rows need
more."""
_BLOCK = 512
"""The number of tokens in a block whose probabilities are summed first, if the vocabulary is large."""
_BELOW_ONE = 1 - 2.0**-52
"""A factor just below 1: a sum times this factor is smaller than the sum in spite of rounding."""
_SMALL = 256
"""The largest vocabulary that is sampled with numpy on a processor, because numpy's calls have less overhead."""

LogSoftmax = Callable[[Tensor], Tensor]
"""A log-softmax over the last dimension, row by row. If a function of this type is passed, it computes all logprobs, so
that a learner that calls the same function on the same logits gets the same bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The result of sampling: the token of each row, its logprob and its optional records."""

    ids_R: Tensor
    """The token ids, int64."""
    logprobs_R: Tensor
    """The logprobs, float32, under the distribution from which the tokens were sampled: after penalties, temperature
    and truncation, renormalised. 0 for a greedy row."""
    sound_R: Tensor
    """Whether the logits of each row are valid: without NaN and +inf, and not all −inf. The id and logprob of other
    rows are meaningless."""
    kept: KeptSets | None = None
    """The kept-set of each row. It is empty if the request does not record it, if it is the whole vocabulary, and if
    the row is not sound. ``None`` if all are empty."""
    entropies_R: Tensor | None = None
    """The entropies in nats, see :func:`entropies`; ``None`` if no row records its entropy."""
    top: TopScores | None = None
    """The likeliest entries of each row, for all rows as many as the largest request; ``None`` if no row records
    any."""

    def take(self, places_D: npt.NDArray[np.int64]) -> Draw:
        """Return the draws of the rows with the indices ``places_D``, in that order."""
        at = torch.from_numpy(places_D).to(self.ids_R.device)
        return Draw(
            ids_R=self.ids_R[at],
            logprobs_R=self.logprobs_R[at],
            sound_R=self.sound_R[at],
            kept=None if self.kept is None else self.kept.take(places_D),
            entropies_R=None if self.entropies_R is None else self.entropies_R[at],
            top=None if self.top is None else self.top[places_D],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationLimits:
    """The truncation of each row's distribution, as :func:`find_support` applies it."""

    top_k_R: Tensor
    """The number of most likely tokens that are kept, int64; 0 for no limit."""
    top_p_R: Tensor
    """The least total probability of the kept tokens, float64; 1 for no limit."""
    min_p_R: Tensor
    """The least probability of a kept token, relative to the most likely one, float64; 0 for no limit."""

    def take(self, places: Tensor) -> Self:
        """Return the limits of the rows with the indices ``places``, in that order."""
        return type(self)(
            top_k_R=self.top_k_R[places], top_p_R=self.top_p_R[places], min_p_R=self.min_p_R[places]
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The tokens of each row that can be drawn after truncation."""

    ids_RK: Tensor
    """The ids of these tokens, ascending. Each row is padded at its end with the size of the vocabulary, which is not a
    valid id."""
    sizes_R: Tensor
    """The number of tokens of each row."""
    sound_R: Tensor
    """Whether the largest logit of each row is finite. Otherwise its logits define no distribution."""


def entropies(logits_RV: Tensor, temperatures_R: Tensor) -> Tensor:
    """Return the entropy in nats of each row's distribution, softmax(``logits_RV`` / ``temperatures_R``), before any
    truncation; 0 at temperature 0, where the token is certain.

    >>> entropies(torch.zeros(2, 4), torch.tensor([1.0, 0.0])).tolist()
    [1.3862943649291992, 0.0]
    """
    greedy_R = temperatures_R == 0
    scaled_RV = logits_RV.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None]
    entropy_R = torch.special.entr(scaled_RV.softmax(dim=-1)).sum(dim=-1)
    return torch.where(greedy_R, 0.0, entropy_R)


def likeliest(logits_RV: Tensor, ids_R: Tensor, num: int) -> TopScores:
    """Return the log-probability of each row's token ``ids_R``, and the ``num`` likeliest entries of each row of
    ``logits_RV``. Both are computed from the model's own distribution: at temperature 1, without bias, penalties, masks
    and truncation.

    >>> top = likeliest(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([2]), 2)
    >>> top.ids_TK.tolist(), bool(top.logprobs_T[0] == top.logs_TK[0, 1])
    ([[1, 2]], True)
    """
    logs_RV = logits_RV.float().log_softmax(-1)
    best = logs_RV.topk(num, dim=-1)
    return TopScores(
        logprobs_T=logs_RV.gather(1, ids_R[:, None])[:, 0].cpu().numpy(),
        ids_TK=best.indices.int().cpu().numpy(),
        logs_TK=best.values.cpu().numpy(),
    )


def sample(
    logits_RV: Tensor, temperatures_R: Tensor, uniforms_R: Tensor, log_softmax: LogSoftmax | None = None
) -> Draw:
    """Sample one token of each row from softmax(``logits_RV`` / ``temperatures_R``), by inverting the cumulative
    distribution at the row's uniform in ``uniforms_R``; temperature 0 selects the most likely token, the lowest id
    among equals. ``log_softmax``, if passed, computes the logprobs.

    The cumulative sum is computed in float64, and a uniform is smaller than 1 by more than the rounding error, so a
    token of probability 0 is never chosen. Rounding in the logits changes the choice only if the uniform is next to a
    boundary between two tokens.

    >>> draw = sample(torch.tensor([[0.0, -torch.inf, 0.0]]), torch.ones(1), torch.tensor([0.7], dtype=torch.float64))
    >>> draw.ids_R.tolist(), round(draw.logprobs_R.item(), 4)
    ([2], -0.6931)
    """
    draw = _sample(logits_RV, temperatures_R, uniforms_R, logits_RV.shape[1])
    if log_softmax is None:
        return draw
    greedy_R = temperatures_R == 0
    all_RV = log_softmax(logits_RV.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None])
    logprobs_R = all_RV.gather(1, draw.ids_R[:, None])[:, 0]
    return dataclasses.replace(draw, logprobs_R=torch.where(greedy_R, 0.0, logprobs_R))


def _sample(logits_RK: Tensor, temperatures_R: Tensor, uniforms_R: Tensor, vocab_size: int) -> Draw:
    """Sample one column of each row of ``logits_RK``, as :func:`sample` does with the same arguments, and return the
    indices of columns in place of ids. The columns are the whole vocabulary, of ``vocab_size`` tokens, or the tokens of
    the support. The algorithm is chosen by ``vocab_size`` only, because the number of columns depends on the other rows
    of the batch, which must not influence a row's result."""
    if logits_RK.is_cpu and vocab_size <= _SMALL:
        return _sample_small(logits_RK, temperatures_R, uniforms_R)
    greedy_R = temperatures_R == 0
    scaled_RK = logits_RK.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None]
    top_R = scaled_RK.max(dim=-1)
    shifted_RK = scaled_RK.sub_(top_R.values[:, None])
    drawn_R, total_R = _invert(shifted_RK.exp(), uniforms_R, by_blocks=vocab_size > 2 * _BLOCK)
    ids_R = torch.where(greedy_R, top_R.indices, drawn_R)
    logprobs_R = shifted_RK.gather(1, ids_R[:, None])[:, 0] - total_R.log().float()
    return Draw(
        ids_R=ids_R, logprobs_R=torch.where(greedy_R, 0.0, logprobs_R), sound_R=torch.isfinite(total_R)
    )  # fmt: skip


def _sample_small(logits_RV: Tensor, temperatures_R: Tensor, uniforms_R: Tensor) -> Draw:
    """Sample one column of each row as :func:`_sample` does with the same arguments, on the processor with numpy, which
    is faster for a small vocabulary."""
    temperatures, rows = temperatures_R.numpy(), np.arange(len(logits_RV))
    greedy_R = temperatures == 0
    with np.errstate(invalid="ignore"):  # rows that are not sound
        shifted_RV = logits_RV.float().numpy() / np.where(greedy_R, np.float32(1), temperatures)[:, None]
        top_R = shifted_RV.argmax(axis=1)
        shifted_RV -= shifted_RV[rows, top_R][:, None]
        mass_RV = np.exp(shifted_RV).cumsum(axis=1, dtype=np.float64)
        total_R = mass_RV[:, -1]
        drawn_R = (mass_RV <= (uniforms_R.numpy() * total_R)[:, None]).sum(axis=1)
        ids_R = np.where(greedy_R, top_R, np.minimum(drawn_R, shifted_RV.shape[1] - 1))
        logprobs_R = shifted_RV[rows, ids_R] - np.log(total_R).astype(np.float32)
    return Draw(
        ids_R=torch.from_numpy(ids_R),
        logprobs_R=torch.from_numpy(np.where(greedy_R, np.float32(0), logprobs_R)),
        sound_R=torch.from_numpy(np.isfinite(total_R)),
    )


def _invert(weights_RV: Tensor, uniforms_R: Tensor, *, by_blocks: bool) -> tuple[Tensor, Tensor]:
    """Return for each row of ``weights_RV`` the first token at which the cumulative sum of its weights exceeds its
    uniform in ``uniforms_R`` times the sum of all weights, and the sum of all weights. The weights are ≥ 0 and need not
    be normalised. With ``by_blocks``, for a large vocabulary, the block of the token is found first, and then the token
    in it."""
    if not by_blocks:
        mass_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
        total_R = mass_RV[:, -1]
        return _first_above(mass_RV, uniforms_R * total_R), total_R
    blocks_RNB = torch.nn.functional.pad(weights_RV, (0, -weights_RV.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    block_mass_RN = blocks_RNB.sum(dim=-1, dtype=torch.float64)
    mass_RN = block_mass_RN.cumsum(dim=-1)
    total_R = mass_RN[:, -1]
    target_R = uniforms_R * total_R
    block_R1 = _first_above(mass_RN, target_R)[:, None]
    before_R = (mass_RN.gather(1, block_R1) - block_mass_RN.gather(1, block_R1))[:, 0]
    rows_R = torch.arange(len(weights_RV), device=weights_RV.device)
    mass_RB = blocks_RNB[rows_R, block_R1[:, 0]].cumsum(dim=-1, dtype=torch.float64)
    # clamped, because rounding must not move the target out of its block
    inside_R = (target_R - before_R).clamp_(min=0.0).minimum(mass_RB[:, -1] * _BELOW_ONE)
    drawn_R = block_R1[:, 0] * _BLOCK + _first_above(mass_RB, inside_R)
    return drawn_R.clamp_(max=weights_RV.shape[1] - 1), total_R


def _first_above(mass_RV: Tensor, target_R: Tensor) -> Tensor:
    """Return for each row the index of the first of its ascending sums ``mass_RV`` that exceeds ``target_R``; the last
    index if none does."""
    return torch.searchsorted(mass_RV, target_R[:, None], right=True)[:, 0].clamp_(max=mass_RV.shape[1] - 1)


def sample_from(scaled_RV: Tensor, support: Support, uniforms_R: Tensor, log_softmax: LogSoftmax | None = None) -> Draw:
    """Sample one token of each row from softmax(``scaled_RV``), renormalised over the tokens of the ``support``, as
    :func:`sample` does. ``scaled_RV`` are the logits divided by the temperature; the other arguments are those of
    :func:`sample`."""
    vocab_size = scaled_RV.shape[1]
    outside_RK = support.ids_RK == vocab_size
    logits_RK = scaled_RV.gather(1, support.ids_RK.clamp(max=vocab_size - 1)).masked_fill_(outside_RK, -torch.inf)
    draw = _sample(logits_RK, torch.ones_like(logits_RK[:, 0]), uniforms_R, vocab_size)
    ids_R = support.ids_RK.gather(1, draw.ids_R[:, None])[:, 0].clamp_(max=vocab_size - 1)
    logprobs_R = draw.logprobs_R
    if log_softmax is not None:
        beyond_RV = torch.full((len(scaled_RV), vocab_size + 1), -torch.inf, device=scaled_RV.device)
        beyond_RV.scatter_(1, support.ids_RK, logits_RK)
        logprobs_R = log_softmax(beyond_RV[:, :vocab_size]).gather(1, ids_R[:, None])[:, 0]
    return Draw(ids_R=ids_R, logprobs_R=logprobs_R, sound_R=support.sound_R)


def find_support(scaled_RV: Tensor, limits: TruncationLimits) -> Support:
    """Return the tokens that survive truncation of softmax(``scaled_RV``) by ``limits``.

    The tokens are ordered by falling probability, and by rising id among equals; the survivors are the first n.
    ``top_k`` keeps all tokens that are at least as likely as the k-th, so n may exceed top_k if several are equally
    likely. ``top_p`` keeps the smallest number of tokens that have at least the share ``top_p`` of the probability
    after ``top_k``; among equals the lower ids are kept. ``min_p`` keeps the tokens that are at least ``min_p`` times
    as likely as the first. At least one token survives, and no survivor has probability 0. The order top_k, top_p,
    min_p and the results are the same as with transformers' ``TopKLogitsWarper``, ``TopPLogitsWarper`` and
    ``MinPLogitsWarper``, except that their top_p chooses among equals by an unstable sort.

    >>> scaled_RV = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    >>> limits = TruncationLimits(top_k_R=torch.tensor([3]), top_p_R=torch.tensor([0.75]), min_p_R=torch.tensor([0.0]))
    >>> find_support(scaled_RV, limits).ids_RK.tolist()
    [[1, 2]]
    """
    vocab_size, device = scaled_RV.shape[1], scaled_RV.device
    top_R = scaled_RV.amax(dim=-1)
    sound_R = top_R.isfinite()
    shifted_RV = (scaled_RV - top_R[:, None]).masked_fill_(~sound_R[:, None], 0.0)
    total_R = _totals(shifted_RV, limits)
    searching_A = torch.arange(len(scaled_RV), device=device)
    found: list[tuple[Tensor, Tensor]] = []
    for width in _WIDTHS:
        if width * 16 > vocab_size:
            break
        settled_A, ids_AW = _among_likeliest(
            shifted_RV[searching_A], width, limits.take(searching_A), total_R[searching_A]
        )
        found.append((searching_A[settled_A], ids_AW[settled_A]))
        searching_A = searching_A[~settled_A]
    if len(searching_A):
        ids_AK = _among_all(shifted_RV[searching_A], limits.take(searching_A), total_R[searching_A])
        found.append((searching_A, ids_AK))
    ids_RK = torch.full((len(scaled_RV), max(ids.shape[1] for _, ids in found)), vocab_size, device=device)
    for rows, ids in found:
        ids_RK[rows, : ids.shape[1]] = ids
    sizes_R = (ids_RK < vocab_size).sum(dim=-1)
    return Support(ids_RK=ids_RK[:, : int(sizes_R.max())], sizes_R=sizes_R, sound_R=sound_R)


def _totals(shifted_RV: Tensor, limits: TruncationLimits) -> Tensor:
    """Return the sum of exp(``shifted_RV``) over the whole vocabulary for each row with ``top_p`` and without
    ``top_k``, whose ``top_p`` is relative to this sum; 0 for other rows."""
    total_R = torch.zeros(len(shifted_RV), dtype=torch.float64, device=shifted_RV.device)
    rows = ((limits.top_p_R < 1) & (limits.top_k_R == 0)).nonzero()[:, 0]
    weights_AV = shifted_RV[rows].exp_()
    padded_AV = torch.nn.functional.pad(weights_AV, (0, -weights_AV.shape[1] % _BLOCK))
    # a plain sum adds in another order if there is only one row; a cumulative sum always adds in the same order
    blocks_AN = padded_AV.unflatten(1, (-1, _BLOCK)).sum(dim=-1, dtype=torch.float64)
    total_R[rows] = blocks_AN.cumsum(dim=-1)[:, -1]
    return total_R


def _among_likeliest(
    shifted_AV: Tensor, width: int, limits: TruncationLimits, total_A: Tensor
) -> tuple[Tensor, Tensor]:
    """Search the survivors of truncation by ``limits`` among the ``width`` most likely tokens of each row of
    ``shifted_AV`` only. Return for each row whether the search is complete (no other token can survive), and the ids of
    the survivors found, ascending and padded with the size of the vocabulary. ``total_A`` are the sums that
    :func:`_totals` returned."""
    top = shifted_AV.topk(width, dim=-1)
    by_id = top.indices.sort(dim=-1)
    by_value = top.values.gather(1, by_id.indices).sort(dim=-1, descending=True, stable=True)
    sizes_A, last_A, kth_A = _survivors(by_value.values, limits, total_A)
    least_A = by_value.values[:, -1]
    # top_p is relative to the mass after top_k, so all tokens that equal the k-th must be among the candidates
    measured_A = (limits.top_p_R >= 1) | (limits.top_k_R == 0) | (least_A < kth_A)
    settled_A = measured_A & (least_A < last_A)
    beyond_AW = torch.arange(width, device=sizes_A.device) >= sizes_A[:, None]
    ids_AW = by_id.values.gather(1, by_value.indices).masked_fill_(beyond_AW, shifted_AV.shape[1])
    return settled_A, ids_AW.sort(dim=-1).values


def _among_all(shifted_AV: Tensor, limits: TruncationLimits, total_A: Tensor) -> Tensor:
    """Return the ids of the survivors of truncation by ``limits`` of each row of ``shifted_AV``, ascending and padded
    with the size of the vocabulary, searched in the whole vocabulary. ``total_A`` are the sums that :func:`_totals`
    returned."""
    vocab_size = shifted_AV.shape[1]
    if shifted_AV.is_cpu:  # numpy sorts numbers several times faster
        falling_AV = -torch.from_numpy(np.sort(-shifted_AV.numpy(), axis=-1))
    else:
        falling_AV = shifted_AV.sort(dim=-1, descending=True).values
    sizes_A, last_A, _ = _survivors(falling_AV, limits, total_A)
    above_AV = shifted_AV > last_A[:, None]
    level_AV = shifted_AV == last_A[:, None]
    num_level_A = sizes_A - above_AV.sum(dim=-1)
    split = (level_AV.sum(dim=-1) > num_level_A).nonzero()[:, 0]
    level_AV[split] &= level_AV[split].cumsum(dim=-1) <= num_level_A[split, None]
    rows_E, ids_E = (above_AV | level_AV).nonzero(as_tuple=True)
    starts_A = sizes_A.cumsum(dim=0) - sizes_A
    ids_AK = torch.full((len(shifted_AV), int(sizes_A.max())), vocab_size, device=shifted_AV.device)
    ids_AK[rows_E, torch.arange(len(ids_E), device=ids_E.device) - starts_A[rows_E]] = ids_E
    return ids_AK


def _survivors(values_AW: Tensor, limits: TruncationLimits, total_A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row the number of survivors of truncation by ``limits`` among its W most likely tokens, the
    shifted logit of the last survivor, and the shifted logit of the k-th token. ``values_AW`` are the shifted logits of
    the W tokens, descending; ``total_A`` are the sums that :func:`_totals` returned."""
    width = values_AW.shape[1]
    weights_AW = values_AW.exp().double()
    mass_AW = weights_AW.cumsum(dim=-1)
    limited_A = limits.top_k_R > 0
    place_A = torch.where(limited_A, limits.top_k_R, width).clamp_(max=width) - 1
    kth_A = values_AW.gather(1, place_A[:, None])[:, 0]
    sizes_A = (values_AW >= kth_A[:, None]).sum(dim=-1)
    base_A = torch.where(limited_A, mass_AW.gather(1, sizes_A[:, None] - 1)[:, 0], total_A)
    nucleus_A = (mass_AW < (limits.top_p_R * base_A)[:, None]).sum(dim=-1) + 1
    sizes_A = torch.where(limits.top_p_R < 1, torch.minimum(sizes_A, nucleus_A), sizes_A)
    likely_A = ((weights_AW >= limits.min_p_R[:, None]) & (weights_AW > 0)).sum(dim=-1)
    sizes_A = torch.minimum(sizes_A, likely_A)
    return sizes_A, values_AW.gather(1, sizes_A[:, None] - 1)[:, 0], kth_A


def uniforms(keys_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a uniform number in [0, 1) for each pair of a key in ``keys_R`` and a position in ``positions_R``:
    splitmix64 used as a counter-based hash.

    The numbers have 52 bits, so that the product of the largest one and any sum rounds to less than the sum.

    >>> bool((uniforms(np.array([3, 3], np.uint64), np.array([0, 1])) < 1).all())
    True
    """
    bits = splitmix(keys_R + positions_R.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output of the random number generator splitmix64 (Steele, Lea, Flood 2014) for each state of 64 bits;
    equal states give equal outputs. Sums and products of uint64 wrap around."""
    mixed = state + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_A
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_B
    return mixed ^ (mixed >> np.uint64(31))
