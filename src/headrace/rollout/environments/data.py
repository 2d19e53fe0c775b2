"""Rows of a dataset: how they are read from files, validated, and ordered."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.errors import DataError
from headrace.base.plugins import Registry

Row = dict[str, Any]

READERS = Registry[Callable[[Path], list[Row]]](
    group="headrace.readers",
    setting="the reader",
    check=lambda made: None if callable(made) else "is no function of a path",
)
"""Readers of directories: functions that return the rows in a directory, or an empty list for a directory of another
kind."""


def load_rows(path: Path) -> list[Row]:
    """Return the rows of a JSONL, CSV or Parquet file, or of a directory that one of :data:`READERS` accepts. Raises
    :class:`DataError` with file and line for invalid contents."""
    if path.is_dir():
        return _read_directory(path)
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _read_jsonl,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of file", remedy=f"give one of {', '.join(readers)}")
    try:
        rows = reader(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", remedy="give the path of a data file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}", remedy="give a readable file") from None
    if not rows:
        raise DataError(f"{path} has no rows", remedy="give a file with at least one row")
    return rows


def _read_directory(path: Path) -> list[Row]:
    """Return the rows from the first reader that finds rows in the directory ``path``."""
    for name in READERS:
        if rows := READERS.load(name)(path):
            return rows
    raise DataError(
        f"{path} is a directory in which no reader finds rows",
        remedy=f"give a file, or a directory for one of these readers: {', '.join(READERS)} (docs/sandboxes.md)",
    )


def as_rows(data: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return rows that were passed in Python, a list of dicts or a ``datasets`` object, as a list of dicts."""
    rows: list[Row] = []
    for number, row in enumerate(data, start=1):
        if not isinstance(row, Mapping):
            raise DataError(
                f"row {number} of the dataset is a {type(row).__name__}, not a dict",
                remedy='give rows like {"prompt": ...}; of a DatasetDict, give one split',
            )
        rows.append(dict(row))
    if not rows:
        raise DataError("the dataset has no rows", remedy="give at least one row")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines. Blank lines are skipped. Raises :class:`~headrace.base.errors.DataError`
    with the number of the invalid line."""
    rows: list[Row] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {error}", remedy="fix or delete that line") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{path}:{number}: a {type(row).__name__}, not an object", remedy='write {"prompt": ...} on each line'
            )
        rows.append(row)
    return rows


def _read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file. Its first line contains the column names; all values are text. Raises
    :class:`~headrace.base.errors.DataError` with the number of the invalid line."""
    rows: list[Row] = []
    lines = list(_lines(path))
    reader = csv.DictReader(lines, strict=True)
    try:
        for row in reader:
            _refuse_ragged(row, reader, path)
            rows.append(dict(row))
    except csv.Error as error:  # the error is in the line after the last line that the reader has counted
        number = min(reader.line_num + 1, len(lines))
        raise DataError(f"{path}:{number}: {error}", remedy="fix that line") from None
    return rows


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, including their line ends, without the byte order mark. Raises
    :class:`~headrace.base.errors.DataError` for a line that is not UTF-8."""
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8: {error}", remedy="save the file as UTF-8") from None


def _refuse_ragged(row: Mapping[str, Any], reader: csv.DictReader[str], path: Path) -> None:
    """Raise :class:`~headrace.base.errors.DataError` if ``row``, which ``reader`` has read from the file ``path``, has
    more or fewer fields than the header of the file."""
    if None in row or None in row.values():
        columns = len(reader.fieldnames or ())
        raise DataError(f"{path}:{reader.line_num}: not {columns} columns like the header", remedy="fix that line")


def _read_parquet(path: Path) -> list[Row]:
    """Return the rows of a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow", remedy="pip install 'headrace[parquet]'") from None
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file: {error}", remedy="give a Parquet file") from None
    return rows


class RowOrder:
    """The order of rows without a curriculum: every row once per epoch, in a new random order for each epoch.

    The order is a pure function of the seed and the group number, so no position has to be saved. After ``epochs``
    passes the result is ``None``, which means that there is no row for the group.

    >>> order = RowOrder(num_rows=3, seed=0, shuffle=False, epochs=2)
    >>> [order(number) for number in range(7)]
    [0, 1, 2, 0, 1, 2, None]
    """

    def __init__(self, *, num_rows: int, seed: int, shuffle: bool, epochs: int | None = None) -> None:
        """Create the order of ``num_rows`` rows. It is derived from ``seed``, or is dataset order without
        ``shuffle``."""
        self._num_rows = num_rows
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        """The epoch whose order is in ``_rows``; -1 for dataset order."""
        self._rows = np.arange(num_rows)
        """The indices of all rows in the order of that epoch."""

    def __call__(self, number: int) -> int | None:
        """Return the index of the row that group ``number`` attempts; ``None`` after the last epoch."""
        epoch, position = divmod(number, self._num_rows)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._shuffle and epoch != self._epoch:
            self._rows = np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)
            self._epoch = epoch
        return int(self._rows[position])
