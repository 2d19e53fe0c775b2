"""Snapshots of a run. Each is one directory, which appears under its final name only when it is complete.

    begin ──▶ step-000010.tmp-<pid>/ ──▶ commit ──▶ step-000010/
                │  the learner writes                 │  model.safetensors, config.json, tokenizer files, …:
                │  the heavy files                    │      an ordinary Hugging Face model directory
                ▼                                     │  optimizer.safetensors: moments, random state, step
             abandon, or sweep at the next start      │  state.json: everything the controller must remember,
                                                      │      and the size of every file
                                                      ▼  checksums.xxh3: the hash of every file

Files and directories are flushed before the rename, so a directory with the final name is complete, whenever the
machine stopped. A directory that has changed since then (an interrupted copy, a bad disk) is detected by its sizes and
hashes, and is refused with its name; an older one is used only when the user says so. This module does not need torch.
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
    """Number of optimizer steps done."""
    version: int
    """Version of the weights in the snapshot."""
    config_fingerprint: str
    """Hash of the configuration of the run, which the controller compares on resume."""
    controller: dict[str, Any]
    """State of the controller as plain JSON: ledger position, data position, seeds."""
    files: dict[str, int] = {}
    """Size in bytes of every other file, by its path in the snapshot; :func:`commit` fills it in."""
    sealed: bool = False
    """Whether every file has a checksum; :func:`commit` sets it. Older programs wrote no checksums."""
    format: int = FORMAT
    """Version of the format, which is raised when older programs cannot read it any more."""


def begin(directory: Path, step: int) -> Path:
    """Return a new directory in which to write the snapshot of ``step``. ``directory`` is created if it is missing, but
    its parent is not: a run directory that was removed does not come back as an empty one."""
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
        seal(unfinished)  # the learner has hashed its files; this hashes the others
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
    """Remove the directory that :func:`begin` made, if it still exists."""
    shutil.rmtree(unfinished, ignore_errors=True)


def sweep(directory: Path) -> list[Path]:
    """Remove unfinished snapshots of an earlier process, and return their paths. Call it before the first
    :func:`begin`."""
    stale = [path for path in _entries(directory) if _UNFINISHED.fullmatch(path.name)]
    for path in stale:
        with _explained(path, "removed"):
            shutil.rmtree(path)
    return stale


def latest(directory: Path) -> Path | None:
    """Return the snapshot with the highest step, complete or not; ``None`` if there is none."""
    return next(iter(_named(directory)), None)


def retain(directory: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest complete snapshots, and return the removed paths. The newest complete one
    always stays."""
    surplus = _whole(directory)[max(1, keep) :]
    for path in surplus:
        with _explained(path, "removed"):
            _remove(path)
    return surplus


def newest_weights(directory: Path) -> Path | None:
    """Return the newest snapshot in ``directory`` after checking its files, without the optimizer's; ``None`` if there
    is none. A snapshot that the run removes meanwhile is left for the one that took its place. Raises
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
    """Return the state of a snapshot after checking every file, or, where nothing is ``to_resume``, all but those of
    the optimizer.

    Raises :class:`~headrace.base.errors.CheckpointError`, which names the file, if a file is missing, has changed, or
    has another format. For a snapshot without checksums, from an older program, only the sizes of the files are
    compared.
    """
    problem = _problem(snapshot, to_resume=to_resume)
    if problem:
        remedy = _remedy(snapshot, to_resume=to_resume)
        raise CheckpointError(f"snapshot {snapshot} cannot be used: {problem}", remedy=remedy)
    return _decode(snapshot)


def _remedy(damaged: Path, *, to_resume: bool) -> str:
    """Return the remedy for a damaged snapshot: it offers an older one, which is never used without the user's
    consent."""
    again = "copy it again from where it is whole"
    older = next((path for path in _older(damaged) if not _problem(path, to_resume=to_resume)), None)
    if older is None:
        return f"{again}; there is no older whole snapshot beside it"
    aside = f"mv {damaged} {damaged}.damaged, and the same command again"
    return f"{again}, or continue from {older.name}, which is whole: {aside}"


def _older(snapshot: Path) -> list[Path]:
    """Return the snapshots beside ``snapshot`` with a smaller step, newest first; none if it has not the name of a
    snapshot."""
    named = _named(snapshot.parent)
    return named[named.index(snapshot) + 1 :] if snapshot in named else []


def _problem(snapshot: Path, *, to_resume: bool) -> str:
    """Return why a snapshot cannot be used, in words; empty if it can. Cheap checks of names and sizes come before the
    hashes of the whole files. Without ``to_resume`` the optimizer's files are not checked."""
    return _defect(snapshot, to_resume=to_resume) or _change(snapshot, to_resume=to_resume)


