"""The files in which engines store large columns of sampled tokens (kept-sets, experts), and which files are still
needed.

An engine writes its files one after the other (:mod:`headrace.base.store`), and each file contains columns of many
groups. A file is *closed* when its engine has started the next file. A closed file can be removed when every group that
may have columns in it was dropped, or was trained before the newest snapshot, so that no resumed run trains the group
again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from headrace.base.config import Section
from headrace.base.store import LEARNED, READY, parse_file_name
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
    """A register of the files of a run's store and of the groups that use each file. The flow updates it; the saver of
    snapshots removes the files that it returns."""

    def __init__(self, directory: Path, config: ColumnsConfig) -> None:
        """Begin without known files. ``directory`` is the directory of the store, which may not exist yet; ``config``
        says how long columns are kept."""
        self._directory = directory
        self._removes_unneeded = config.keep == "until_trained"
        """Whether files are removed as soon as no group needs them."""
        self._users_by_file: dict[str, set[int]] = {}
        """The groups that may have columns in each file, by the file's name."""
        self._closed: set[str] = set()
        """The names of the files into which no writer will write any more."""
        self._newest: dict[str, int] = {}
        """The index of the newest known file of each writer."""
        self._unneeded_from: dict[int, int] = {}
        """The step of the first snapshot with which the columns of a group are not needed, by the group's number."""
        self._synced: dict[str, int] = {}
        """The number of bytes of each file that would survive a power failure."""

    def record_resumed_groups(self, groups: Sequence[ResumedGroup]) -> None:
        """Register all existing files, as closed, and the groups with which a resumed run continues as their users.
        Call this once, before an engine writes."""
        for name in _list_files(self._directory):
            writer, number = parse_file_name(name)
            if writer == LEARNED:
                continue
            self._users_by_file[name] = set()
            self._closed.add(name)
            self._newest[writer] = max(number, self._newest.get(writer, -1))
        for group in groups:
            turns = [turn for episode in group.episodes for turn in episode.turns]
            for name in collect_files([*turns, *group.partial_turns]):
                self._users_by_file.setdefault(name, set()).add(group.number)

    def record_ended_episode(
        self, number: int, turns: Sequence[Turn], open_groups: Callable[[], Iterable[int]]
    ) -> None:
        """Register the group ``number`` as a user of the files in which ``turns``, the turns of one of its ended
        episodes, have columns. ``open_groups`` returns the groups with episodes that have not ended, which may have
        columns in any file that was written so far."""
        if not self._removes_unneeded:
            return
        for name in collect_files(turns):
            if name not in self._users_by_file:
                self._add(name, open_groups)
            self._users_by_file[name].add(number)

    def record_dropped_group(self, number: int) -> None:
        """Record that the group ``number`` was dropped, so that it does not need its columns."""
        if self._removes_unneeded:
            self._unneeded_from[number] = 0

    def record_trained_groups(self, numbers: Sequence[int], step: int) -> None:
        """Record that ``step`` has trained the groups ``numbers``, so that a snapshot of step + 1 or later does not
        need their columns."""
        if self._removes_unneeded:
            self._unneeded_from.update(dict.fromkeys(numbers, step + 1))

    def take_unneeded(self, step: int) -> list[Path]:
        """Return the paths of the closed files that are not needed once the snapshot of ``step`` exists, and remove
        them from this register. The caller deletes the files. Empty if the settings keep all files."""
        freed_groups = {number for number, at in self._unneeded_from.items() if at <= step}
        for number in freed_groups:
            del self._unneeded_from[number]
        for users in self._users_by_file.values():
            users.difference_update(freed_groups)
        # the newest file of a writer stays, so that no later one gets its name
        newest = self._newest.items()
        unneeded = [
            name
            for name in self._closed
            if self._removes_unneeded and not self._users_by_file[name] and parse_file_name(name) not in newest
        ]  # fmt: skip
        self._closed.difference_update(unneeded)
        for name in unneeded:
            del self._users_by_file[name]
            self._synced.pop(name, None)
        return [self._directory / name for name in sorted(unneeded)]

    def sync(self) -> None:
        """Sync all files of the store to the disk, so that they would survive a power failure. This blocks, so call it
        in a thread."""
        for name in _list_files(self._directory):
            try:
                descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:  # not an error here: a batch that needs the file raises one
                continue
            try:
                size = os.fstat(descriptor).st_size
                if self._synced.get(name) != size:
                    os.fsync(descriptor)
                    self._synced[name] = size
            finally:
                os.close(descriptor)

    def _add(self, name: str, open_groups: Callable[[], Iterable[int]]) -> None:
        """Add the file ``name``, to which an ended episode refers for the first time. This closes the earlier files of
        the same writer: only the groups that are open now may still have columns in them."""
        writer, number = parse_file_name(name)
        self._users_by_file[name] = set()
        newest = max(number, self._newest.get(writer, -1))
        self._newest[writer] = newest
        users = set(open_groups())
        for other_name in self._users_by_file.keys() - self._closed:
            if parse_file_name(other_name)[0] == writer and parse_file_name(other_name)[1] < newest:
                self._closed.add(other_name)
                self._users_by_file[other_name] |= users


def collect_files(turns: Iterable[Turn | TokenChunk]) -> set[str]:
    """Return the names of the store's files that contain columns of ``turns``."""
    names: set[str] = set()
    for turn in turns:
        context = turn.context_routing if isinstance(turn, Turn) else turn.prompt_routing
        for column in (turn.tokens.kept, turn.tokens.routing, context):
            names.update(_files(column))
    return names


def remove(files: Sequence[Path]) -> None:
    """Delete ``files`` of a store; a file that does not exist is skipped. This blocks, so call it in a thread."""
    for file in files:
        file.unlink(missing_ok=True)


def _files(column: KeptSets | Routing | None) -> Iterable[str]:
    """Return the names of the files that contain rows of ``column``; empty if ``column`` is ``None`` or its rows are in
    memory."""
    return () if column is None else [part.file for part in column.stored if part.rows is None]


def _list_files(directory: Path) -> list[str]:
    """Return the names of the files in a store's directory, in order, without those of ready groups
    (:mod:`headrace.flow.ready`), which a resumed run does not need."""
    if not directory.is_dir():
        return []
    writers = {name: parse_file_name(name) for name in os.listdir(directory)}
    return sorted(name for name, (writer, number) in writers.items() if number >= 0 and writer != READY)
