"""The files of the run's store for heavy columns (kept-sets, experts): which of them the flow still needs.

An engine writes files one after the other (:mod:`headrace.base.store`), and each holds columns of many groups. A file
is *closed* when its engine has begun the next one. A closed file can be removed when each group that may have columns
in it was dropped, or trained before the newest snapshot, so that no resumed run trains it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.base.config import Section
from headrace.base.store import LEARNED, READY, writer_of
from headrace.base.types.episode import TokenChunk, Turn
from headrace.base.types.recorded import KeptSets, Routing
from headrace.flow.ledger.base import ResumedGroup


class ColumnsConfig(Section):
    """The settings of the store for columns of tokens, in the folder ``columns`` of the run's directory. It is used
    where engines and learner are processes of the controller's machine."""

    keep: Literal["always", "until_trained"] = "always"
    """How long the kept-sets and experts of sampled tokens are kept: with the run (``always``), or until a snapshot
    contains the step that trained them (``until_trained``). ``headrace ledger RUN --replay``, the
    dashboard and older snapshots need those of all steps."""
    limit_gb: float | None = Field(default=None, ge=1.0)
    """The most gigabytes that the store may have, ready groups included. A sequence for which it has no room fails, and
    is counted under the reason of its episode; a ready group for which it has no room is dropped, and counted as
    ``store_full``. Unset: as much as the disk has room for."""

    @property
    def limit_bytes(self) -> int | None:
        """Return the most bytes that the store may have; ``None``: as many as the disk has room for."""
        return None if self.limit_gb is None else int(self.limit_gb * 1e9)


class ColumnFiles:
    """The files of a run's store and the groups that use them. The flow owns it, and the saver removes files."""

    def __init__(self, directory: Path, config: ColumnsConfig) -> None:
        """Begin without known files. ``directory`` is that of the store; it need not exist."""
        self._directory = directory
        self._prunes = config.keep == "until_trained"
        self._users: dict[str, set[int]] = {}
        """The groups that may have columns in each file, by the file's name."""
        self._closed: set[str] = set()
        self._newest: dict[str, int] = {}
        """The index of the newest known file of each writer."""
        self._free_at: dict[int, int] = {}
        """The step of the first snapshot with which the columns of a group are not needed, by the group's number."""
        self._synced: dict[str, int] = {}
        """The number of bytes of each file that would survive a power failure."""

    def resumed(self, groups: Sequence[ResumedGroup]) -> None:
        """Note the groups with which a resumed run continues: they need the columns that were recorded of them. It is
        called once, before an engine writes."""
        for name in _listed(self._directory):
            writer, number = writer_of(name)
            if writer == LEARNED:
                continue
            self._users[name] = set()
            self._closed.add(name)
            self._newest[writer] = max(number, self._newest.get(writer, -1))
        for group in groups:
            turns = [turn for episode in group.episodes for turn in episode.turns]
            for name in files_of([*turns, *group.partial_turns]):
                self._users.setdefault(name, set()).add(group.number)

    def ended(self, number: int, turns: Sequence[Turn], open_groups: Callable[[], Iterable[int]]) -> None:
        """Note an episode of the group ``number`` that has ended. ``open_groups`` returns the groups with episodes that
        have not ended, which may have columns in any file that was written so far."""
        if not self._prunes:
            return
        for name in files_of(turns):
            if name not in self._users:
                self._add(name, open_groups)
            self._users[name].add(number)

    def dropped(self, number: int) -> None:
        """Note that the group ``number`` was dropped, and will never be trained."""
        if self._prunes:
            self._free_at[number] = 0

    def trained(self, numbers: Sequence[int], step: int) -> None:
        """Note that ``step`` has trained the groups ``numbers``."""
        if self._prunes:
            self._free_at.update(dict.fromkeys(numbers, step + 1))

    def take_unneeded(self, step: int) -> list[Path]:
        """Return the files that are not needed once the snapshot of ``step`` exists, and forget them; none if all are
        kept. The caller removes them."""
        freed = {number for number, at in self._free_at.items() if at <= step}
        for number in freed:
            del self._free_at[number]
        for users in self._users.values():
            users.difference_update(freed)
        # the newest file of a writer stays, so that no later one gets its name
        newest = self._newest.items()
        unneeded = [
            name
            for name in self._closed
            if self._prunes and not self._users[name] and writer_of(name) not in newest
        ]  # fmt: skip
        self._closed.difference_update(unneeded)
        for name in unneeded:
            del self._users[name]
            self._synced.pop(name, None)
        return [self._directory / name for name in sorted(unneeded)]

    def sync(self) -> None:
        """Wait until what was written to the store so far would survive a power failure. This may take long, and is
        called in a thread."""
        for name in _listed(self._directory):
            try:
                descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:  # a batch that needs the file will say so
                continue
            try:
                size = os.fstat(descriptor).st_size
                if self._synced.get(name) != size:
                    os.fsync(descriptor)
                    self._synced[name] = size
            finally:
                os.close(descriptor)

    def _add(self, name: str, open_groups: Callable[[], Iterable[int]]) -> None:
        """Add a file that an ended episode refers to for the first time. Earlier files of its writer are closed: the
        groups that are open now may have columns in them, and later ones cannot."""
        writer, number = writer_of(name)
        self._users[name] = set()
        newest = max(number, self._newest.get(writer, -1))
        self._newest[writer] = newest
        users = set(open_groups())
        for other in self._users.keys() - self._closed:
            if writer_of(other)[0] == writer and writer_of(other)[1] < newest:
                self._closed.add(other)
                self._users[other] |= users


def files_of(turns: Iterable[Turn | TokenChunk]) -> set[str]:
    """Return the names of the files of the store in which columns of ``turns`` lie."""
    found: set[str] = set()
    for turn in turns:
        context = turn.context_routing if isinstance(turn, Turn) else turn.prompt_routing
        for column in (turn.tokens.kept, turn.tokens.routing, context):
            found.update(_files(column))
    return found


def remove(files: Sequence[Path]) -> None:
    """Remove files of a store. This may take long, and is called in a thread."""
    for file in files:
        file.unlink(missing_ok=True)


def _files(column: KeptSets | Routing | None) -> Iterable[str]:
    """Return the names of the files in which the rows of ``column`` lie."""
    return () if column is None else [piece.file for piece in column.stored if piece.rows is None]


def _listed(directory: Path) -> list[str]:
    """Return the names of the files in a store's directory, in order, without those of ready groups
    (:mod:`headrace.flow.ready`), which a resumed run does not need."""
    if not directory.is_dir():
        return []
    writers = {name: writer_of(name) for name in os.listdir(directory)}
    return sorted(name for name, (writer, number) in writers.items() if number >= 0 and writer != READY)
