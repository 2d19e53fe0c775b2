"""A store for columns of tokens. Engines write the kept-sets and experts that they record into files of the run's
directory, and the controller writes the groups that wait for their step. The learner reads these columns there.
Messages between processes then contain only references to the stored rows (:mod:`headrace.base.types.stored`).

    RUN/columns/engine-0.000000    consecutive parts of up to 64 MiB together, each written once
               /engine-0.000001    the file that the engine writes to now
               /engine-1.000000
               /ready.000000       groups that wait for their step (:mod:`headrace.flow.ready`)
               /learned.000000     the learner's results for the tokens of large steps

A *part* is the data of one write, and has a checksum. A file never changes after its writer has begun the next file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headrace.base.errors import StoreError
from headrace.base.types.batch import Batch
from headrace.base.types.episode import TokenChunk
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.stored import Rows, Stored, StoredRows

T = TypeVar("T")

COLUMNS = "columns"
"""The name of the store's folder in the directory of a run."""
READY = "ready"
"""The name of the writer whose files contain groups that wait for their step. A resumed run does not need these
files."""
LEARNED = "learned"
"""The name of the writer whose files contain the learner's results for tokens. The ledger refers to these files, so
they are always kept."""
FILE_BYTES = 64 << 20
"""The size of a file, in bytes, at which its writer begins the next file."""
INLINE_BYTES = 128
"""The size in bytes up to which a column is not stored, since a reference would be hardly shorter."""
COLUMNS_LOST = "columns_lost"
"""The reason under which the run counts tokens whose loss was dropped because their kept-sets or experts could not be
read."""


def file_name(writer: str, number: int) -> str:
    """Return the name of the file with the index ``number`` among the files of ``writer``.

    >>> file_name("engine-0", 12), parse_file_name("engine-0.000012")
    ('engine-0.000012', ('engine-0', 12))
    """
    return f"{writer}.{number:06d}"


def parse_file_name(name: str) -> tuple[str, int]:
    """Return the writer of the file ``name``, and the index of the file among the files of this writer. The index is −1
    if ``name`` is not the name of a file of a store."""
    writer, _, number = name.rpartition(".")
    return writer, int(number) if number.isdecimal() else -1


