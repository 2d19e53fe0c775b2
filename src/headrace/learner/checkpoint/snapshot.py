"""The snapshots of a run. Each snapshot is one directory, which gets its final name only when it is complete.

    begin ──▶ step-000010.tmp-<pid>/ ──▶ commit ──▶ step-000010/
                │  the learner writes                 │  model.safetensors, config.json, tokenizer files, …:
                │  the heavy files                    │      an ordinary Hugging Face model directory
                ▼                                     │  optimizer.safetensors: moments, random state, step
             abandon, or sweep at the next start      │  state.json: the state of the controller,
                                                      │      and the size of every file
                                                      ▼  checksums.xxh3: the hash of every file

Files and directories are flushed before the rename, so a directory with a final name is complete, even if the machine
stops at any time. A directory that has changed since then (an interrupted copy, a bad disk) is detected by its sizes
and hashes and refused. An older snapshot is used only if the user chooses it. This module does not need torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CheckpointError, DataError
from headrace.learner.disk import CHECKSUMS_FILE, SLACK_BYTES, flush_one, seal, verify, whole_or_nothing
from headrace.models.load import RESUMED

STATE_FILE = "state.json"
FORMAT = 1

_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"step-\d{6,}\.tmp-.+")


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at a snapshot, beside the files of the learner."""

    step: int
    """The number of steps before the snapshot."""
    version: int
    """The version of the weights in the snapshot."""
    config_fingerprint: str
    """The hash of the configuration of the run, which the controller compares when the run is resumed."""
    controller: dict[str, Any]
    """The state of the controller as plain JSON: ledger position, data position, seeds."""
    files: dict[str, int] = {}
    """The size in bytes of every other file, by its path in the snapshot; set by :func:`commit`."""
    sealed: bool = False
    """Whether every file has a checksum; set by :func:`commit`. False in snapshots of older versions of Headrace."""
    format: int = FORMAT
    """The version of the format; increased when older versions of Headrace cannot read it any more."""


def begin(directory: Path, step: int) -> Path:
    """Create and return a temporary directory for the files of the snapshot of ``step``. ``directory`` is created if it
    does not exist, but its parent is not, so that a removed run directory is not created again. Raises
    :class:`~headrace.base.errors.CheckpointError` on failure."""
    unfinished = directory / f"{_name(step)}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        directory.mkdir(exist_ok=True)
        unfinished.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"snapshot directory {unfinished} cannot be made: {error}",
            remedy=f"make {directory} writable, or choose another run directory",
        ) from None
    return unfinished