def _read(state: SnapshotState, *, to_resume: bool) -> list[str]:
    """Return the names of the files of a snapshot that its use reads: all to resume a run, and all but the optimizer's
    otherwise."""
    return [name for name in state.files if to_resume or not name.startswith(RESUMED)]


def _decode(snapshot: Path) -> SnapshotState:
    """Return the content of the snapshot's state file, unchecked."""
    return msgspec.json.decode((snapshot / STATE_FILE).read_bytes(), type=SnapshotState)


def _change(snapshot: Path, *, to_resume: bool) -> str:
    """Return which file has changed since it was written or is missing, by its checksum and in words; empty if none.
    ``to_resume`` says whether the files are checked that only a resumed run reads, such as the optimizer's."""
    state = _decode(snapshot)
    try:
        found = verify(snapshot, [STATE_FILE, *_read(state, to_resume=to_resume)])
    except DataError as error:
        return error.problem
    return f"{CHECKSUMS_FILE} is missing" if state.sealed and not found else ""


def _defect(snapshot: Path, *, to_resume: bool = True) -> str:
    """Return why a snapshot is not complete, judged by its state file and the sizes of the others without reading them;
    empty if it is complete. Without ``to_resume`` the optimizer's files do not count."""
    try:
        verify(snapshot, [STATE_FILE])  # check the state file before reading it
        state = _decode(snapshot)
        sizes = {name: (snapshot / name).stat().st_size for name in _read(state, to_resume=to_resume)}
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


def _named(directory: Path) -> list[Path]:
    """Return all directories in ``directory`` with the name of a snapshot, complete or not, newest first."""
    named = [(int(match[1]), path) for path in _entries(directory) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def _whole(directory: Path) -> list[Path]:
    """Return the complete snapshots in ``directory``, newest first. Only sizes are compared; files are not read as a
    whole."""
    return [path for path in _named(directory) if not _defect(path)]


@contextmanager
def _explained(path: Path, action: str) -> Iterator[None]:
    """Raise an ``OSError`` of the body as :class:`~headrace.base.errors.CheckpointError` about the snapshot ``path``.
    ``action`` is the participle that completes "cannot be ...": written, read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"snapshot {path} cannot be {action}: {error}",
            remedy=f"make {path.parent} writable and whole, then --resume",
        ) from None


def _remove(snapshot: Path) -> None:
    """Rename the snapshot before deleting it, so that a half-deleted directory does not count as a snapshot."""
    if snapshot.exists():
        doomed = snapshot.rename(snapshot.with_name(f"{snapshot.name}.tmp-removed-{os.getpid()}"))
        shutil.rmtree(doomed)


def _entries(directory: Path) -> list[Path]:
    """Return the directories in ``directory``, in no order; none if it does not exist."""
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _files(directory: Path) -> list[Path]:
    """Return all files below ``directory``, sorted by path."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _name(step: int) -> str:
    """Return the name of the directory of the snapshot of ``step``, such as ``step-000010``."""
    return f"step-{step:06d}"
