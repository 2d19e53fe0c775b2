"""Division of a batch into micro-batches of whole samples, with a bounded number of token positions, balanced and
without padding.

    samples ──▶ units: single samples, or prefix trees of samples that begin alike (tree.py)
            ──▶ as few bins as first-fit decreasing needs, or as many as keep a pass in the CPU's cache, balanced by
                their cost
            ──▶ dealt to the ranks, the costliest first: the same number for each, of about the same cost at the same
                time

Shape legend: S samples of the batch, N tokens of the batch, U units, K samples of one micro-batch, M tokens of one
micro-batch, R tokens of it that are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.tokens import IntColumn

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of computation, in units of one token's matrix products."""

    per_token: float = 1.0
    """Cost of a token without attention."""
    per_pair: float = 0.0
    """Cost of attention for a pair of tokens of the same sample."""
    best_rows: int | None = None
    """Number of tokens of one pass above which each token costs more; ``None`` if larger passes are never slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Samples that stay together in one micro-batch: a prefix tree, in which tokens that several of them begin with are
    computed once. A single sample is the smallest tree."""

    samples: Index
    """Indices of the samples in the batch, in the order of the tree."""
    shared_K: Index
    """For each sample, the number of its first tokens that it shares with the sample before it; 0 for the first. What
    it shares with an earlier one, it shares with all between."""

    @classmethod
    def apart(cls, samples: Index) -> Unit:
        """Return a unit of ``samples`` that share nothing."""
        return cls(samples=samples, shared_K=np.zeros_like(samples))

    def num_rows(self, lengths_S: Index) -> int:
        """Return the number of tokens of the unit that are computed, where a shared token counts once. ``lengths_S``
        are the lengths of all samples of the batch."""
        return int((lengths_S[self.samples] - self.shared_K).sum())

    def cost(self, lengths_S: Index, cost: Cost) -> float:
        """Return the cost of computing the unit, by the prices in ``cost``. The attention of a shared token is computed
        once too. ``lengths_S`` are the lengths of all samples of the batch."""
        pairs = float((lengths_S[self.samples] ** 2 - self.shared_K**2).sum())
        return cost.per_token * self.num_rows(lengths_S) + cost.per_pair * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The limits under which a batch is divided."""

    budget: int
    """Greatest number of token positions in one micro-batch: ``learner.tokens_per_microbatch``."""
    num_ranks: int = 1
    """Number of ranks to which micro-batches are dealt."""
    cost: Cost = field(default_factory=Cost)
    """The cost of computation, by which micro-batches are balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole samples of a batch, one after the other and in the order of the batch, that are computed in one forward and
    backward pass."""

    samples_K: Index
    """Indices of the samples in the batch, ascending."""
    lengths_K: Index
    """Number of tokens of each sample."""
    places_M: Index
    """Index of each token in the batch's columns: ``column_N[places_M]`` is the micro-batch's column."""
    rows_M: Index | None = None
    """Row of the pass in which each token is computed, if samples share rows; ``None`` if each token has its own
    row."""

    @property
    def places_R(self) -> Index:
        """Return the index in the batch's columns of the token that each row of the pass computes, ``[R]``. For a
        shared row it is the first of its tokens."""
        if self.rows_M is None:
            return self.places_M
        _, first_R = np.unique(self.rows_M, return_index=True)
        return self.places_M[first_R]

    def positions_M(self) -> Index:
        """Return the position of each token within its sample, from 0, ``[M]``."""
        return ragged_arange(np.zeros_like(self.lengths_K), self.lengths_K)

    def local_samples_M(self) -> Index:
        """Return the index of each token's sample among those of this micro-batch, from 0, ``[M]``."""
        return np.repeat(np.arange(len(self.lengths_K)), self.lengths_K)

    @classmethod
    def of(cls, units: Sequence[Unit], lengths_S: Index) -> MicroBatch:
        """Return the micro-batch of the samples of ``units``, from a batch whose samples have the lengths
        ``lengths_S``. Without units it is empty; a rank computes an empty one while the others compute theirs."""
        members = np.sort(np.concatenate([np.zeros(0, np.int64), *(unit.samples for unit in units)]))
        lengths_K, starts_S = lengths_S[members], np.cumsum(lengths_S) - lengths_S
        shared = any(unit.shared_K.any() for unit in units)
        return cls(
            samples_K=members,
            lengths_K=lengths_K,
            places_M=ragged_arange(starts_S[members], lengths_K),
            rows_M=_rows(units, members, lengths_K) if shared else None,
        )

    @classmethod
    def whole(cls, lengths_S: IntColumn) -> MicroBatch:
        """Return a whole batch, whose samples have the lengths ``lengths_S``, as one micro-batch."""
        lengths = lengths_S.astype(np.int64)
        return cls(samples_K=np.arange(len(lengths)), lengths_K=lengths, places_M=np.arange(lengths.sum()))


