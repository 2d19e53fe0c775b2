"""Which token of a packed pass attends to which, as three numbers per token, and as tables of blocks of tokens.

The sequences of a pass are the paths of a forest: a token continues the token before it, and several sequences may
begin with the same tokens. In depth-first order, all descendants of a token follow it directly:

    a b c d        number      a 0   b 1   c 2   d 3   e 4   f 5   g 6   h 7
        └ e f      end         a 7   b 7   c 6   d 4   e 6   f 6   g 7   h 8
      └ g
    h              a token q attends to a token k of its own path:  number k ≤ number q < end of k

Sequences that share no tokens are the simplest forest. A window or a chunk is expressed by the first position that each
query attends to.

Attention kernels work on blocks of tokens. The smallest and largest numbers of two blocks show whether no query of one
block attends to a key of the other, or all queries attend to all keys. For all other pairs of blocks, the kernel tests
each pair of tokens.

Shape legend: N tokens of the pass, T tokens of all sequences (N, or more if sequences share tokens), S sequences,
Q queries, M keys, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]

BLOCK = 128
"""The number of tokens of a block, for which torch's kernels are tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The position of each token of a pass in the forest of its sequences."""

    number_N: Index
    """The number of the token in depth-first order, from 0; -1 for a query that attends to no key."""
    end_N: Index
    """The number after those of the token and all its descendants, the tokens with this token on their path."""
    place_N: Index
    """The position of the token in its sequence."""

    @classmethod
    def from_lengths(
        cls,
        lengths_S: Sequence[int] | npt.NDArray[Any],
        rows_T: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> Reach:
        """Return the reach of the tokens of sequences with ``lengths_S`` tokens. ``rows_T`` is the index in the pass of
        each token of each sequence; ``None`` if the sequences are concatenated.

        >>> reach = Reach.from_lengths([3, 4], [0, 1, 2, 0, 1, 3, 4])  # the first two tokens are shared
        >>> reach.number_N.tolist(), reach.end_N.tolist(), reach.place_N.tolist()
        ([0, 1, 2, 3, 4], [5, 5, 3, 5, 5], [0, 1, 2, 2, 3])
        """
        lengths = np.asarray(lengths_S, np.int64)
        ends = np.cumsum(lengths)
        places_T = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        if rows_T is None:
            return cls(number_N=np.arange(len(places_T)), end_N=np.repeat(ends, lengths), place_N=places_T)
        rows = np.asarray(rows_T, np.int64)
        parts = np.split(rows, ends[:-1]) if len(lengths) else []
        # sorted by their rows, all sequences with the same beginning are adjacent
        order = sorted(range(len(parts)), key=lambda each: parts[each].astype(">i8").tobytes())
        sorted_T = np.concatenate([np.zeros(0, np.int64), *(parts[each] for each in order)])
        sequence_T = np.repeat(np.arange(len(order)), lengths[order])
        tokens_N, first_N = np.unique(sorted_T, return_index=True)
        assert np.array_equal(tokens_N, np.arange(len(tokens_N))), "every token of the pass belongs to a sequence"
        number_N = np.empty_like(first_N)
        number_N[np.argsort(first_N)] = np.arange(len(first_N))
        # the last sequence that contains a token also contains its last descendant
        last_N = len(sorted_T) - 1 - np.unique(sorted_T[::-1], return_index=True)[1]
        own_S = np.bincount(sequence_T[first_N], minlength=len(order))
        place_N = np.empty_like(first_N)
        place_N[rows] = places_T
        return cls(number_N=number_N, end_N=np.cumsum(own_S)[sequence_T[last_N]], place_N=place_N)

    def take(self, tokens_Q: Index, padding: int) -> Reach:
        """Return the reach of the tokens ``tokens_Q``, followed by ``padding`` queries that attend to no key."""
        no_key = np.full(padding, -1)
        return Reach(
            number_N=np.concatenate([self.number_N[tokens_Q], no_key]),
            end_N=np.concatenate([self.end_N[tokens_Q], no_key]),
            place_N=np.concatenate([self.place_N[tokens_Q], np.zeros(padding, np.int64)]),
        )

    def first(self, window: int | None, chunk: int | None) -> Index:
        """Return the first position in its sequence that each token attends to, ``[N]``, if it attends only to the last
        ``window`` tokens and to its chunk of ``chunk`` tokens; ``None`` for no such limit."""
        first_N = np.zeros_like(self.place_N)
        if window is not None:
            first_N = np.maximum(first_N, self.place_N - window + 1)
        if chunk is not None:
            first_N = np.maximum(first_N, self.place_N // chunk * chunk)
        return first_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """The properties of tokens as queries."""

    number_Q: Index
    """The number of the token in depth-first order."""
    first_Q: Index
    """The first position in its sequence that the token attends to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """The pairs of a block of queries and a block of keys between which attention is computed, as two tables."""

    some_IJ: npt.NDArray[np.bool_]
    """Whether the pairs of tokens of the two blocks must be tested, since some queries may attend to some keys."""
    all_IJ: npt.NDArray[np.bool_]
    """Whether all queries of the one block attend to all keys of the other. The two tables are never both true."""

    @classmethod
    def create(cls, queries: Queries, keys: Reach, block: int = BLOCK) -> BlockTables:
        """Return the tables of ``queries`` and ``keys`` for blocks of ``block`` tokens. Each table has at least two
        blocks in both directions, since kernels would be compiled again for a table of a single block. ``all_IJ`` is
        false for blocks that are not full."""
        number, first = (_ranges(each, block) for each in (queries.number_Q, queries.first_Q))
        low, high = (each[:, None] for each in number)
        first_low, first_high = (each[:, None] for each in first)
        (key_low, key_high), (end_low, end_high), (place_low, place_high) = (
            _ranges(each, block) for each in (keys.number_N, keys.end_N, keys.place_N)
        )
        # number k <= number q < end k, for the most favourable and for the least favourable tokens of two blocks
        any_IJ = (key_low <= high) & (low < end_high) & (place_high >= first_low)
        all_IJ = (key_high <= low) & (high < end_low) & (place_low >= first_high)
        all_IJ &= _is_full(len(queries.number_Q), block)[:, None] & _is_full(len(keys.number_N), block)
        return cls(some_IJ=any_IJ & ~all_IJ, all_IJ=all_IJ)


def _num_blocks(length: int, block: int) -> int:
    """Return the number of blocks of ``block`` tokens for ``length`` tokens, at least two."""
    return max(2, -(-length // block))


def _ranges(numbers_N: Index, block: int) -> tuple[Index, Index]:
    """Return the smallest and the largest number of each block. A block without tokens has an empty range, whose
    smallest number is larger than its largest."""
    padding = _num_blocks(len(numbers_N), block) * block - len(numbers_N)
    info = np.iinfo(np.int64)
    low, high = (
        np.concatenate([numbers_N, np.full(padding, beyond)]).reshape(-1, block) for beyond in (info.max, info.min)
    )
    return low.min(1), high.max(1)


def _is_full(length: int, block: int) -> npt.NDArray[np.bool_]:
    """Return, for each block of ``length`` tokens, whether it is full."""
    return (np.arange(_num_blocks(length, block)) + 1) * block <= length
