"""A batch cut into micro-batches: whole samples, a bounded number of token positions, balanced, no padding.

    samples ──▶ units: single samples, or siblings that share a prefix (prefixes.py)
            ──▶ as few bins as first-fit decreasing needs, or as many as keep a pass in the processor's cache, evenly
                filled by what they cost to compute
            ──▶ dealt to the ranks, the costliest first: as many for each, of about the same cost at the same time

Shape legend: S samples of the batch, N tokens of the batch, U units, K samples of one micro-batch, M tokens of one
micro-batch, R tokens of it that are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.base.errors import RunError
from headrace.base.types.tokens import IntColumn

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What computing costs, in the unit of one token's matrices."""

    per_token: float = 1.0
    """Everything but attention."""
    per_pair: float = 0.0
    """Attention, for a token of a sample and a token of the same sample."""
    best_rows: int | None = None
    """Tokens of one pass above which each costs more; ``None`` where larger passes are never slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Samples that stay together in one micro-batch."""

    samples: Index
    """Their places in the batch, ascending."""
    prefix: int = 0
    """The first tokens of each, which are the same in all of them and are computed once."""

    def num_rows(self, lengths_S: Index) -> int:
        """Tokens that are computed."""
        return int((lengths_S[self.samples] - self.prefix).sum()) + self.prefix

    def cost(self, lengths_S: Index, cost: Cost) -> float:
        """Of computing it; attention is computed for every sample on its own."""
        return cost.per_token * self.num_rows(lengths_S) + cost.per_pair * float((lengths_S[self.samples] ** 2).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a batch is to be cut."""

    budget: int
    """Token positions that one micro-batch may compute: ``learner.tokens_per_microbatch``."""
    num_ranks: int = 1
    """Over how many the micro-batches are spread."""
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Whole samples of a batch, one after the other, in the batch's order."""

    samples_K: Index
    """Places of the samples in the batch, ascending."""
    lengths_K: Index
    """Tokens of each."""
    places_M: Index
    """Where each token lies in the batch's columns: ``column_N[places_M]`` is the micro-batch's column."""
    rows_M: Index | None = None
    """The row of the pass in which each token is computed, where samples share rows; ``None`` for a row each."""

    @property
    def places_R(self) -> Index:
        """Where the token of each computed row lies in the batch's columns."""
        if self.rows_M is None:
            return self.places_M
        _, first_R = np.unique(self.rows_M, return_index=True)
        return self.places_M[first_R]

    def positions_M(self) -> Index:
        """Position of each token within its sample, from 0."""
        return ragged_arange(np.zeros_like(self.lengths_K), self.lengths_K)

    def local_samples_M(self) -> Index:
        """The place, from 0, of each token's sample in this micro-batch."""
        return np.repeat(np.arange(len(self.lengths_K)), self.lengths_K)

    @classmethod
    def of(cls, units: Sequence[Unit], lengths_S: Index) -> MicroBatch:
        """The samples of the units; of no unit, an empty one, which a rank computes beside the others' full ones."""
        members = np.sort(np.concatenate([np.zeros(0, np.int64), *(unit.samples for unit in units)]))
        lengths_K, starts_S = lengths_S[members], np.cumsum(lengths_S) - lengths_S
        shared = any(unit.prefix for unit in units)
        return cls(
            samples_K=members,
            lengths_K=lengths_K,
            places_M=ragged_arange(starts_S[members], lengths_K),
            rows_M=_rows(units, members, lengths_K) if shared else None,
        )

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


def _rows(units: Sequence[Unit], members: Index, lengths_K: Index) -> Index:
    """Rows in the order in which tokens come first; the prefix of a unit's later samples lies in the first one's."""
    first_K, prefix_K = np.arange(len(members)), np.zeros(len(members), np.int64)
    for unit in units:
        place = np.searchsorted(members, unit.samples)
        first_K[place[1:]], prefix_K[place[1:]] = place[0], unit.prefix
    own_K = lengths_K - prefix_K
    starts_K = np.cumsum(own_K) - own_K
    positions_M = ragged_arange(np.zeros_like(lengths_K), lengths_K)
    sample_M = np.repeat(np.arange(len(members)), lengths_K)
    inside_M = positions_M < prefix_K[sample_M]
    rows: Index = positions_M + np.where(inside_M, starts_K[first_K][sample_M], (starts_K - prefix_K)[sample_M])
    return rows


def microbatches(lengths_S: IntColumn, samples: Index, tokens_per_microbatch: int) -> list[MicroBatch]:
    """Cut the chosen ``samples`` of a batch with samples of ``lengths_S`` tokens. The same input gives the same cut.

    Raises :class:`~headrace.base.errors.RunError` for a sample that is longer than ``tokens_per_microbatch``.

    >>> cut = microbatches(np.array([3, 2, 4, 1], np.int32), np.arange(4), 5)
    >>> [(m.samples_K.tolist(), m.places_M.tolist()) for m in cut]
    [([0, 1], [0, 1, 2, 3, 4]), ([2, 3], [5, 6, 7, 8, 9])]
    """
    return plan(lengths_S, singly(samples), Packing(budget=tokens_per_microbatch))[0]


def singly(samples: Index) -> list[Unit]:
    """Each sample by itself."""
    return [Unit(samples=samples[place : place + 1]) for place in range(len(samples))]


def plan(lengths_S: IntColumn, units: Sequence[Unit], packing: Packing) -> list[list[MicroBatch]]:
    """The micro-batches of every rank, as many for each; the last may be empty. The same input gives the same plan.

    Ranks that wait for each other after every micro-batch compute about equally costly ones at the same time. Raises
    :class:`~headrace.base.errors.RunError` for a unit that no micro-batch holds.

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
        for rank, micro in enumerate(micros[first : first + packing.num_ranks]):  # back and forth: totals even out
            ranks[rank if turn % 2 == 0 else packing.num_ranks - 1 - rank].append(micro)
    return ranks


def _refuse_long(units: Sequence[Unit], rows_U: Index, budget: int) -> None:
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
    """Spread units over as few bins as first-fit decreasing needs, but ``at_least`` so many, rounded up to a multiple,
    evenly filled by cost.

    Costliest first, each to the cheapest bin that has room; where one finds no room, first-fit's own answer stands.
    Ties go to the earlier unit and bin. ``rows_U``: what each takes of a bin's ``capacity``, at most all of it;
    ``cost_U``: what it costs, its rows by default. Returns each bin's members; bins of the rounding may be empty.
    """
    first_U = _first_fit(rows_U, capacity)
    needed = int(first_U.max()) + 1 if len(first_U) else 0
    num_bins = -(-max(needed, at_least) // multiple_of) * multiple_of
    even_U = _cheapest_first(rows_U, rows_U if cost_U is None else cost_U, num_bins, capacity)
    if even_U is None:
        even_U, num_bins = first_U, -(-needed // multiple_of) * multiple_of
    return [np.flatnonzero(even_U == number) for number in range(num_bins)]


def _first_fit(rows_U: Index, capacity: int) -> Index:
    room = np.full(len(rows_U), capacity, np.int64)
    bins_U = np.zeros(len(rows_U), np.int64)
    for unit in np.argsort(-rows_U, kind="stable"):
        bins_U[unit] = number = int(np.argmax(room >= rows_U[unit]))
        room[number] -= rows_U[unit]
    return bins_U


def _cheapest_first(
    rows_U: Index, cost_U: npt.NDArray[np.float64] | Index, num_bins: int, capacity: int
) -> Index | None:
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
