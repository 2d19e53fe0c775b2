"""The division of a batch into micro-batches of whole samples: of limited size, balanced by cost, and without padding.

    samples ──▶ units: single samples, or prefix trees of samples with common first tokens (tree.py)
            ──▶ bins: as few as first-fit decreasing needs, or as many as keep a pass in the CPU's cache; balanced
            ──▶ ranks: the same number of bins for each, so that bins of about the same cost are computed at a time

Shape legend: S samples of the batch, N tokens of the batch, U units, K samples of one micro-batch, M tokens of one
micro-batch, R rows of its pass (computed tokens).
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
    """The cost model of a pass; the unit is the cost of one token without attention."""

    per_token: float = 1.0
    """The cost of a token without attention."""
    per_pair: float = 0.0
    """The cost of attention for each of the T² pairs of tokens of a sample."""
    best_rows: int | None = None
    """The number of tokens of a pass above which each token costs more; ``None`` if larger passes are never slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Samples that are computed in one micro-batch, as a prefix tree: first tokens that several samples have in common
    are computed once. A single sample is the smallest tree."""

    samples: Index
    """The indices of the samples in the batch, in the order of the tree."""
    shared_K: Index
    """For each sample, the number of its first tokens that it shares with the previous sample; 0 for the first sample.
    Tokens that a sample shares with an earlier one are shared by all samples between them."""

    @classmethod
    def apart(cls, samples: Index) -> Unit:
        """Return a unit of ``samples`` without shared tokens."""
        return cls(samples=samples, shared_K=np.zeros_like(samples))

    def num_rows(self, lengths_S: Index) -> int:
        """Return the number of computed tokens of the unit; a shared token counts once. ``lengths_S`` are the lengths
        of all samples of the batch."""
        return int((lengths_S[self.samples] - self.shared_K).sum())

    def cost(self, lengths_S: Index, cost: Cost) -> float:
        """Return the cost of the unit by the cost model ``cost``. The attention of a shared token also counts once.
        ``lengths_S`` are the lengths of all samples of the batch."""
        pairs = float((lengths_S[self.samples] ** 2 - self.shared_K**2).sum())
        return cost.per_token * self.num_rows(lengths_S) + cost.per_pair * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The parameters of the division of a batch."""

    budget: int
    """The most computed tokens of a micro-batch: ``learner.tokens_per_microbatch``."""
    num_ranks: int = 1
    """The number of ranks among which micro-batches are divided."""
    cost: Cost = field(default_factory=Cost)
    """The cost model by which micro-batches are balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole samples of a batch, one after the other and in the order of the batch, that are computed in one forward and
    backward pass."""

    samples_K: Index
    """The indices of the samples in the batch, ascending."""
    lengths_K: Index
    """The number of tokens of each sample."""
    places_M: Index
    """The index of each token in the batch's columns: ``column_N[places_M]`` is the micro-batch's column."""
    rows_M: Index | None = None
    """The row of the pass that computes each token, if samples share rows; ``None`` if each token has its own row."""

    @property
    def places_R(self) -> Index:
        """Return the index in the batch's columns of the token that each row of the pass computes, ``[R]``. For a
        shared row it is the row's first token."""
        if self.rows_M is None:
            return self.places_M
        _, first_R = np.unique(self.rows_M, return_index=True)
        return self.places_M[first_R]

    def local_samples_M(self) -> Index:
        """Return for each token the index of its sample among the samples of this micro-batch, from 0, ``[M]``."""
        return np.repeat(np.arange(len(self.lengths_K)), self.lengths_K)

    @classmethod
    def from_units(cls, units: Sequence[Unit], lengths_S: Index) -> MicroBatch:
        """Return the micro-batch of the samples of ``units``, from a batch whose samples have the lengths
        ``lengths_S``. Without units it is empty; a rank computes an empty micro-batch while other ranks compute one
        with samples."""
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
        """Return one micro-batch of a whole batch, whose samples have the lengths ``lengths_S``."""
        lengths = lengths_S.astype(np.int64)
        return cls(samples_K=np.arange(len(lengths)), lengths_K=lengths, places_M=np.arange(lengths.sum()))


