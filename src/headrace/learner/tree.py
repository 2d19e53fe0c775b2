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

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.base.types.batch import Batch
from headrace.base.types.recorded import Routing
from headrace.learner.packing import Index, Packing, Unit

SLOWER = 1 / 6
"""The part by which a token of a pass beyond the best size for a CPU's cache is slower than others
(:data:`~headrace.learner.cost.CACHED_NUMBERS`)."""
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
        order = sorted(np.sort(samples).tolist(), key=lambda sample: self._keys_N[self._tokens(sample)].tobytes())
        shared = [self._common(one, other) for one, other in pairwise(order)]
        return Unit(samples=np.array(order, np.int64), shared_K=np.array([0, *shared][: len(order)], np.int64))

    def _tokens(self, sample: int) -> slice:
        """Return the place of a sample's tokens in the columns of the batch."""
        start = int(self._starts_S[sample])
        return slice(start, start + int(self._lengths_S[sample]))

    def _common(self, one: int, other: int) -> int:
        """Return the number of first tokens of two samples that have the same ids and the same recorded experts, or
        both none. Keys may agree by accident, so the tokens themselves are compared."""
        first, second = self._tokens(one), self._tokens(other)
        length = min(first.stop - first.start, second.stop - second.start)
        first, second = slice(first.start, first.start + length), slice(second.start, second.start + length)
        same = self._batch.ids_N[first] == self._batch.ids_N[second]
        if self._batch.routing is not None:
            known_N = self._batch.routing.known_T
            same &= known_N[first] == known_N[second]
        length = _until_false(same)
        return (
            length if self._batch.routing is None else self._common_experts(self._batch.routing, first, second, length)
        )

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
    than the best for the CPU's cache, or larger than a rank's part of all tokens, for which other ranks would wait.
    Where samples share nothing, there is always a cut. A sample that fits into no micro-batch is a unit of its own.
    """
    shared_K = tree.shared_K
    rows_K = np.concatenate([[0], np.cumsum(lengths_S[tree.samples] - shared_K)])
    fair = -(-int(rows_K[-1]) // packing.num_ranks)
    best = packing.cost.best_rows or packing.budget
    cost_K, begins_K = np.zeros(len(rows_K)), np.zeros(len(rows_K), np.int64)
    root = 0
    for end in range(1, len(rows_K)):
        root = end - 1 if shared_K[end - 1] == 0 else root
        begins = np.arange(end - 1, root - 1, -1)  # among equals, the shortest unit leaves the most freedom
        rows = rows_K[end] - rows_K[begins] + shared_K[begins]
        slower = SLOWER * np.maximum(rows - best, 0) + np.maximum(rows - fair, 0)
        cost = cost_K[begins] + shared_K[begins] + slower
        cost[1:][rows[1:] > packing.budget] = np.inf
        chosen = int(np.argmin(cost))
        cost_K[end], begins_K[end] = cost[chosen], begins[chosen]
    units: list[Unit] = []
    end = len(tree.samples)
    while end:
        begin = int(begins_K[end])
        shared = np.concatenate([[0], shared_K[begin + 1 : end]])
        units.append(Unit(samples=tree.samples[begin:end], shared_K=shared))
        end = begin
    return units[::-1]


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
