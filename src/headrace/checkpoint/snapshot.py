"""One snapshot is one directory, and it appears at once.

    begin ──▶ step-000010.tmp-<pid>/ ──▶ commit ──▶ step-000010/
                │  the learner writes                 │  model.safetensors, config.json, tokenizer files, …:
                │  the heavy files                    │      an ordinary Hugging Face model directory
                ▼                                     │  optimizer.safetensors: moments, random state, step
             abandon, or sweep at the next start      │  state.json: everything the controller must remember,
                                                      ▼      and the size of every file

Files and directories are flushed before the rename, so a directory with the final name is whole, whenever the machine
stopped. One that lost a file since then (a copy broken off) is known by its sizes and passed over. Nothing here needs
torch.
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

from headrace.errors import CheckpointError
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
    format: int = FORMAT
    """Raised when an older reader could no longer make sense of it."""


def begin(directory: Path, step: int) -> Path:
    """A fresh directory in which to write the snapshot of ``step``; ``directory`` is made if it is missing."""
    unfinished = directory / f"{_name(step)}.tmp-{os.getpid()}"
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"snapshot directory {unfinished} cannot be made: {error}",
            remedy=f"make {directory} writable, or choose another run directory",
        ) from None
    return unfinished


def commit(unfinished: Path, state: SnapshotState) -> Path:
    """Add ``state`` to what was written, flush, and give the snapshot its name; the path it has from now on.

    A snapshot of the same step, left by an earlier life of the run, makes room. On failure ``unfinished`` is removed
    and :class:`~headrace.errors.CheckpointError` raised.
    """
    final = unfinished.with_name(_name(state.step))
    with whole_or_nothing(unfinished, SLACK_BYTES):
        sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in _files(unfinished)}
        state = msgspec.structs.replace(state, files=sizes)
        (unfinished / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2))
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
    """The whole snapshot with the highest step; ``None`` if there is none."""
    return next(iter(_whole(directory)), None)


def retain(directory: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest whole snapshots; the paths removed. The newest whole one always stays."""
    surplus = _whole(directory)[max(1, keep) :]
    for path in surplus:
        with _explained(path, "removed"):
            _remove(path)
    return surplus


def read_state(snapshot: Path) -> SnapshotState:
    """The state of a snapshot; :class:`~headrace.errors.CheckpointError` if it is not whole, or from another format."""
    problem = _defect(snapshot)
    if problem:
        raise CheckpointError(
            f"snapshot {snapshot} cannot be used: {problem}",
            remedy="resume from an older snapshot beside it, or copy this one again, whole",
        )
    return _decode(snapshot)


def _decode(snapshot: Path) -> SnapshotState:
    return msgspec.json.decode((snapshot / STATE_FILE).read_bytes(), type=SnapshotState)


def _defect(snapshot: Path) -> str:
    """Why a snapshot is not whole; empty if it is."""
    try:
        state = _decode(snapshot)
        sizes = {name: (snapshot / name).stat().st_size for name in state.files}
    except (OSError, msgspec.DecodeError) as error:
        return str(error)
    if state.format != FORMAT:
        return f"its format is {state.format}, this Headrace reads {FORMAT}"
    wrong = [name for name, size in sizes.items() if size != state.files[name]]
    return f"{wrong[0]} has {sizes[wrong[0]]} bytes, not {state.files[wrong[0]]}" if wrong else ""


def _whole(directory: Path) -> list[Path]:
    """Whole snapshots, newest first."""
    named = [(int(match[1]), path) for path in _entries(directory) if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True) if not _defect(path)]


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
