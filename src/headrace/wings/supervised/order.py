"""The order of training: the row at each place of the run, as a function of the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.rollout.environments.data import RowOrder

CHUNK = 4096
"""The number of places whose sources are drawn together; another number changes the order."""


class RowStream:
    """The endless sequence of rows in the order of training. A place is a position in this sequence, counted from 0.

    Without weights, every row of every source occurs once per epoch. With weights, the source of each place is drawn by
    its weight, and each source repeats its own rows epoch by epoch. The row at a place does not depend on the length of
    the run, so that a longer run begins like a shorter run.

    >>> stream = RowStream([2, 1], None, seed=0, shuffle=False)
    >>> stream.rows(0, 5).tolist()
    [0, 1, 2, 0, 1]
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, *, seed: int, shuffle: bool) -> None:
        """Create the sequence from ``seed``. ``sizes`` are the numbers of rows of the sources; ``weights`` are the
        shares of the sources among the places, relative to each other, or ``None`` for no weights. With ``shuffle``,
        each epoch has a new random order."""
        self._sizes, self._seed = list(sizes), seed
        self._shares = None if weights is None else np.array(weights) / sum(weights)
        """Probability with which a place belongs to each source; ``None`` without weights."""
        parts = [sum(sizes)] if weights is None else sizes
        self._orders = [
            RowOrder(num_rows=size, seed=seed + 1_000_003 * number, shuffle=shuffle)
            for number, size in enumerate(parts)
        ]
        """The order of each source's rows; without weights one order of all rows."""
        self._starts = np.cumsum([0, *sizes])[:-1]
        """Index of each source's first row among the rows of all sources."""
        self._drawn_rows = np.zeros(0, np.int64)
        """The rows at the places that were drawn so far."""
        self._num_visits = np.zeros(len(sizes), np.int64)
        """The number of these places that belong to each source."""

    def rows(self, first: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the rows at the places ``first`` to ``end - 1``, as indices into the rows of all sources,
        concatenated."""
        while len(self._drawn_rows) < end:
            self._drawn_rows = np.concatenate([self._drawn_rows, self._next_chunk()])
        return self._drawn_rows[first:end]

    def _next_chunk(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the rows at the next :data:`CHUNK` places, as indices into the rows of all sources: epoch by epoch, or
        drawn from the sources by their weights."""
        first = len(self._drawn_rows)
        if self._shares is None:
            return np.array([self._orders[0](place) for place in range(first, first + CHUNK)], np.int64)
        # the draws of a chunk depend only on the seed and on its number
        rng = np.random.default_rng([self._seed, 1, first // CHUNK])
        rows = np.zeros(CHUNK, np.int64)
        for place, source in enumerate(rng.choice(len(self._sizes), size=CHUNK, p=self._shares).tolist()):
            row = self._orders[source](int(self._num_visits[source]))
            assert row is not None
            rows[place] = self._starts[source] + row
            self._num_visits[source] += 1
        return rows
