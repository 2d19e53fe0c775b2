"""The columns of the groups that are ready for a step: they lie in files of the run's store, from which the learner
reads them, and the controller keeps references.

    ready group ──put──▶ RUN/columns/ready.000000 ──▶ every rank of the learner
                  └────▶ the same group, whose tokens are views of the file

The views use no memory until they are read, and the controller reads only few of them. The files are needed until
their groups are trained or dropped. What a resumed run needs is in the ledger: it writes its ready groups again.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from headrace.base.errors import StoreError
from headrace.base.store import FILE_BYTES, READY, ColumnStore, writer_of
from headrace.base.types.scored import ScoredGroup
from headrace.flow.ledger.bundles import encode_group, with_columns_of

INLINE_TOKENS = 340
"""A group of up to this many tokens, about 4 KiB, stays in memory and travels in the messages: a reference to it would
take nearly as much. This is the only rule on what is stored."""
UNSTORED = "store_full"
"""The reason of a group that was dropped because its columns could not be written into the store."""


class ReadyColumns:
    """The files with the columns of ready groups. The flow owns it."""

    def __init__(self, directory: Path, *, limit_bytes: int | None = None, file_bytes: int = FILE_BYTES) -> None:
        """Write into ``directory``, that of the run's store, whose files together may have ``limit_bytes`` bytes;
        ``None``: as many as the disk has room for. ``file_bytes`` is the size at which the next file is begun."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._file_bytes = file_bytes
        self._store: ColumnStore | None = None
        self._maps: dict[str, memoryview] = {}
        """The files that are in use, mapped into memory, by name; the last one is written to."""
        self._users: dict[str, set[int]] = {}
        """The numbers of the groups that need each file, by its name."""

    def clear(self) -> None:
        """Remove all files of ready groups, also those of an earlier life of the run: the ledger has these groups. It
        is called before the first group is put, and at the end."""
        if self._directory.is_dir():
            for name in os.listdir(self._directory):
                if writer_of(name)[0] == READY:
                    (self._directory / name).unlink(missing_ok=True)

    def put(self, group: ScoredGroup) -> ScoredGroup:
        """Write the columns of a group that is ready, and return the group with views of the file in place of its
        tokens; the same object if it has few tokens. Raises :class:`~headrace.base.errors.StoreError` if they cannot be
        written."""
        num_tokens = sum([len(turn.tokens.ids_T) for episode in group.episodes for turn in episode.turns])
        if num_tokens <= INLINE_TOKENS:
            return group
        if self._store is None:  # no file and no directory before the first group that needs them
            self._store = ColumnStore(
                self._directory, READY, limit_bytes=self._limit_bytes, file_bytes=self._file_bytes
            )  # fmt: skip
        (piece,) = self._store.put(np.frombuffer(encode_group(group.episodes), np.uint8))
        mapped = self._mapped(piece.file, piece.start + piece.num_bytes)
        self._users[piece.file].add(group.number)
        data = mapped[piece.start : piece.start + piece.num_bytes]
        return replace(group, episodes=tuple(with_columns_of(data, group.episodes)), columns=piece)

    def release(self, group: ScoredGroup) -> None:
        """Remove the files that no group needs, now that ``group`` was trained or dropped."""
        if group.columns is None:
            return
        name = group.columns.file
        self._users[name].discard(group.number)
        if name != next(reversed(self._maps)):
            self._remove_unused(name)

    def _mapped(self, name: str, end: int) -> memoryview:
        """Return the file ``name``, which has ``end`` bytes or more, mapped into memory. Raises
        :class:`~headrace.base.errors.StoreError` if that is not possible."""
        if name in self._maps:
            return self._maps[name]
        path = self._directory / name
        try:
            # Parts are appended later: the whole file is mapped once, with room for them.
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
        for other in before[-1:]:  # it was written to until now, and may be unused already
            self._remove_unused(other)
        return found

    def _remove_unused(self, name: str) -> None:
        """Remove a file that is not written to any more, if no group needs it."""
        if not self._users[name]:
            del self._users[name], self._maps[name]
            (self._directory / name).unlink(missing_ok=True)
