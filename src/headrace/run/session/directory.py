"""A run's directory: its lock, and the files that say what it is and how it ended."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import Clock
from headrace.base.config import merge
from headrace.base.errors import ConfigError, DataError, RunError
from headrace.control.recovery import starting_point
from headrace.control.rewarding import RewardFailures
from headrace.flow.ledger.opening import LOCK_FILE, SQLITE_FILE, has_ledger
from headrace.launch.order import ComponentStatus
from headrace.learner.checksums import CHECKSUMS_FILE, checksum, listed_checksums, verify, write_checksums
from headrace.models import ModelConfig

CONFIG_FILE = "config.json"
FACTS_FILE = "parts.json"
STATUS_FILE = "status.json"
SUMMARY_FILE = "summary.json"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``status.json``: what a run is doing, written every second while it lives."""

    phase: str
    steps_done: int
    """Optimizer steps of the whole run so far."""
    steps_total: int
    """Optimizer steps that the run will have."""
    version: int
    """The committed one; −1 before the first."""
    written_s: float
    """Seconds since 1970."""
    components: list[ComponentStatus]
    waits: list[str]
    """The loops of the controller, a line each."""
    warnings: list[str] = []
    """What the run has warned of so far, one of each kind."""
    rewards: dict[str, RewardFailures] = {}
    """The components of the reward that have failed in this life, by name."""


def choose_directory(asked: str, clock: Clock, *, prefix: str = "") -> Path:
    """The directory of a new or resumed run; unless asked for, a new one under ``runs/``, named after the moment."""
    if asked:
        return Path(asked).expanduser().resolve()
    moment = datetime.datetime.fromtimestamp(clock.wall()).strftime("%Y%m%d-%H%M%S")
    return (Path("runs") / f"{prefix}{moment}").resolve()


class HeldDirectory:
    """A run directory that this process holds, and which others may remove or move all the same.

    What is open stays writable then, SQLite's file too, and all of it is gone in the end; and a second run may have
    begun under the same path. So whoever writes by a path calls :meth:`refuse_lost` first.
    """

    def __init__(self, run_dir: Path, descriptor: int) -> None:
        self._run_dir = run_dir
        self._descriptor = descriptor
        self._ledger: tuple[int, int] | None = None
        """Which file the ledger was when it was first seen.

        Its write-ahead log is no sign of a loss: SQLite removes it whenever the last connection is closed, as at the
        end of each life of a run, and makes it anew.
        """

    def refuse_lost(self) -> None:
        """Raise :class:`~headrace.base.errors.RunError` where the directory or the ledger in it is not this run's any
        more.

        A directory that cannot be asked just now (a network that stalls) is not lost.
        """
        mine = os.fstat(self._descriptor)
        if _identity(self._run_dir / LOCK_FILE) not in ((mine.st_dev, mine.st_ino), None):
            raise self._lost()
        path = self._run_dir / SQLITE_FILE
        found = _identity(path)
        if self._ledger is not None and found not in (self._ledger, None):
            raise RunError(
                f"{path} was removed or replaced while the run was writing it: what it recorded is lost",
                remedy="restore it from a copy and go on with --resume, or start a new run directory",
            )
        if found not in (None, _GONE):
            self._ledger = found

    def _lost(self) -> RunError:
        now = self._new_place()
        if now is None:
            return RunError(
                f"run.dir={str(self._run_dir)!r} was removed while the run was writing it: what it recorded is lost",
                remedy="start the run again; remove the directory of a run when it has ended (headrace status RUN)",
            )
        return RunError(
            f"run.dir={str(self._run_dir)!r} was moved to {str(now)!r} while the run was writing it",
            remedy=f"go on with --resume --set run.dir={now}; move the directory of a run when it has ended",
        )

    def _new_place(self) -> Path | None:
        """Where the directory is now; ``None`` where it is gone, or the system does not tell."""
        try:
            mine = os.fstat(self._descriptor)
            now = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            return None
        return now.parent if _identity(now) == (mine.st_dev, mine.st_ino) else None


