"""The samples of a batch as prefix trees: whatever several samples begin with is computed once.

    samples ── sorted by their tokens ──▶ one order, in which neighbours share as much as any two samples can
            ── cut where that costs least ──▶ units of whole subtrees (packing.py), which fit into a micro-batch

A tree of any depth is written as this order together with, for each sample, the number of first tokens that it shares
with the sample before it. Everything else of a sample is a branch of its own:

    a b c d        shares 0
    a b c e f      shares 3
    a b g          shares 2
    h              shares 0      the tree has 4 + 2 + 1 + 1 = 8 tokens

It does not matter why samples begin alike: as answers to one prompt, as turns or forks of an episode, or by accident.
The tokens of a micro-batch are computed by one adapter (:meth:`~headrace.learner.forward.Forward.by_agent`), at
positions that count from the beginning of each sample; so two tokens are the same computation if their ids, their
recorded experts and all tokens before them are the same.

Shape legend: N tokens of the batch, S samples of the batch, K samples of one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.base.types.batch import Batch
from headrace.base.types.recorded import Routing
from headrace.learner.packing import Index, Packing, Unit

SLOWER = 1 / 6
"""The part by which a token of a pass beyond the best size for a CPU's cache is slower than others
(:data:`~headrace.learner.cost.CACHED_NUMBERS`)."""
RANK_PARTS = (1.0, 1.25, 1.5, 1.75, 2.0, 3.0)
"""Bounds on the size of a subtree that are tried for several ranks, as multiples of a rank's part of all tokens."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd factor that spreads the bits of a key: 2⁶⁴ divided by the golden ratio."""


class PrefixTrees:
    """The prefix trees of samples of one batch. The keys by which they are sorted are computed once."""

    def __init__(self, batch: Batch) -> None:
        """Prepare the trees of samples of ``batch``."""
        self._batch = batch
        self._lengths_S = batch.lengths_S.astype(np.int64)
        self._starts_S = np.cumsum(self._lengths_S) - self._lengths_S
        self._keys_N = _keys(batch)
        known_N = np.zeros(0, np.int64) if batch.routing is None else batch.routing.known_T.astype(np.int64)
        self._known_before_N = np.cumsum(known_N) - known_N

    def of(self, samples: Index) -> Unit:
        """Return the tree of the chosen ``samples``, indices into the batch, as one unit of any size. Samples whose
        beginnings are equal keep the order of the batch."""
        order = np.array(
            sorted(np.sort(samples).tolist(), key=lambda sample: self._keys_N[self._tokens(sample)].tobytes()), np.int64
        )
        shared_K = np.zeros(len(order), np.int64)
        if len(order) > 1:
            shared_K[1:] = self._common_keys(order)
        if self._batch.routing is not None:  # keys of tokens with recorded experts may agree by accident
            routing = self._batch.routing
            for place in np.flatnonzero(shared_K):
                one, other = order[place - 1 : place + 1].tolist()
                shared_K[place] = self._common(routing, one, other, int(shared_K[place]))
        return Unit(samples=order, shared_K=shared_K)

    def _tokens(self, sample: int) -> slice:
        """Return the place of a sample's tokens in the columns of the batch."""
        start = int(self._starts_S[sample])
        return slice(start, start + int(self._lengths_S[sample]))

    def _common_keys(self, order: Index) -> Index:
        """Return, for each sample in ``order`` but the first, the number of first tokens whose keys are those of the
        sample before it."""
        lengths = np.minimum(self._lengths_S[order[1:]], self._lengths_S[order[:-1]])
        firsts = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
        before, own = (np.repeat(self._starts_S[each], lengths) + places for each in (order[:-1], order[1:]))
        differs = self._keys_N[before] != self._keys_N[own]
        pairs = np.repeat(np.arange(len(lengths)), lengths)[differs]
        found, at = np.unique(pairs, return_index=True)
        lengths[found] = places[differs][at]
        return lengths

    def _common(self, routing: Routing, one: int, other: int, length: int) -> int:
        """Return how many of the ``length`` first tokens of two samples have the same ids and the same recorded
        experts, or both none, up to the first that do not."""
        first, second = (slice(start, start + length) for start in (self._starts_S[[one, other]]).tolist())
        same = self._batch.ids_N[first] == self._batch.ids_N[second]
        same &= routing.known_T[first] == routing.known_T[second]
        return self._common_experts(routing, first, second, _until_false(same))

    def _common_experts(self, routing: Routing, first: slice, second: slice, length: int) -> int:
        """Return how many of the ``length`` tokens that begin at the slices ``first`` and ``second`` were computed by
        the same experts, up to the first that were not. The same ones of them have a recorded routing."""
        known = np.flatnonzero(routing.known_T[first.start : first.start + length])
        if not len(known):
            return length
        rows = (int(self._known_before_N[side.start]) for side in (first, second))
        one, other = (routing.experts_RLK[row : row + len(known)] for row in rows)
        agreed = _until_false((one == other).all((1, 2)))
        return length if agreed == len(known) else int(known[agreed])


