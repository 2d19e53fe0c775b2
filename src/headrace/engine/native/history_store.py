"""The arrays of an engine's history of answers: in memory, or in a file that outlives the engine's process.

A file is mapped into memory, so that each entry survives the end of the process from the moment it is written. Wrong
entries are harmless (:mod:`~headrace.engine.native.history`): invalid entries are counted and removed when the file is
opened, and a file of another format is started anew. The disk space of the file is reserved when it is created, since a
full disk would kill a process that writes to a mapped file.

Shape legend: P places of the ring, S slots of the table, K slots of prompts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import FloatColumn, IntColumn

END = -1
"""The id that is stored after the last token of an answer, and as padding in front of a short context."""
_FORMAT = b"headrace-answers1"
"""The first bytes of a file, which identify its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStore:
    """The arrays of a history, and the counts of entries found when their file was opened."""

    head_1: npt.NDArray[np.int64]
    """The index into the ring at which the next token is written; one entry."""
    ids_P: IntColumn
    """The ring of tokens."""
    chances_P: FloatColumn
    """The probability with which each token of the ring was drawn; 0 for a token of a context."""
    places_S: npt.NDArray[np.int32]
    """The table from the slot of a run of tokens to the index into the ring of the token that followed it."""
    keys_K: npt.NDArray[np.uint64]
    """The hash of the last prompt in each slot; 0 for none."""
    num_found: int = 0
    """The number of valid tokens in the file when it was opened."""
    num_damaged: int = 0
    """The number of invalid entries in the file, which were removed."""

    def facts(self) -> dict[str, int]:
        """Return facts for the record of the run, by name: the size of the arrays in bytes, and the counts of tokens
        and damaged entries found in the file."""
        arrays = (self.ids_P, self.chances_P, self.places_S, self.keys_K)
        return {
            "history_bytes": sum(array.nbytes for array in arrays),
            "history_tokens_found": self.num_found,
            "history_entries_damaged": self.num_damaged,
        }


def open_store(path: Path | None, *, num_tokens: int, num_slots: int, num_keys: int, vocab_size: int) -> HistoryStore:
    """Open the arrays of the file ``path``, which is created if it does not exist; ``None``: return empty arrays in
    memory. ``num_tokens``, ``num_slots`` and ``num_keys`` are the sizes P, S and K; token ids are below ``vocab_size``.
    Raises ``OSError`` if the file cannot be created, such as on a full disk."""
    form = np.dtype(
        [
            ("form", "S24"),
            ("head", "<i8", 1),
            ("ids", "<i4", num_tokens),
            ("chances", "<f4", num_tokens),
            ("places", "<i4", num_slots),
            ("keys", "<u8", num_keys),
        ]
    )
    if path is None:
        return _empty(np.zeros(1, form))
    if not _has_size(path, form.itemsize):
        _reserve(path, form.itemsize)
    record = np.memmap(path, form, "r+", shape=(1,))
    if record["form"][0] != _FORMAT:
        record["form"], record["head"], record["places"], record["keys"], record["chances"] = _FORMAT, 0, 0, 0, 0.0
        return _empty(record)
    return _checked(record, vocab_size)


def _empty(record: npt.NDArray[Any]) -> HistoryStore:
    """Return the arrays of ``record``, a new or reset file, without entries."""
    record["ids"] = END
    return HistoryStore(**_arrays(record))


def _checked(record: npt.NDArray[Any], vocab_size: int) -> HistoryStore:
    """Return the arrays of ``record``, an existing file, after invalid entries have been removed, such as token ids of
    ``vocab_size`` or more."""
    arrays = _arrays(record)
    head_1, ids_P, chances_P, places_S = (arrays[name] for name in ("head_1", "ids_P", "chances_P", "places_S"))
    size = len(ids_P)
    wrong_P = (ids_P < END) | (ids_P >= vocab_size)
    improbable_P = ~((chances_P >= 0) & (chances_P <= 1))  # true for NaN, too
    outside_S = (places_S < 0) | (places_S >= size)
    outside_1 = (head_1 < 0) | (head_1 >= size)
    ids_P[wrong_P] = END
    chances_P[improbable_P | wrong_P] = 0.0
    places_S[outside_S] = 0
    head_1[outside_1] = 0
    damaged = sum(int(np.count_nonzero(each)) for each in (wrong_P, improbable_P, outside_S, outside_1))
    return HistoryStore(**arrays, num_found=int(np.count_nonzero(chances_P)), num_damaged=damaged)


def _arrays(record: npt.NDArray[Any]) -> dict[str, Any]:
    """Return the arrays in ``record``, by the names of the fields of :class:`HistoryStore`."""
    names = {"head_1": "head", "ids_P": "ids", "chances_P": "chances", "places_S": "places", "keys_K": "keys"}
    return {name: record[column][0] for name, column in names.items()}


def _has_size(path: Path, size: int) -> bool:
    """Return whether ``path`` is a file of ``size`` bytes."""
    return path.is_file() and path.stat().st_size == size


def _reserve(path: Path, size: int) -> None:
    """Create the file ``path`` with ``size`` zero bytes, reserved on the disk. Raises ``OSError`` if the disk is
    full."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)