_GONE = (-1, -1)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file ``path`` is; :data:`_GONE` where there is none, ``None`` where that cannot be told."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _GONE
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def locked(run_dir: Path, *, resume: bool) -> Iterator[HeldDirectory]:
    """Hold ``run_dir`` for this process alone.

    Raises :class:`~headrace.base.errors.ConfigError` if another process holds it, if it has a run already and
    ``resume`` is not asked for, or if there is none to resume.
    """
    _refuse_lost_ledger(run_dir)
    if resume and not has_ledger(run_dir):
        raise ConfigError(
            f"run.dir={str(run_dir)!r} holds no run to resume", remedy="leave --resume out, or correct run.dir"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"run.dir={str(run_dir)!r} cannot be used: {error}", remedy="choose a directory that can be written"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"run.dir={str(run_dir)!r} is in use by another process",
                remedy=f"wait for it (headrace status {run_dir}), or choose another run.dir",
            ) from None
        if has_ledger(run_dir) and not resume:
            raise ConfigError(
                f"run.dir={str(run_dir)!r} holds a run already",
                remedy="add --resume to go on, or choose another run.dir",
            )
        yield HeldDirectory(run_dir, descriptor)
    finally:
        os.close(descriptor)


def _refuse_lost_ledger(run_dir: Path) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` where a run has checkpoints and its ledger is gone: neither can
    it go
    on, nor can another begin there."""
    if has_ledger(run_dir) or (newest := starting_point(run_dir)).snapshot is None:
        return
    raise ConfigError(
        f"run.dir={str(run_dir)!r} holds checkpoints of a run, the newest of step {newest.step}, and no ledger "
        f"({SQLITE_FILE} is missing, or it was kept in memory): without it nobody knows which groups they have learned",
        remedy=f"put the ledger back; or choose another run.dir, and begin from those weights with model.path = "
        f"{str(newest.snapshot)!r}",
    )


def write_json(path: Path, tree: Any) -> None:
    """Write ``tree`` (or a record) so that a reader sees the old file or the new one."""
    data = msgspec.json.format(msgspec.json.encode(tree), indent=2)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}", remedy="check that its disk has room (df -h)") from None


def write_sealed(path: Path, tree: Any) -> None:
    """Write ``tree`` as :func:`write_json` does, with a checksum for :func:`read_sealed`.

    A kill between the two leaves a directory without checksums rather than one whose checksums are wrong.
    """
    listed = listed_checksums(path.parent)
    (path.parent / CHECKSUMS_FILE).unlink(missing_ok=True)
    write_json(path, tree)
    write_checksums(path.parent, {**listed, path.name: checksum(path)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what :func:`write_sealed` wrote; an older program wrote no checksums, and is believed.

    Raises :class:`~headrace.base.errors.DataError` where the file has changed since, ``OSError`` where it cannot be
    read.
    """
    if path.is_file():
        verify(path.parent, [path.name])
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", remedy="restore it from a copy") from None
    return tree


def read_status(run_dir: Path) -> Status | None:
    """The last status; ``None`` if the run has not written one."""
    try:
        return msgspec.json.decode((run_dir / STATUS_FILE).read_bytes(), type=Status)
    except OSError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(run_dir / STATUS_FILE, error) from None


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """The summary of the run's last life; ``None`` if it has not ended."""
    try:
        tree: dict[str, Any] = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        raise _damaged(run_dir / SUMMARY_FILE, error) from None
    return tree


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: {error}", remedy="remove that file; the run itself does not read it")


def run_file_of(where: Path) -> dict[str, Any] | Path:
    """What to evaluate: a run file as it is, or a run directory's settings with its newest checkpoint as the model."""
    if not where.is_dir():
        return where
    try:
        tree = read_sealed(where / CONFIG_FILE)
    except OSError:
        raise ConfigError(f"{where} holds no run", remedy="name a run file, or the directory of a run") from None
    snapshot = starting_point(where).snapshot
    if snapshot is None:
        return tree
    trained = ModelConfig.model_validate(tree["model"]).at(str(snapshot))
    return merge(tree, {"model": trained.model_dump(mode="json")})