def commit(unfinished: Path, state: SnapshotState) -> Path:
    """Add ``state`` to the written files, flush them, rename the snapshot to its final name, and return its path.

    An existing snapshot of the same step is replaced. On failure ``unfinished`` is removed and
    :class:`~headrace.base.errors.CheckpointError` is raised.
    """
    final = unfinished.with_name(_name(state.step))
    with whole_or_nothing(unfinished, SLACK_BYTES):
        seal(unfinished)  # the learner has hashed its files; this hashes all others
        written = [path for path in _files(unfinished) if path.name != CHECKSUMS_FILE]
        sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in written}
        state = msgspec.structs.replace(state, files=sizes, sealed=True)
        (unfinished / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
        seal(unfinished)
    try:
        with _explained(final, "given its name"):
            _remove(final)
            unfinished.rename(final)
            flush_one(final.parent)
    except CheckpointError:
        abandon(unfinished)
        raise
    return final


def abandon(unfinished: Path) -> None:
    """Remove ``unfinished``, the temporary directory that :func:`begin` returned, if it still exists."""
    shutil.rmtree(unfinished, ignore_errors=True)


def sweep(directory: Path) -> list[Path]:
    """Remove the unfinished snapshots of earlier processes in ``directory``, and return their paths. It must be called
    before the first :func:`begin`."""
    stale = [path for path in _entries(directory) if _UNFINISHED.fullmatch(path.name)]
    for path in stale:
        with _explained(path, "removed"):
            shutil.rmtree(path)
    return stale


def latest(directory: Path) -> Path | None:
    """Return the path of the snapshot in ``directory`` with the highest step; ``None`` if there is none. Its content is
    not checked."""
    return next(iter(_list_snapshots(directory)), None)


def retain(directory: Path, keep: int) -> list[Path]:
    """Remove all complete snapshots in ``directory`` except the ``keep`` newest ones (at least one), and return the
    removed paths."""
    surplus = _complete(directory)[max(1, keep) :]
    for path in surplus:
        with _explained(path, "removed"):
            _remove(path)
    return surplus


def newest_weights(directory: Path) -> Path | None:
    """Return the newest snapshot in ``directory``, after checking its files except the optimizer's; ``None`` if there
    is none. If the run removes the snapshot meanwhile, its successor is returned. Raises
    :class:`~headrace.base.errors.CheckpointError` as :func:`read_state` does."""
    while (snapshot := latest(directory)) is not None:
        try:
            read_state(snapshot, to_resume=False)
        except CheckpointError:
            if snapshot.is_dir():
                raise
            continue
        return snapshot
    return None


def read_state(snapshot: Path, *, to_resume: bool = True) -> SnapshotState:
    """Return the state of a snapshot, after checking its files. Without ``to_resume``, the optimizer's files are not
    checked.

    Raises :class:`~headrace.base.errors.CheckpointError`, with the name of the file, if a file is missing, has changed,
    or has another format. In a snapshot without checksums, of an older version of Headrace, only the sizes of files are
    compared.
    """
    problem = _problem(snapshot, to_resume=to_resume)
    if problem:
        remedy = _remedy(snapshot, to_resume=to_resume)
        raise CheckpointError(f"snapshot {snapshot} cannot be used: {problem}", remedy=remedy)
    return _decode(snapshot)


def _remedy(damaged: Path, *, to_resume: bool) -> str:
    """Return the remedy for a damaged snapshot. It names an older valid snapshot, if there is one, which the user may
    choose."""
    again = "copy it again from where it is whole"
    older = next((path for path in _older(damaged) if not _problem(path, to_resume=to_resume)), None)
    if older is None:
        return f"{again}; there is no older whole snapshot beside it"
    aside = f"mv {damaged} {damaged}.damaged, and the same command again"
    return f"{again}, or continue from {older.name}, which is whole: {aside}"


def _older(snapshot: Path) -> list[Path]:
    """Return the snapshots in the same directory with a smaller step, newest first; an empty list if ``snapshot`` does
    not have the name of a snapshot."""
    named = _list_snapshots(snapshot.parent)
    return named[named.index(snapshot) + 1 :] if snapshot in named else []


def _problem(snapshot: Path, *, to_resume: bool) -> str:
    """Return why a snapshot cannot be used, in words; empty if it can. Names and sizes are checked before the hashes of
    whole files. Without ``to_resume``, the optimizer's files are not checked."""
    return _defect(snapshot, to_resume=to_resume) or _changed_file(snapshot, to_resume=to_resume)


def _files_to_read(state: SnapshotState, *, to_resume: bool) -> list[str]:
    """Return the names of the files of a snapshot that are read: all files to resume a run; otherwise all except the
    optimizer's."""
    return [name for name in state.files if to_resume or not name.startswith(RESUMED)]


def _decode(snapshot: Path) -> SnapshotState:
    """Return the content of the snapshot's state file, without verifying its checksum."""
    return msgspec.json.decode((snapshot / STATE_FILE).read_bytes(), type=SnapshotState)


def _changed_file(snapshot: Path, *, to_resume: bool) -> str:
    """Return, in words, the first file that is missing or has changed by its checksum; empty if there is none. Without
    ``to_resume``, the files that only a resumed run reads are not checked."""
    state = _decode(snapshot)
    try:
        found = verify(snapshot, [STATE_FILE, *_files_to_read(state, to_resume=to_resume)])
    except DataError as error:
        return error.problem
    return f"{CHECKSUMS_FILE} is missing" if state.sealed and not found else ""


def _defect(snapshot: Path, *, to_resume: bool = True) -> str:
    """Return why a snapshot is not complete, in words; empty if it is complete. The state file is read, and the sizes
    of all other files are compared with it. Without ``to_resume``, the optimizer's files are not checked."""
    try:
        verify(snapshot, [STATE_FILE])  # check the state file before reading it
        state = _decode(snapshot)
        sizes = {name: (snapshot / name).stat().st_size for name in _files_to_read(state, to_resume=to_resume)}
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(snapshot)} is missing"
    except DataError as error:
        return error.problem
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"{STATE_FILE}: {error}"
    if state.format != FORMAT:
        return f"its format is {state.format}, this Headrace reads {FORMAT}"
    wrong = [name for name, size in sizes.items() if size != state.files[name]]
    return f"{wrong[0]} has {sizes[wrong[0]]} bytes, not {state.files[wrong[0]]}" if wrong else ""


def _list_snapshots(directory: Path) -> list[Path]:
    """Return all directories in ``directory`` that have the name of a snapshot, complete or not, newest first: the one
    with the largest step."""
    numbered = [(int(match[1]), path) for path in _entries(directory) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _complete(directory: Path) -> list[Path]:
    """Return the complete snapshots in ``directory``, newest first, judged by :func:`_defect` without hashing whole
    files."""
    return [path for path in _list_snapshots(directory) if not _defect(path)]


@contextmanager
def _explained(path: Path, action: str) -> Iterator[None]:
    """Return a context that converts an ``OSError`` to a :class:`~headrace.base.errors.CheckpointError` about the
    snapshot ``path``. ``action`` completes the text "cannot be ...": "removed", for example."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"snapshot {path} cannot be {action}: {error}",
            remedy=f"make {path.parent} writable and whole, then --resume",
        ) from None


def _remove(snapshot: Path) -> None:
    """Remove ``snapshot``, if it exists. It is renamed first, so that a partly deleted directory is not a snapshot."""
    if snapshot.exists():
        renamed = snapshot.rename(snapshot.with_name(f"{snapshot.name}.tmp-removed-{os.getpid()}"))
        shutil.rmtree(renamed)


def _entries(directory: Path) -> list[Path]:
    """Return the directories in ``directory``, in any order; an empty list if it does not exist."""
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _files(directory: Path) -> list[Path]:
    """Return all files below ``directory``, sorted by path."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _name(step: int) -> str:
    """Return the name of the directory of the snapshot of ``step``, such as ``step-000010``."""
    return f"step-{step:06d}"
