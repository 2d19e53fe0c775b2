"""One snapshot is one directory, and it appears at once.

    begin ──▶ step-000010.tmp-<pid>/ ──▶ commit ──▶ step-000010/
                │  the learner writes                 │  model.safetensors, config.json, tokenizer files, …:
                │  the heavy files                    │      an ordinary Hugging Face model directory
                ▼                                     │  optimizer.safetensors: moments, random state, step
             abandon, or sweep at the next start      │  state.json: everything the controller must remember,
                                                      │      and the size of every file
                                                      ▼  checksums.xxh3: the hash of every file

Files and directories are flushed before the rename, so a directory with the final name is whole, whenever the machine
stopped. One that has changed since then (a copy broken off, a bad disk) is known by its sizes and hashes and is refused
by name; an older one is used only when the user says so. Nothing here needs torch.
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
from headrace.learner.checksums import CHECKSUMS_FILE, seal, verify
from headrace.learner.disk import SLACK_BYTES, flush_one, whole_or_nothing

STATE_FILE = "state.json"
FORMAT = 1

_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"step-\d{6,}\.tmp-.+")


class SnapshotState(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller must remember, beside what the learner wrote."""

    step: int
    """Optimizer steps done."""
    version: int
    """The version of the weights in it."""
    config_fingerprint: str
    """Of the configuration that the run had; the controller compares it."""
    controller: dict[str, Any]
    """Ledger position, data position, seeds, in the controller's own words; plain JSON."""
    files: dict[str, int] = {}
    """Size in bytes of every other file, by path within the snapshot; filled in by :func:`commit`."""
    sealed: bool = False
    """Whether every file has a checksum; filled in by :func:`commit`. Older programs wrote none."""
    format: int = FORMAT
    """Raised when an older reader could no longer make sense of it."""


def begin(directory: Path, step: int) -> Path:
    """A fresh directory in which to write the snapshot of ``step``; ``directory`` is made if it is missing, but not
    what it is in: a run directory that was removed does not come back as an empty one."""
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
    """Add ``state`` to what was written, flush, and give the snapshot its name; the path it has from now on.

    A snapshot of the same step, left by an earlier life of the run, makes room. On failure ``unfinished`` is removed
    and :class:`~headrace.base.errors.CheckpointError` raised.
    """
    final = unfinished.with_name(_name(state.step))
    with whole_or_nothing(unfinished, SLACK_BYTES):
        seal(unfinished)  # the learner has hashed what it wrote; what is missing is hashed here
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
    """Remove what :func:`begin` made; nothing happens if it is gone."""
    shutil.rmtree(unfinished, ignore_errors=True)


def sweep(directory: Path) -> list[Path]:
    """Remove what an earlier life of the run left unfinished; the paths removed. Call it before the first ``begin``."""
    stale = [path for path in _entries(directory) if _UNFINISHED.fullmatch(path.name)]
    for path in stale:
        with _explained(path, "removed"):
            shutil.rmtree(path)
    return stale


def latest(directory: Path) -> Path | None:
    """The snapshot with the highest step, whole or not; ``None`` if there is none."""
    return next(iter(_named(directory)), None)


def retain(directory: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest whole snapshots; the paths removed. The newest whole one always stays."""
    surplus = _whole(directory)[max(1, keep) :]
    for path in surplus:
        with _explained(path, "removed"):
            _remove(path)
    return surplus


def read_state(snapshot: Path) -> SnapshotState:
    """The state of a snapshot, every file of which is what was written.

    Raises :class:`~headrace.base.errors.CheckpointError`, which names the file, if it is not whole, has changed, or is
    of another format. An unsealed one of an older program is compared by the sizes of its files only.
    """
    problem = _defect(snapshot) or _change(snapshot)
    if problem:
        raise CheckpointError(f"snapshot {snapshot} cannot be used: {problem}", remedy=_way_out(snapshot))
    return _decode(snapshot)


def _way_out(damaged: Path) -> str:
    """What to do about a damaged snapshot: the older one is offered, and never taken without a word."""
    again = "copy it again from where it is whole"
    older = next((path for path in _older(damaged) if _usable(path)), None)
    if older is None:
        return f"{again}; there is no older whole snapshot beside it"
    aside = f"mv {damaged} {damaged}.damaged, and the same command again"
    return f"{again}, or go on from {older.name}, which is whole: {aside}"


def _older(snapshot: Path) -> list[Path]:
    named = _named(snapshot.parent)
    return named[named.index(snapshot) + 1 :] if snapshot in named else []


def _usable(snapshot: Path) -> bool:
    return not (_defect(snapshot) or _change(snapshot))


def _decode(snapshot: Path) -> SnapshotState:
    return msgspec.json.decode((snapshot / STATE_FILE).read_bytes(), type=SnapshotState)


def _change(snapshot: Path) -> str:
    """Which file is not what was written; empty if there is none."""
    state = _decode(snapshot)
    try:
        found = verify(snapshot, [STATE_FILE, *state.files])
    except DataError as error:
        return error.problem
    return f"{CHECKSUMS_FILE} is missing" if state.sealed and not found else ""


def _defect(snapshot: Path) -> str:
    """Why a snapshot is not whole, as far as that can be told without reading it all; empty if it is."""
    try:
        verify(snapshot, [STATE_FILE])  # before what it says is believed
        state = _decode(snapshot)
        sizes = {name: (snapshot / name).stat().st_size for name in state.files}
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
    """Everything with the name of a snapshot, newest first."""
    named = [(int(match[1]), path) for path in _entries(directory) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def _whole(directory: Path) -> list[Path]:
    """Whole snapshots, newest first."""
    return [path for path in _named(directory) if not _defect(path)]


@contextmanager
def _explained(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"snapshot {path} cannot be {action}: {error}",
            remedy=f"make {path.parent} writable and whole, then --resume",
        ) from None


def _remove(snapshot: Path) -> None:
    """Take the name away first: a snapshot half removed must not pass for one."""
    if snapshot.exists():
        doomed = snapshot.rename(snapshot.with_name(f"{snapshot.name}.tmp-removed-{os.getpid()}"))
        shutil.rmtree(doomed)


def _entries(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]


def _name(step: int) -> str:
    return f"step-{step:06d}"
