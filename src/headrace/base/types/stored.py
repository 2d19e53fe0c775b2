"""Rows of a column that lie in a file in place of memory. A process that only passes tokens on, such as the controller,
then handles a short reference in place of the rows; :mod:`headrace.base.store` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
"""Rows of a column in memory: the first dimension counts them."""


class StoredRows(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows of a part of a store, or rows in memory between such rows. A *part* is what was written at once:
    contiguous bytes of one file, with a checksum."""

    file: str
    """The name of the file in the directory of the store; empty for rows in memory."""
    start: int
    """The offset in the file of the whole part, in bytes."""
    num_bytes: int
    """The size of the whole part in bytes."""
    checksum: int
    """The XXH3 hash of the whole part, as a number of 64 bits."""
    first: int
    """The index, within the part, of the first row that is meant."""
    count: int
    """The number of rows that are meant."""
    rows: Rows | None = None
    """The rows, if they are in memory; ``None`` if they are in the file."""


Stored = tuple[StoredRows, ...]
"""The rows of a column, one piece after the other."""


def num_rows(rows: Rows, stored: Stored) -> int:
    """Return the number of rows of a column that is either in memory, as ``rows``, or ``stored``."""
    return sum([piece.count for piece in stored]) if stored else len(rows)


def cut(rows: Rows, stored: Stored, first: int, last: int) -> tuple[Rows, Stored]:
    """Return the rows from index ``first`` to index ``last``, which is not included, of a column, without reading
    them."""
    if not stored:
        return rows[first:last], ()
    pieces, before = [], 0
    for piece in stored:
        left, right = max(first - before, 0), min(last - before, piece.count)
        if left < right:
            pieces.append(_part_of(piece, left, right))
        before += piece.count
    return rows, tuple(pieces)


def joined(columns: Sequence[tuple[Rows, Stored]]) -> tuple[Rows, Stored]:
    """Return one column with the rows of all ``columns``, one after the other, without reading stored ones; there is at
    least one. Raises ``ValueError`` if stored rows would join rows of another type or shape."""
    if not any(stored for _, stored in columns):
        return np.concatenate([rows for rows, _ in columns]), ()
    pieces: list[StoredRows] = []
    for rows, stored in columns:
        if rows.dtype != columns[0][0].dtype or rows.shape[1:] != columns[0][0].shape[1:]:
            kinds = [f"{each.dtype}{list(each.shape[1:])}" for each in (columns[0][0], rows)]
            raise ValueError(f"stored rows of {kinds[0]} cannot be joined to rows of {kinds[1]}")
        pieces += stored if stored or not len(rows) else [StoredRows("", 0, 0, 0, 0, len(rows), rows)]
    return columns[0][0][:0], tuple(pieces)


def _part_of(piece: StoredRows, left: int, right: int) -> StoredRows:
    """Return the rows of ``piece`` from index ``left`` to index ``right``, which is not included."""
    if (left, right) == (0, piece.count):
        return piece
    rows = None if piece.rows is None else piece.rows[left:right]
    first = piece.first + left if piece.rows is None else 0
    return StoredRows(piece.file, piece.start, piece.num_bytes, piece.checksum, first, right - left, rows)