def ragged_arange(starts_K: Index, lengths_K: Index) -> Index:
    """Return the concatenated ranges ``start, …, start + length − 1`` for each pair of start and length.

    >>> ragged_arange(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends_K = np.cumsum(lengths_K)
    total = int(ends_K[-1]) if len(ends_K) else 0
    places: Index = np.arange(total) + np.repeat(starts_K - (ends_K - lengths_K), lengths_K)
    return places


def _rows(units: Sequence[Unit], members: Index, lengths_K: Index) -> Index:
    """Return for each token of a micro-batch the row of the pass that computes it, ``[M]``. Tokens that a sample shares
    with the previous sample of its unit have the same rows. ``members`` are the samples of the micro-batch, ascending,
    and ``lengths_K`` their lengths."""
    starts_K = np.cumsum(lengths_K) - lengths_K
    computed_M = np.arange(int(lengths_K.sum()))
    for unit in units:
        starts = starts_K[np.searchsorted(members, unit.samples)]
        for before, start, shared in zip(starts[:-1], starts[1:], unit.shared_K[1:], strict=True):
            computed_M[start : start + shared] = computed_M[before : before + shared]
    rows_M: Index = np.unique(computed_M, return_inverse=True)[1]
    return rows_M


def microbatches(lengths_S: IntColumn, samples: Index, tokens_per_microbatch: int) -> list[MicroBatch]:
    """Divide the ``samples`` of a batch into micro-batches of at most ``tokens_per_microbatch`` tokens, for a single
    rank. ``lengths_S`` are the lengths of all samples of the batch. The result is deterministic.

    Raises :class:`~headrace.base.errors.RunError` for a sample that is longer than ``tokens_per_microbatch``.

    >>> cut = microbatches(np.array([3, 2, 4, 1], np.int32), np.arange(4), 5)
    >>> [(m.samples_K.tolist(), m.places_M.tolist()) for m in cut]
    [([0, 1], [0, 1, 2, 3, 4]), ([2, 3], [5, 6, 7, 8, 9])]
    """
    return plan(lengths_S, singly(samples), Packing(budget=tokens_per_microbatch))[0]


def singly(samples: Index) -> list[Unit]:
    """Return one unit for each of ``samples``, indices into a batch."""
    return [Unit.apart(samples[place : place + 1]) for place in range(len(samples))]


def groups_whole(batch: Batch, samples: Index) -> list[Unit]:
    """Return one unit for each group of the ``samples`` of ``batch``, for losses that compare the samples of a
    group."""
    groups_K = batch.groups_S[samples]
    return [Unit.apart(np.sort(samples[groups_K == group])) for group in dict.fromkeys(groups_K.tolist())]


def plan(lengths_S: IntColumn, units: Sequence[Unit], packing: Packing) -> list[list[MicroBatch]]:
    """Return a list of micro-batches for each rank, which consist of whole ``units``. ``lengths_S`` is the number of
    tokens of each sample of the batch. Each rank has the same number of micro-batches; the last ones may be empty. The
    result is deterministic.

    Since ranks wait for each other after every micro-batch, micro-batches with the same index have about the same cost
    on all ranks. Raises :class:`~headrace.base.errors.RunError` for a unit that is larger than a micro-batch.

    >>> ranks = plan(np.array([3, 2, 4], np.int32), singly(np.arange(3)), Packing(budget=4, num_ranks=2))
    >>> [[micro.samples_K.tolist() for micro in rank] for rank in ranks]
    [[[2], []], [[0], [1]]]
    """
    lengths = lengths_S.astype(np.int64)
    rows_U = np.array([unit.num_rows(lengths) for unit in units], np.int64)
    cost_U = np.array([unit.cost(lengths, packing.cost) for unit in units])
    _refuse_long(units, rows_U, packing.budget)
    best = packing.cost.best_rows
    least_bins = 0 if best is None else -(-int(rows_U.sum()) // max(best, int(rows_U.max(initial=1))))
    bins = pack(rows_U, packing.budget, cost_U, multiple_of=packing.num_ranks, at_least=least_bins)
    costs = [float(cost_U[members].sum()) for members in bins]
    order = sorted(range(len(bins)), key=lambda number: (-costs[number], bins[number].min(initial=len(units))))
    micros = [MicroBatch.from_units([units[unit] for unit in bins[number]], lengths) for number in order]
    ranks: list[list[MicroBatch]] = [[] for _ in range(packing.num_ranks)]
    for turn, first in enumerate(range(0, len(micros), packing.num_ranks)):
        # in alternating order of the ranks, which balances their totals
        for rank, micro in enumerate(micros[first : first + packing.num_ranks]):
            ranks[rank if turn % 2 == 0 else packing.num_ranks - 1 - rank].append(micro)
    return ranks


def _refuse_long(units: Sequence[Unit], rows_U: Index, budget: int) -> None:
    """Raise :class:`~headrace.base.errors.RunError` if a unit, in practice a long sample, has more than ``budget``
    rows, the limit of a micro-batch. ``rows_U`` is the number of rows of each unit."""
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
    """Distribute units over bins, balanced by cost, and return the indices of the units in each bin. The number of bins
    is the number that first-fit decreasing needs, or ``at_least`` if that is larger, rounded up to a multiple of
    ``multiple_of``.

    In falling order of cost, each unit is assigned to the bin with the lowest cost that has enough space. If a unit
    fits no bin, the result of first-fit decreasing is returned instead. Ties are resolved in favour of the earlier unit
    and bin. ``rows_U`` is the size of each unit, at most ``capacity``; ``cost_U`` is its cost, by default its size.
    Bins may be empty.
    """
    first_U = _first_fit(rows_U, capacity)
    needed = int(first_U.max()) + 1 if len(first_U) else 0
    num_bins = -(-max(needed, at_least) // multiple_of) * multiple_of
    even_U = _balance(rows_U, rows_U if cost_U is None else cost_U, num_bins, capacity)
    if even_U is None:
        even_U, num_bins = first_U, -(-needed // multiple_of) * multiple_of
    return [np.flatnonzero(even_U == number) for number in range(num_bins)]


def _first_fit(rows_U: Index, capacity: int) -> Index:
    """Return the index of the bin of each unit, by first fit in falling order of size. ``rows_U`` are the sizes, and
    ``capacity`` is the size of a bin."""
    free_rows = np.full(len(rows_U), capacity, np.int64)
    bins_U = np.zeros(len(rows_U), np.int64)
    for unit in np.argsort(-rows_U, kind="stable"):
        bins_U[unit] = number = int(np.argmax(free_rows >= rows_U[unit]))
        free_rows[number] -= rows_U[unit]
    return bins_U


def _balance(rows_U: Index, cost_U: npt.NDArray[np.float64] | Index, num_bins: int, capacity: int) -> Index | None:
    """Assign units, in falling order of cost, to the bin with the lowest cost that has space for their rows; a bin has
    ``capacity`` rows. Return the index of the bin of each unit; ``None`` if a unit fits no bin."""
    free_rows, bin_costs = np.full(num_bins, capacity, np.int64), np.zeros(num_bins)
    bins_U = np.zeros(len(rows_U), np.int64)
    for unit in np.argsort(-cost_U, kind="stable"):
        fits = free_rows >= rows_U[unit]
        if not fits.any():
            return None
        bins_U[unit] = number = int(np.argmin(np.where(fits, bin_costs, np.inf)))
        free_rows[number] -= rows_U[unit]
        bin_costs[number] += cost_U[unit]
    return bins_U
