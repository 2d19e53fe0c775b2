"""References to rows of a column that are stored in a file instead of memory. A process that only forwards tokens, such
as the controller, then handles short references; :mod:`headrace.base.store` writes and reads the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
"""Rows of a column in memory; the first dimension is the row."""


class StoredRows(msgspec.Struct, frozen=True, array_like=True):
    """A reference to consecutive rows in a part of a store, or a piece of rows in memory between such references. A
    *part* is the data of one write: contiguous bytes of one file, with a checksum."""

    file: str
    """The name of the file in the directory of the store; empty for rows in memory."""
    start: int
    """The offset of the whole part in the file, in bytes."""
    num_bytes: int
    """The size of the whole part in bytes."""
    checksum: int
    """The 64-bit XXH3 hash of the whole part."""
    first: int
    """The index, within the part, of the first row of the reference."""
    count: int
    """The number of rows of the reference."""
    rows: Rows | None = None
    """The rows, if they are in memory; ``None`` if they are in the file."""


Stored = tuple[StoredRows, ...]
"""References to all rows of a column, in order; empty if the column is in memory."""


def num_rows(rows: Rows, stored: Stored) -> int:
    """Return the number of rows of a column that is either in memory, as ``rows``, or in a store, as ``stored``."""
    return sum([piece.count for piece in stored]) if stored else len(rows)


def slice_rows(rows: Rows, stored: Stored, first: int, last: int) -> tuple[Rows, Stored]:
    """Return the rows of a column from index ``first`` to index ``last`` (exclusive), in memory or as references.
    Stored rows are not read."""
    if not stored:
        return rows[first:last], ()
    pieces, before = [], 0
    for piece in stored:
        left, right = max(first - before, 0), min(last - before, piece.count)
        if left < right:
            pieces.append(_slice_rows(piece, left, right))
        before += piece.count
    return rows, tuple(pieces)


def concat_rows(columns: Sequence[tuple[Rows, Stored]]) -> tuple[Rows, Stored]:
    """Return one column with the rows of all ``columns``, which must not be empty, in order. Stored rows are not read.
    Raises ``ValueError`` if one of the columns is stored and their dtypes or row shapes differ."""
    if not any(stored for _, stored in columns):
        return np.concatenate([rows for rows, _ in columns]), ()
    pieces: list[StoredRows] = []
    for rows, stored in columns:
        if rows.dtype != columns[0][0].dtype or rows.shape[1:] != columns[0][0].shape[1:]:
            kinds = [f"{each.dtype}{list(each.shape[1:])}" for each in (columns[0][0], rows)]
            raise ValueError(f"stored rows of {kinds[0]} cannot be concatenated with rows of {kinds[1]}")
        pieces += stored if stored or not len(rows) else [StoredRows("", 0, 0, 0, 0, len(rows), rows)]
    return columns[0][0][:0], tuple(pieces)


def _slice_rows(piece: StoredRows, left: int, right: int) -> StoredRows:
    """Return the reference to the rows of ``piece`` from index ``left`` to index ``right`` (exclusive)."""
    if (left, right) == (0, piece.count):
        return piece
    rows = None if piece.rows is None else piece.rows[left:right]
    first = piece.first + left if piece.rows is None else 0
    return StoredRows(piece.file, piece.start, piece.num_bytes, piece.checksum, first, right - left, rows)