class ColumnStore:
    """The writing side of a store: one process appends to its own files.

    Raises :class:`~headrace.base.errors.StoreError` if the directory cannot be created.
    """

    def __init__(
        self, directory: Path, writer: str, *, limit_bytes: int | None = None, file_bytes: int = FILE_BYTES
    ) -> None:
        """Write into ``directory`` as the writer named ``writer``. ``limit_bytes`` limits the size of all files in the
        directory together; ``None`` sets no limit. A file of ``file_bytes`` bytes or more is not continued. Existing
        files of the same writer, from an earlier process, are kept and not continued."""
        self._directory = directory
        self._writer = writer
        self._limit_bytes = limit_bytes
        self._file_bytes = file_bytes
        self._file = -1
        """The descriptor of the open file; −1 if no file is open."""
        self._name = ""
        """The name of the open file."""
        self._end = 0
        """The number of bytes in the open file."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            own = [number for name, number in map(parse_file_name, os.listdir(directory)) if name == writer]
        except OSError as error:
            raise self._error(str(error)) from None
        self._next = max(own, default=-1) + 1
        """The index of the next file of this writer."""

    def put(self, rows: Rows) -> Stored:
        """Write ``rows`` as one part, and return the reference to them. Raises
        :class:`~headrace.base.errors.StoreError` if the store is full or cannot be written; a part that was written
        incompletely has no reference."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        if self._file < 0 or (self._end and self._end + len(data) > self._file_bytes):
            self._begin_file()
        try:
            written = 0
            while written < len(data):  # one call writes at most 2 GiB
                count = os.pwrite(self._file, data[written:], self._end + written)
                if not count:
                    raise OSError("no room for all of it")
                written += count
        except OSError as error:
            raise self._error(str(error)) from None
        start, self._end = self._end, self._end + len(data)
        return (StoredRows(self._name, start, len(data), xxhash.xxh3_64_intdigest(data), 0, len(rows)),)

    def chunk(self, chunk: TokenChunk) -> TokenChunk:
        """Return ``chunk`` with its kept-sets and experts written to the store and replaced by references. Short
        columns are not replaced. Raises as :meth:`put` does."""
        tokens, context = chunk.tokens, chunk.prompt_routing
        kept = tokens.kept and self._store_kept(tokens.kept)
        routing = tokens.routing and self._store_routing(tokens.routing)
        if kept is not tokens.kept or routing is not tokens.routing:
            tokens = msgspec.structs.replace(tokens, kept=kept, routing=routing)
        context = context and self._store_routing(context)
        if tokens is chunk.tokens and context is chunk.prompt_routing:
            return chunk
        return msgspec.structs.replace(chunk, tokens=tokens, prompt_routing=context)

    def close(self) -> None:
        """Close the file that is being written. The written files are kept."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _store_kept(self, kept: KeptSets) -> KeptSets:
        """Write the ids of ``kept`` and return kept-sets with a reference to them; return ``kept`` itself if it is
        short."""
        if kept.ids_E.nbytes <= INLINE_BYTES:
            return kept
        return KeptSets(ids_E=kept.ids_E[:0], sizes_T=kept.sizes_T, stored=self.put(kept.ids_E))

    def _store_routing(self, routing: Routing) -> Routing:
        """Write the rows of ``routing`` and return a routing with a reference to them; return ``routing`` itself if it
        is short."""
        if routing.experts_RLK.nbytes <= INLINE_BYTES:
            return routing
        stored = self.put(routing.experts_RLK)
        return Routing(known_T=routing.known_T, experts_RLK=routing.experts_RLK[:0], stored=stored)

    def _begin_file(self) -> None:
        """Open the next file of this writer. Raises :class:`~headrace.base.errors.StoreError` if the store is full."""
        self.close()
        used = directory_bytes(self._directory, without=LEARNED)  # those belong to the ledger, and are never removed
        if self._limit_bytes is not None and used + self._file_bytes > self._limit_bytes:
            raise StoreError(
                f"the store {self._directory} has {used} bytes, and with one more file of {self._file_bytes} it would "
                f"have more than flow.columns.limit_gb={self._limit_bytes / 1e9:g} GB",
                remedy="raise flow.columns.limit_gb, or set flow.columns.keep = 'until_trained' and "
                "run.checkpoint_every to less",
            )
        name = file_name(self._writer, self._next)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            self._file = os.open(self._directory / name, flags, 0o600)
        except OSError as error:
            raise self._error(str(error)) from None
        self._name, self._next, self._end = name, self._next + 1, 0

    def _error(self, why: str) -> StoreError:
        """Return the error of a store that cannot be written because of ``why``."""
        return StoreError(
            f"the store {self._directory} cannot be written: {why}", remedy=f"make room in {self._directory}"
        )


def directory_bytes(directory: Path, *, without: str = "") -> int:
    """Return the total size of the files in a store's directory, in bytes, except those of the writer ``without``; 0 if
    the directory does not exist."""
    try:
        with os.scandir(directory) as entries:
            counted = [entry for entry in entries if not without or parse_file_name(entry.name)[0] != without]
    except FileNotFoundError:
        return 0
    total = 0
    for entry in counted:
        with suppress(FileNotFoundError):  # a file may be removed during the scan
            total += entry.stat(follow_symlinks=False).st_size
    return total


@dataclass(frozen=True, slots=True)
class LostRows:
    """A range of rows that could not be read."""

    first: int
    """The index of the first row."""
    last: int
    """The index after the last row."""
    error: StoreError
    """The reason why the rows could not be read."""


class StoreReader:
    """The reading side of a store, which maps files into memory. Create a reader for each batch, so that the memory of
    files that were removed is freed."""

    def __init__(self, directory: Path | None) -> None:
        """Read the files in ``directory``, which need not exist if nothing is stored. ``None``: this machine has no
        directory of the run, so no part can be read."""
        self._directory = directory
        self._maps: dict[str, memoryview] = {}
        """The files that were read so far, mapped into memory, by name."""

    def kept(self, kept: KeptSets) -> KeptSets:
        """Return ``kept`` with its ids in memory. Raises :class:`~headrace.base.errors.StoreError` if a part is missing
        or does not match its checksum."""
        return _raised(*self.kept_found(kept))

    def routing(self, routing: Routing) -> Routing:
        """Return ``routing`` with its rows in memory. Raises :class:`~headrace.base.errors.StoreError` if a part is
        missing or does not match its checksum."""
        return _raised(*self.routing_found(routing))

    def kept_found(self, kept: KeptSets) -> tuple[KeptSets, list[LostRows]]:
        """Return ``kept`` with its ids in memory, and the ranges of ids that could not be read; those ids are 0."""
        ids_E, lost = self._read_column(kept.ids_E, kept.stored)
        return KeptSets(ids_E=ids_E, sizes_T=kept.sizes_T), lost

    def routing_found(self, routing: Routing) -> tuple[Routing, list[LostRows]]:
        """Return ``routing`` with its rows in memory, and the ranges of rows that could not be read; those rows are
        0."""
        experts_RLK, lost = self._read_column(routing.experts_RLK, routing.stored)
        return Routing(known_T=routing.known_T, experts_RLK=experts_RLK), lost

    def _read_column(self, rows: Rows, stored: Stored) -> tuple[Rows, list[LostRows]]:
        """Return the rows of a column, and the ranges that could not be read. ``stored`` refers to the rows in the
        store; if it is empty, all rows are in memory, in ``rows``. The dtype and row shape of ``rows`` are those of the
        column in either case."""
        if not stored:
            return rows, []
        whole = np.zeros((sum([piece.count for piece in stored]), *rows.shape[1:]), rows.dtype)
        lost, first = [], 0
        for piece in stored:
            last = first + piece.count
            try:
                whole[first:last] = self._read_piece(piece, rows)
            except StoreError as error:
                lost.append(LostRows(first, last, error))
            first = last
        return whole, lost

    def _read_piece(self, piece: StoredRows, like: Rows) -> Rows:
        """Return the rows of ``piece``, with the dtype and row shape of ``like``. Raises
        :class:`~headrace.base.errors.StoreError` if the part is missing or does not match its checksum."""
        if piece.rows is not None:
            return piece.rows
        part = self.part(piece)
        row_bytes = int(np.prod(like.shape[1:], dtype=np.int64)) * like.itemsize
        first, last = piece.first * row_bytes, (piece.first + piece.count) * row_bytes
        if not 0 <= first <= last <= len(part):
            raise _part_error(piece, f"has {len(part)} bytes, and its rows end at byte {last}")
        return np.frombuffer(part[first:last], like.dtype).reshape(-1, *like.shape[1:])

    def part(self, piece: StoredRows) -> memoryview:
        """Return the whole part that contains ``piece``, after verifying its checksum. Raises
        :class:`~headrace.base.errors.StoreError` if the part is missing or does not match its checksum."""
        end = piece.start + piece.num_bytes
        file = self._maps.get(piece.file)
        if file is None or end > len(file):  # the writer may have appended to the file since it was mapped
            file = self._maps[piece.file] = self._map_file(piece)
        if min(piece.start, piece.num_bytes) < 0 or end > len(file):
            raise _part_error(piece, f"is not there: the file ends at byte {len(file)}")
        part = file[piece.start : end]
        if xxhash.xxh3_64_intdigest(part) != piece.checksum:
            raise _part_error(piece, "differs from what was written")
        return part

    def _map_file(self, piece: StoredRows) -> memoryview:
        """Return the content of the file that contains ``piece``, mapped into memory."""
        if Path(piece.file).name != piece.file or parse_file_name(piece.file)[1] < 0:
            raise _part_error(piece, "is not a file of a store")
        if self._directory is None:
            raise _part_error(piece, "is on another machine, with which this one shares no directory")
        try:
            descriptor = os.open(self._directory / piece.file, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                size = os.fstat(descriptor).st_size
                return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _part_error(piece, f"cannot be read in {self._directory}: {error.strerror}") from None


def _raised(value: T, lost: list[LostRows]) -> T:
    """Return ``value``, or raise the error of the first range of lost rows."""
    if lost:
        raise lost[0].error
    return value


def _part_error(piece: StoredRows, problem: str) -> StoreError:
    """Return the error of the part that contains ``piece``. ``problem`` continues a sentence about the part."""
    return StoreError(
        f"the part of the store at byte {piece.start} of {piece.file!r} {problem}",
        remedy="keep the folder 'columns' of the run's directory whole, on the machine of the learner",
    )


def lies_in_store(batch: Batch) -> bool:
    """Return whether kept-sets or experts of ``batch`` are in a store and not in memory."""
    return bool((batch.kept and batch.kept.stored) or (batch.routing and batch.routing.stored))


def read_batch(batch: Batch, reader: StoreReader) -> tuple[Batch, dict[int, StoreError]]:
    """Return ``batch`` with all columns in memory, read by ``reader``, and the groups with rows that could not be read:
    the index of each group in the batch, mapped to the error. :func:`remove_groups` removes such groups from the
    loss."""
    owners_N = np.repeat(batch.groups_S, batch.lengths_S)
    kept, routing = batch.kept, batch.routing
    lost: dict[int, StoreError] = {}
    if kept is not None:
        owners_E = np.repeat(owners_N, kept.sizes_T)
        kept, lost_ids = reader.kept_found(kept)
        lost |= _errors_by_owner(owners_E, lost_ids)
    if routing is not None:
        owners_R = owners_N[routing.known_T]
        routing, lost_rows = reader.routing_found(routing)
        lost = _errors_by_owner(owners_R, lost_rows) | lost
    return msgspec.structs.replace(batch, kept=kept, routing=routing), lost


def remove_groups(batch: Batch, groups: Iterable[int]) -> tuple[Batch, int]:
    """Return ``batch``, all of whose columns are in memory, without the loss, kept-sets and experts of the groups with
    the indices ``groups``, and the number of tokens whose loss was removed."""
    lost_N = np.repeat(np.isin(batch.groups_S, np.fromiter(groups, np.int64)), batch.lengths_S)
    kept, routing = batch.kept, batch.routing
    if kept is not None:
        stays_E = ~np.repeat(lost_N, kept.sizes_T)
        kept = KeptSets(ids_E=kept.ids_E[stays_E], sizes_T=np.where(lost_N, 0, kept.sizes_T).astype(np.int32))
    if routing is not None:
        stays_R = ~lost_N[routing.known_T]
        routing = Routing(known_T=routing.known_T & ~lost_N, experts_RLK=routing.experts_RLK[stays_R])
    count = int((batch.mask_N & lost_N).sum())
    return msgspec.structs.replace(batch, mask_N=batch.mask_N & ~lost_N, kept=kept, routing=routing), count


def _errors_by_owner(owners: npt.NDArray[np.int32], lost: list[LostRows]) -> dict[int, StoreError]:
    """Return the error of each owner of lost rows: the error of its first lost range. ``owners`` contains the owner of
    every row of the column, which is the index of a group."""
    found: dict[int, StoreError] = {}
    for rows in lost:
        for owner in np.unique(owners[rows.first : rows.last]).tolist():
            found.setdefault(owner, rows.error)
    return found
