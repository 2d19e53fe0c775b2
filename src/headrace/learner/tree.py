"""Prefix trees of the samples of a batch, in which first tokens that several samples have in common are computed once.

    samples ── sorted by their tokens ──▶ one order, in which neighbours have the longest common prefixes
            ── divided at the least cost ──▶ units: subtrees (packing.py) that fit into a micro-batch

A tree of any depth is represented by this order and, for each sample, the number of first tokens that it shares with
the previous sample. The other tokens of a sample are a branch of their own:

    a b c d        shares 0
    a b c e f      shares 3
    a b g          shares 2
    h              shares 0      the tree has 4 + 2 + 1 + 1 = 8 tokens

Samples may have common prefixes for any reason: as answers to one prompt, as turns or forks of an episode, or by
accident. The tokens of a micro-batch are computed by one adapter
(:meth:`~headrace.learner.forward.Forward.split_by_agent`), at positions that count from the beginning of each sample.
Two tokens are therefore the same computation if their ids, their recorded experts and all tokens before them are equal.

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
"""The additional cost, as a fraction, of each token of a pass above the best size for a CPU's cache
(:data:`~headrace.learner.cost.CACHED_NUMBERS`)."""
RANK_PARTS = (1.0, 1.25, 1.5, 1.75, 2.0, 3.0)
"""The limits on the size of a subtree that are tried with several ranks, as multiples of a rank's share of all
tokens."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd factor that spreads the bits of a key: 2⁶⁴ divided by the golden ratio."""


class PrefixTrees:
    """A builder of prefix trees of samples of one batch. The keys by which samples are sorted are computed once."""

    def __init__(self, batch: Batch) -> None:
        """Compute the sort keys of the tokens of ``batch``."""
        self._batch = batch
        self._lengths_S = batch.lengths_S.astype(np.int64)
        self._starts_S = np.cumsum(self._lengths_S) - self._lengths_S
        """The index in the batch of the first token of each sample."""
        self._keys_N = _keys(batch)
        """The sort key of each token."""
        known_N = np.zeros(0, np.int64) if batch.routing is None else batch.routing.known_T.astype(np.int64)
        self._known_before_N = np.cumsum(known_N) - known_N
        """The number of tokens before each token whose experts were recorded."""

    def make_unit(self, samples: Index) -> Unit:
        """Return the prefix tree of ``samples``, indices into the batch, as one unit of any size. Equal samples keep
        the order of the batch."""
        order = np.array(
            sorted(np.sort(samples).tolist(), key=lambda sample: self._keys_N[self._tokens(sample)].tobytes()), np.int64
        )
        shared_K = np.zeros(len(order), np.int64)
        if len(order) > 1:
            shared_K[1:] = self._common_keys(order)
        # the keys include a hash of the recorded experts, which may collide, so the experts are compared
        if self._batch.routing is not None:
            routing = self._batch.routing
            for place in np.flatnonzero(shared_K):
                shared_K[place] = self._common(routing, order[place - 1 : place + 1], int(shared_K[place]))
        return Unit(samples=order, shared_K=shared_K)

    def _tokens(self, sample: int) -> slice:
        """Return the slice of a sample's tokens in the columns of the batch."""
        start = int(self._starts_S[sample])
        return slice(start, start + int(self._lengths_S[sample]))

    def _common_keys(self, order: Index) -> Index:
        """Return, for each sample in ``order`` except the first, the number of first tokens whose keys equal those of
        the previous sample."""
        lengths = np.minimum(self._lengths_S[order[1:]], self._lengths_S[order[:-1]])
        firsts = np.cumsum(lengths) - lengths
        places = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
        before, own = (np.repeat(self._starts_S[each], lengths) + places for each in (order[:-1], order[1:]))
        differs = self._keys_N[before] != self._keys_N[own]
        pairs = np.repeat(np.arange(len(lengths)), lengths)[differs]
        found, at = np.unique(pairs, return_index=True)
        lengths[found] = places[differs][at]
        return lengths

    def _common(self, routing: Routing, pair: Index, length: int) -> int:
        """Return the length of the common prefix of the two samples with the indices ``pair``, at most ``length``
        tokens. Two tokens are equal if they have the same ids and the same recorded experts in ``routing``, or both no
        recorded experts."""
        first, second = (slice(start, start + length) for start in self._starts_S[pair].tolist())
        same = self._batch.ids_N[first] == self._batch.ids_N[second]
        same &= routing.known_T[first] == routing.known_T[second]
        return self._common_experts(routing, first, second, _until_false(same))

    def _common_experts(self, routing: Routing, first: slice, second: slice, length: int) -> int:
        """Return the number of tokens, at most ``length``, up to the first one whose recorded experts differ between
        two samples, whose tokens begin at the slices ``first`` and ``second``. The tokens with recorded experts must be
        at the same places in both samples."""
        known = np.flatnonzero(routing.known_T[first.start : first.start + length])
        if not len(known):
            return length
        rows = (int(self._known_before_N[side.start]) for side in (first, second))
        one, other = (routing.experts_RLK[row : row + len(known)] for row in rows)
        agreed = _until_false((one == other).all((1, 2)))
        return length if agreed == len(known) else int(known[agreed])