def ragged_arange(starts_K: Index, lengths_K: Index) -> Index:
    """Return ``start, start+1, …``, ``length`` numbers for each pair of start and length, one after the other.

    >>> ragged_arange(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends_K = np.cumsum(lengths_K)
    total = int(ends_K[-1]) if len(ends_K) else 0
    places: Index = np.arange(total) + np.repeat(starts_K - (ends_K - lengths_K), lengths_K)
    return places


def _rows(units: Sequence[Unit], members: Index, lengths_K: Index) -> Index:
    """Return the row of the pass in which each token of a micro-batch is computed, ``[M]``. Tokens that a sample shares
    use the rows of the sample before it in its unit. ``members`` are the samples of the micro-batch, ascending, and
    ``lengths_K`` their lengths."""
    starts_K = np.cumsum(lengths_K) - lengths_K
    computed_M = np.arange(int(lengths_K.sum()))
    for unit in units:
        starts = starts_K[np.searchsorted(members, unit.samples)]
        for before, start, shared in zip(starts[:-1], starts[1:], unit.shared_K[1:], strict=True):
            computed_M[start : start + shared] = computed_M[before : before + shared]
    rows_M: Index = np.unique(computed_M, return_inverse=True)[1]
    return rows_M


def microbatches(lengths_S: IntColumn, samples: Index, tokens_per_microbatch: int) -> list[MicroBatch]:
    """Divide the chosen ``samples`` of a batch with samples of ``lengths_S`` tokens into micro-batches of at most
    ``tokens_per_microbatch`` tokens, for a single rank. The same input gives the same result.

    Raises :class:`~headrace.base.errors.RunError` for a sample that is longer than ``tokens_per_microbatch``.

    >>> cut = microbatches(np.array([3, 2, 4, 1], np.int32), np.arange(4), 5)
    >>> [(m.samples_K.tolist(), m.places_M.tolist()) for m in cut]
    [([0, 1], [0, 1, 2, 3, 4]), ([2, 3], [5, 6, 7, 8, 9])]
    """
    return plan(lengths_S, singly(samples), Packing(budget=tokens_per_microbatch))[0]


def singly(samples: Index) -> list[Unit]:
    """Return each of the ``samples``, indices into a batch, as a unit of its own."""
    return [Unit.apart(samples[place : place + 1]) for place in range(len(samples))]


def groups_whole(batch: Batch, samples: Index) -> list[Unit]:
    """Return the chosen ``samples`` as units of whole groups, for losses that compare the samples of a group."""
    groups_K = batch.groups_S[samples]
    return [Unit.apart(np.sort(samples[groups_K == group])) for group in dict.fromkeys(groups_K.tolist())]


def plan(lengths_S: IntColumn, units: Sequence[Unit], packing: Packing) -> list[list[MicroBatch]]:
    """Return the micro-batches of every rank, of whole ``units``: the same number for each rank; the last may be empty.
    The same input gives the same plan.

    Ranks that wait for each other after every micro-batch compute about equally costly ones at the same time. Raises
    :class:`~headrace.base.errors.RunError` for a unit that fits into no micro-batch.

    >>> ranks = plan(np.array([3, 2, 4], np.int32), singly(np.arange(3)), Packing(budget=4, num_ranks=2))
    >>> [[micro.samples_K.tolist() for micro in rank] for rank in ranks]
    [[[2], []], [[0], [1]]]
    """
    lengths = lengths_S.astype(np.int64)
    rows_U = np.array([unit.num_rows(lengths) for unit in units], np.int64)
    cost_U = np.array([unit.cost(lengths, packing.cost) for unit in units])
    _refuse_long(units, rows_U, packing.budget)
    best = packing.cost.best_rows
    wanted = 0 if best is None else -(-int(rows_U.sum()) // max(best, int(rows_U.max(initial=1))))
    bins = pack(rows_U, packing.budget, cost_U, multiple_of=packing.num_ranks, at_least=wanted)
    costs = [float(cost_U[members].sum()) for members in bins]
    order = sorted(range(len(bins)), key=lambda number: (-costs[number], bins[number].min(initial=len(units))))
    micros = [MicroBatch.of([units[unit] for unit in bins[number]], lengths) for number in order]
    ranks: list[list[MicroBatch]] = [[] for _ in range(packing.num_ranks)]
    for turn, first in enumerate(range(0, len(micros), packing.num_ranks)):
        for rank, micro in enumerate(
            micros[first : first + packing.num_ranks]
        ):  # in alternating order, which balances the totals
            ranks[rank if turn % 2 == 0 else packing.num_ranks - 1 - rank].append(micro)
    return ranks


def _refuse_long(units: Sequence[Unit], rows_U: Index, budget: int) -> None:
    """Raise :class:`~headrace.base.errors.RunError` if a unit, in practice a long sample, has more rows than
    ``budget``, the tokens of one micro-batch. ``rows_U`` holds the rows of each unit."""
    if not len(rows_U) or rows_U.max() <= budget:
        return
    longest = int(np.argmax(rows_U))
    raise RunError(
        f"sample {units[longest].samples[0]} of the batch has {rows_U[longest]} tokens, "
        f"but one micro-batch holds learner.tokens_per_microbatch={budget}",
        remedy=f"set learner.tokens_per_microbatch >= {rows_U[longest]}, or sample fewer new tokens",
    )


def pack(
    rows_U: Index,
    capacity: int,
    cost_U: npt.NDArray[np.float64] | None = None,
    multiple_of: int = 1,
    at_least: int = 0,
) -> list[Index]:
    """Distribute units over as few bins as first-fit decreasing needs, but ``at_least`` that many, rounded up to a
    multiple of ``multiple_of`` and balanced by cost.

    The costliest unit comes first, and each goes to the cheapest bin with enough space; if one fits nowhere, the result
    of first-fit is used. Ties go to the earlier unit and bin. ``rows_U`` is the size of each unit, at most
    ``capacity``; ``cost_U`` is its cost, by default its size. Returns the members of each bin; bins added by the
    rounding may be empty.
    """
    first_U = _first_fit(rows_U, capacity)
    needed = int(first_U.max()) + 1 if len(first_U) else 0
    num_bins = -(-max(needed, at_least) // multiple_of) * multiple_of
    even_U = _cheapest_first(rows_U, rows_U if cost_U is None else cost_U, num_bins, capacity)
    if even_U is None:
        even_U, num_bins = first_U, -(-needed // multiple_of) * multiple_of
    return [np.flatnonzero(even_U == number) for number in range(num_bins)]


def _first_fit(rows_U: Index, capacity: int) -> Index:
    """Return the bin of each unit, by first fit in order of falling size. ``rows_U`` holds the sizes; a bin holds
    ``capacity``."""
    room = np.full(len(rows_U), capacity, np.int64)
    bins_U = np.zeros(len(rows_U), np.int64)
    for unit in np.argsort(-rows_U, kind="stable"):
        bins_U[unit] = number = int(np.argmax(room >= rows_U[unit]))
        room[number] -= rows_U[unit]
    return bins_U


def _cheapest_first(
    rows_U: Index, cost_U: npt.NDArray[np.float64] | Index, num_bins: int, capacity: int
) -> Index | None:
    """Assign units to ``num_bins`` bins, the most expensive first and each to the cheapest bin that has room for its
    rows; a bin holds ``capacity`` rows. Return the bin of each unit; ``None`` if one fits nowhere."""
    room, spent = np.full(num_bins, capacity, np.int64), np.zeros(num_bins)
    bins_U = np.zeros(len(rows_U), np.int64)
    for unit in np.argsort(-cost_U, kind="stable"):
        fits = room >= rows_U[unit]
        if not fits.any():
            return None
        bins_U[unit] = number = int(np.argmin(np.where(fits, spent, np.inf)))
        room[number] -= rows_U[unit]
        spent[number] += cost_U[unit]
    return bins_U
