"""The columns of the groups that are ready for a step. The columns are in files of the run's store, from which the
learner reads them; the controller has only references to them.

    ready group ──put──▶ RUN/columns/ready.000000 ──▶ every rank of the learner
                  └────▶ the same group, whose tokens are views of the file

The views use no memory until they are read, and the controller reads only few of them. A file is needed until its
groups are trained or dropped. A resumed run does not need the files of its earlier life: it restores its ready groups
from the ledger, and writes them into new files.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.base.errors import StoreError
from headrace.base.store import FILE_BYTES, READY, ColumnStore, parse_file_name
from headrace.base.types.scored import ScoredGroup
from headrace.flow.ledger.bundles import attach_columns, encode_group

INLINE_TOKENS = 340
"""The largest number of tokens, about 4 KiB, of a group that stays in memory and is sent in the messages themselves,
because a reference would need nearly as much space. No other rule decides which groups are stored."""
UNSTORED = "store_full"
"""The reason for dropping a group whose columns could not be written into the store."""


def is_stored(group: ScoredGroup) -> bool:
    """Return whether ``group`` has so many tokens that its columns are written into the store."""
    return sum([len(turn.tokens.ids_T) for each in group.episodes for turn in each.turns]) > INLINE_TOKENS


class ReadyColumns:
    """The files with the columns of ready groups. The flow owns this object."""

    def __init__(self, directory: Path, *, limit_bytes: int | None = None, file_bytes: int = FILE_BYTES) -> None:
        """Use ``directory``, the directory of the run's store. All files of the store together may have at most
        ``limit_bytes`` bytes; ``None``: as many as the disk has room for. ``file_bytes`` is the size at which the next
        file is begun."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._file_bytes = file_bytes
        self._store: ColumnStore | None = None
        """The store into which columns are written; ``None`` until the first group."""
        self._maps: dict[str, memoryview] = {}
        """The files that are in use, mapped into memory, by name. New parts are written into the last of them."""
        self._users: dict[str, set[int]] = {}
        """The numbers of the groups that need each file, by the file's name."""

    def clear(self) -> None:
        """Remove all files of ready groups, also the files of an earlier life of the run: the ledger contains these
        groups. Call this before the first group is put, and at the end."""
        if self._directory.is_dir():
            for name in os.listdir(self._directory):
                if parse_file_name(name)[0] == READY:
                    (self._directory / name).unlink(missing_ok=True)
        if self._store is not None:
            self._store.close()
        self._store = None
        self._maps.clear()
        self._users.clear()

    def put(self, group: ScoredGroup) -> ScoredGroup:
        """Write the columns of ``group``, which is ready, into the store, and return a copy of the group whose tokens
        are views of the file. A group with few tokens is returned unchanged. Raises
        :class:`~headrace.base.errors.StoreError` if the columns cannot be written."""
        if not is_stored(group):
            return group
        if self._store is None:  # no file or directory is created before a group needs it
            self._store = ColumnStore(
                self._directory, READY, limit_bytes=self._limit_bytes, file_bytes=self._file_bytes
            )  # fmt: skip
        columns = np.frombuffer(encode_group(group.episodes), np.uint8)
        try:
            (piece,) = self._store.put(columns)
        except StoreError:
            if not self._remove_newest(self._store):
                raise
            (piece,) = self._store.put(columns)
        mapped = self._mapped(piece.file, piece.start + piece.num_bytes)
        self._users[piece.file].add(group.number)
        data = mapped[piece.start : piece.start + piece.num_bytes]
        return replace(group, episodes=tuple(attach_columns(data, group.episodes)), columns=piece)

    def release(self, group: ScoredGroup) -> None:
        """Remove the file with the columns of ``group``, which was trained or dropped, if no other group needs this
        file and no new parts are written into it."""
        if group.columns is None:
            return
        name = group.columns.file
        self._users[name].discard(group.number)
        if name != next(reversed(self._maps)):
            self._remove_unused(name)

    def _remove_newest(self, store: ColumnStore) -> bool:
        """Remove the file into which parts were written last, if no group needs it, and return whether it was removed.
        ``store`` then begins another file."""
        name = next(reversed(self._maps), "")
        if not name or self._users[name]:
            return False
        store.close()
        self._remove_unused(name)
        return True

    def _mapped(self, name: str, end: int) -> memoryview:
        """Return the file ``name``, which has ``end`` bytes or more, mapped into memory. Raises
        :class:`~headrace.base.errors.StoreError` if the file cannot be mapped."""
        if name in self._maps:
            return self._maps[name]
        path = self._directory / name
        try:
            # The file is mapped once, with room for the parts that are appended later.
            size = max(end, self._file_bytes)
            os.truncate(path, size)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                found = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(
                f"the file {path} cannot be mapped: {error.strerror}", remedy=f"make room in {self._directory}"
            ) from None
        before = list(self._maps)
        self._maps[name], self._users[name] = found, set()
        for other in before[-1:]:  # parts were written into this file until now, and it may be unused already
            self._remove_unused(other)
        return found

    def _remove_unused(self, name: str) -> None:
        """Remove the file ``name``, into which no new parts are written, if no group needs it."""
        if not self._users[name]:
            del self._users[name], self._maps[name]
            (self._directory / name).unlink(missing_ok=True)