def cut_tree(tree: Unit, lengths_S: Index, packing: Packing) -> list[Unit]:
    """Divide a tree into subtrees that fit into a micro-batch, each a run of its samples, so that the fewest tokens are
    computed. ``lengths_S`` are the lengths of all samples of the batch.

    A cut computes the tokens that a sample shares with the sample before it again: the path of the subtree, and nothing
    else. A tree beyond ``packing.budget`` is always cut. Another is cut if that costs less than a pass that is larger
    than the best for the CPU's cache. With several ranks, of a few bounds on the size of a subtree that one is taken
    with which the busiest rank computes the fewest tokens. Where samples share nothing, there is always a cut. A sample
    that fits into no micro-batch is a unit of its own.
    """
    best = packing.cost.best_rows or packing.budget
    units = _cut(tree, lengths_S, packing.budget, best)
    if packing.num_ranks == 1:
        return units
    part = sum(unit.num_rows(lengths_S) for unit in units) / packing.num_ranks
    bounds = [int(part * factor) for factor in RANK_PARTS]
    cuts = [units, *(_cut(tree, lengths_S, bound, best) for bound in bounds if bound < packing.budget)]
    return min(cuts, key=lambda units: _busiest(units, lengths_S, packing.num_ranks))


def _busiest(units: Sequence[Unit], lengths_S: Index, num_ranks: int) -> float:
    """Return the number of tokens that the busiest of the ranks computes, if ``units`` are dealt well: those of the
    largest unit, or a rank's part of all."""
    rows = [unit.num_rows(lengths_S) for unit in units]
    return max(max(rows, default=0), sum(rows) / num_ranks)


def _cut(tree: Unit, lengths_S: Index, budget: int, best: int) -> list[Unit]:
    """Divide a tree into subtrees of at most ``budget`` tokens, so that the fewest are computed, where each token
    beyond the ``best`` size of a pass counts more by :data:`SLOWER`."""
    shared_K = tree.shared_K
    rows_K = np.concatenate([[0], np.cumsum(lengths_S[tree.samples] - shared_K)])
    units: list[Unit] = []
    for root, stop in pairwise([*np.flatnonzero(shared_K == 0).tolist(), len(shared_K)]):
        if rows_K[stop] - rows_K[root] <= min(best, budget):
            units.append(_subtree(tree, root, stop))
            continue
        begins_K = root + _cheapest(shared_K[root:stop], rows_K[root : stop + 1], budget, best)
        cuts = [stop]
        while cuts[-1] > root:
            cuts.append(int(begins_K[cuts[-1] - 1 - root]))
        units += [_subtree(tree, begin, end) for begin, end in pairwise(cuts[::-1])]
    return units


def _subtree(tree: Unit, begin: int, end: int) -> Unit:
    """Return the samples from ``begin`` to ``end`` of a tree as a unit, whose first sample shares nothing."""
    shared_K = np.concatenate([[0], tree.shared_K[begin + 1 : end]])
    return Unit(samples=tree.samples[begin:end], shared_K=shared_K)


def _cheapest(shared_K: Index, rows_K: Index, budget: int, best: int) -> Index:
    """Return where the last unit begins in the cheapest division of the first sample, of the first two, and so on up to
    all samples of one tree, ``[K]``. ``rows_K`` are the sums of the tokens that samples do not share with the one
    before, from 0 on."""
    begins_K = np.zeros(len(shared_K), np.int64)
    more_K = shared_K - rows_K[:-1]
    cost_K = np.zeros(len(shared_K))  # of all before a sample, and of the path that a unit which begins there repeats
    first = 0
    for end in range(1, len(rows_K)):
        while first < end - 1 and rows_K[end] - rows_K[first] > budget:
            first += 1
        rows = rows_K[end] + more_K[first:end]
        cost = cost_K[first:end] + SLOWER * np.maximum(rows - best, 0)
        cost[:-1][rows[:-1] > budget] = np.inf
        chosen = len(rows) - 1 - int(np.argmin(cost[::-1]))  # among equals, the shortest unit leaves the most freedom
        begins_K[end - 1] = first + chosen
        if end < len(shared_K):
            cost_K[end] = cost[chosen] + shared_K[end]
    return begins_K


def _keys(batch: Batch) -> npt.NDArray[np.uint64]:
    """Return a number for each token of the batch, ``[N]``, in the byte order in which bytes compare as numbers do.
    Tokens that may be shared have the same number; other tokens almost never have."""
    keys_N = batch.ids_N.astype(np.uint64)
    if batch.routing is not None:
        experts_RLK = batch.routing.experts_RLK
        experts_RE = experts_RLK.reshape(len(experts_RLK), experts_RLK.shape[1] * experts_RLK.shape[2])
        digest_R = np.ones(len(experts_RE), np.uint64)
        for experts_R in experts_RE.T:  # a column at a time, so that nothing as large as the routing is made
            digest_R = digest_R * _MIX + experts_R
        keys_N[batch.routing.known_T] ^= digest_R * _MIX
    return keys_N.astype(">u8")


def _until_false(same_T: npt.NDArray[np.bool_]) -> int:
    """Return the number of entries before the first that is false."""
    return len(same_T) if same_T.all() else int(np.argmin(same_T))