def cut_tree(tree: Unit, lengths_S: Index, packing: Packing) -> list[Unit]:
    """Divide a tree into subtrees of consecutive samples that fit into a micro-batch, at the least cost. ``lengths_S``
    are the lengths of all samples of the batch.

    The cost of a cut are the tokens that the sample after the cut shares with the previous sample, which are computed
    again. A tree larger than ``packing.budget`` is always divided. A smaller tree is divided if that costs less than a
    pass above the best size for the CPU's cache. With several ranks, a few limits on the size of a subtree are tried,
    and the division is returned for which the busiest rank computes the fewest tokens. Samples without common tokens
    are always separated. A sample that is larger than a micro-batch is a unit of its own.
    """
    best = packing.cost.best_rows or packing.budget
    units = _divide(tree, lengths_S, packing.budget, best)
    if packing.num_ranks == 1:
        return units
    rank_share = sum(unit.num_rows(lengths_S) for unit in units) / packing.num_ranks
    bounds = [int(rank_share * factor) for factor in RANK_PARTS]
    cuts = [units, *(_divide(tree, lengths_S, bound, best) for bound in bounds if bound < packing.budget)]
    return min(cuts, key=lambda units: _largest_load(units, lengths_S, packing.num_ranks))


def _largest_load(units: Sequence[Unit], lengths_S: Index, num_ranks: int) -> float:
    """Return a lower bound for the number of tokens of the busiest rank: the tokens of the largest unit, or an equal
    share of all tokens, whichever is larger."""
    rows = [unit.num_rows(lengths_S) for unit in units]
    return max(max(rows, default=0), sum(rows) / num_ranks)


def _divide(tree: Unit, lengths_S: Index, budget: int, best: int) -> list[Unit]:
    """Divide a tree, whose samples have the lengths ``lengths_S``, into subtrees of at most ``budget`` tokens at the
    least cost. The cost is the number of computed tokens, plus :data:`SLOWER` for each token of a subtree above
    ``best``."""
    shared_K = tree.shared_K
    rows_K = np.concatenate([[0], np.cumsum(lengths_S[tree.samples] - shared_K)])
    units: list[Unit] = []
    for root, stop in pairwise([*np.flatnonzero(shared_K == 0).tolist(), len(shared_K)]):
        if rows_K[stop] - rows_K[root] <= min(best, budget):
            units.append(_subtree(tree, root, stop))
            continue
        begins_K = root + _cheapest_starts(shared_K[root:stop], rows_K[root : stop + 1], budget, best)
        cuts = [stop]
        while cuts[-1] > root:
            cuts.append(int(begins_K[cuts[-1] - 1 - root]))
        units += [_subtree(tree, begin, end) for begin, end in pairwise(cuts[::-1])]
    return units


def _subtree(tree: Unit, begin: int, end: int) -> Unit:
    """Return the samples from ``begin`` to ``end`` of a tree as a unit; its first sample shares no tokens."""
    shared_K = np.concatenate([[0], tree.shared_K[begin + 1 : end]])
    return Unit(samples=tree.samples[begin:end], shared_K=shared_K)


def _cheapest_starts(shared_K: Index, rows_K: Index, budget: int, best: int) -> Index:
    """Return, for each k, the index of the first sample of the last unit in the cheapest division of the first k + 1
    samples of a tree, ``[K]`` (dynamic programming). The sample k shares its first ``shared_K[k]`` tokens with the
    previous one; ``budget`` and ``best`` are those of :func:`_divide`. ``rows_K`` are the cumulative sums, from 0, of
    the tokens that samples do not share with the previous sample."""
    begins_K = np.zeros(len(shared_K), np.int64)
    more_K = shared_K - rows_K[:-1]
    # the cost of all samples before each sample, plus the shared tokens that a unit starting there repeats
    cost_K = np.zeros(len(shared_K))
    first = 0
    for end in range(1, len(rows_K)):
        while first < end - 1 and rows_K[end] - rows_K[first] > budget:
            first += 1
        rows = rows_K[end] + more_K[first:end]
        cost = cost_K[first:end] + SLOWER * np.maximum(rows - best, 0)
        cost[:-1][rows[:-1] > budget] = np.inf
        chosen = len(rows) - 1 - int(np.argmin(cost[::-1]))  # among equal costs, the shortest unit
        begins_K[end - 1] = first + chosen
        if end < len(shared_K):
            cost_K[end] = cost[chosen] + shared_K[end]
    return begins_K


def _keys(batch: Batch) -> npt.NDArray[np.uint64]:
    """Return the sort key of each token of the batch, ``[N]``: its id, combined with a hash of its recorded experts.
    Tokens that may be shared have equal keys; keys of other tokens are almost never equal. The keys are big-endian, so
    that comparing their bytes compares the numbers."""
    keys_N = batch.ids_N.astype(np.uint64)
    if batch.routing is not None:
        experts_RLK = batch.routing.experts_RLK
        experts_RE = experts_RLK.reshape(len(experts_RLK), experts_RLK.shape[1] * experts_RLK.shape[2])
        digest_R = np.ones(len(experts_RE), np.uint64)
        for experts_R in experts_RE.T:  # one column at a time, to avoid a temporary array as large as the routing
            digest_R = digest_R * _MIX + experts_R
        keys_N[batch.routing.known_T] ^= digest_R * _MIX
    return keys_N.astype(">u8")


def _until_false(same_T: npt.NDArray[np.bool_]) -> int:
    """Return the number of entries before the first false one."""
    return len(same_T) if same_T.all() else int(np.argmin(same_T))
