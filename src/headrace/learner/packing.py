"""A batch cut into micro-batches: whole samples, a bounded number of token positions, balanced, no padding.

Shape legend: S samples of the batch, N tokens of the batch, K samples of one micro-batch, M tokens of one micro-batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import RunError
from headrace.types.tokens import IntColumn

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole samples of a batch, one after the other, in the batch's order."""

    samples_K: Index
    """Places of the samples in the batch, ascending."""
    lengths_K: Index
    """Tokens of each."""
    places_M: Index
    """Where each token lies in the batch's columns: ``column_N[places_M]`` is the micro-batch's column."""

    def positions_M(self) -> Index:
        """Position of each token within its sample, from 0."""
        return ragged_arange(np.zeros_like(self.lengths_K), self.lengths_K)

    def local_samples_M(self) -> Index:
        """The place, from 0, of each token's sample in this micro-batch."""
        return np.repeat(np.arange(len(self.lengths_K)), self.lengths_K)

    @classmethod
    def whole(cls, lengths_S: IntColumn) -> MicroBatch:
        """The whole batch as one."""
        lengths = lengths_S.astype(np.int64)
        return cls(samples_K=np.arange(len(lengths)), lengths_K=lengths, places_M=np.arange(lengths.sum()))


def ragged_arange(starts_K: Index, lengths_K: Index) -> Index:
    """``start, start+1, …`` for each pair, one after the other.

    >>> ragged_arange(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends_K = np.cumsum(lengths_K)
    total = int(ends_K[-1]) if len(ends_K) else 0
    places: Index = np.arange(total) + np.repeat(starts_K - (ends_K - lengths_K), lengths_K)
    return places


def microbatches(lengths_S: IntColumn, samples: Index, tokens_per_microbatch: int) -> list[MicroBatch]:
    """Cut the chosen ``samples`` of a batch with samples of ``lengths_S`` tokens. The same input gives the same cut.

    Raises :class:`~headrace.errors.RunError` for a sample that is longer than ``tokens_per_microbatch``.

    >>> cut = microbatches(np.array([3, 2, 4, 1], np.int32), np.arange(4), 5)
    >>> [(m.samples_K.tolist(), m.places_M.tolist()) for m in cut]
    [([0, 1], [0, 1, 2, 3, 4]), ([2, 3], [5, 6, 7, 8, 9])]
    """
    lengths = lengths_S.astype(np.int64)
    longest = int(samples[np.argmax(lengths[samples])]) if len(samples) else 0
    if len(samples) and lengths[longest] > tokens_per_microbatch:
        raise RunError(
            f"sample {longest} of the batch has {lengths[longest]} tokens, "
            f"but one micro-batch holds learner.tokens_per_microbatch={tokens_per_microbatch}",
            remedy=f"set learner.tokens_per_microbatch >= {lengths[longest]}, or sample fewer new tokens",
        )
    starts_S = np.cumsum(lengths) - lengths
    chosen = [np.sort(samples[members]) for members in pack(lengths[samples], tokens_per_microbatch)]
    return [
        MicroBatch(
            samples_K=members,
            lengths_K=lengths[members],
            places_M=ragged_arange(starts_S[members], lengths[members]),
        )
        for members in sorted(chosen, key=lambda members: int(members[0]))
    ]


def pack(lengths_S: Index, capacity: int) -> list[Index]:
    """Spread samples over as few bins as first-fit decreasing needs, evenly filled; each length is ≤ ``capacity``.

    Longest first, each to the emptiest of those bins; where that overflows a bin, first-fit's own answer stands.
    Ties go to the earlier sample and bin. Returns each bin's members.
    """
    order = np.argsort(-lengths_S, kind="stable")
    bins_S = _first_fit(lengths_S, order, capacity)
    num_bins = int(bins_S.max()) + 1 if len(bins_S) else 0
    even_S = _emptiest_first(lengths_S, order, num_bins)
    if np.bincount(even_S, weights=lengths_S, minlength=num_bins).max(initial=0) <= capacity:
        bins_S = even_S
    return [np.flatnonzero(bins_S == number) for number in range(num_bins)]


def _first_fit(lengths_S: Index, order: Index, capacity: int) -> Index:
    room = np.full(len(lengths_S), capacity, np.int64)
    bins_S = np.zeros(len(lengths_S), np.int64)
    for sample in order:
        bins_S[sample] = number = int(np.argmax(room >= lengths_S[sample]))
        room[number] -= lengths_S[sample]
    return bins_S


def _emptiest_first(lengths_S: Index, order: Index, num_bins: int) -> Index:
    filled = [(0, number) for number in range(num_bins)]
    bins_S = np.zeros(len(lengths_S), np.int64)
    for sample in order:
        tokens, number = filled[0]
        bins_S[sample] = number
        heapq.heapreplace(filled, (tokens + int(lengths_S[sample]), number))
    return bins_S
