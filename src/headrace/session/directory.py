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

from headrace.clock import Clock
from headrace.config import merge
from headrace.control.recovery import starting_point
from headrace.control.rewarding import RewardFailures
from headrace.errors import ConfigError, DataError, RunError
from headrace.flow.ledger.opening import SQLITE_FILE, has_ledger
from headrace.launch.order import Component
from headrace.models import ModelConfig

CONFIG_FILE = "config.json"
FACTS_FILE = "parts.json"
LOCK_FILE = "lock"
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
    components: list[Component]
    waits: list[str]
    """The loops of the controller, a line each."""
    rewards: dict[str, RewardFailures] = {}
    """The components of the reward that have failed in this life, by name."""


def choose_directory(asked: str, clock: Clock, *, prefix: str = "") -> Path:
    """The directory of a new or resumed run; unless asked for, a new one under ``runs/``, named after the moment."""
    if asked:
        return Path(asked).expanduser().resolve()
    moment = datetime.datetime.fromtimestamp(clock.wall()).strftime("%Y%m%d-%H%M%S")
    return (Path("runs") / f"{prefix}{moment}").resolve()


@contextmanager
def locked(run_dir: Path, *, resume: bool) -> Iterator[None]:
    """Hold ``run_dir`` for this process alone.

    Raises :class:`~headrace.errors.ConfigError` if another process holds it, if it has a run already and ``resume`` is
    not asked for, or if there is none to resume.
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
        yield
    finally:
        os.close(descriptor)


def _refuse_lost_ledger(run_dir: Path) -> None:
    """Raise :class:`~headrace.errors.ConfigError` where a run has checkpoints and its ledger is gone: neither can it go
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
        tree: dict[str, Any] = json.loads((where / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{where} holds no run", remedy="name a run file, or the directory of a run") from None
    except ValueError as error:
        raise _damaged(where / CONFIG_FILE, error) from None
    snapshot = starting_point(where).snapshot
    if snapshot is None:
        return tree
    trained = ModelConfig.model_validate(tree["model"]).at(str(snapshot))
    return merge(tree, {"model": trained.model_dump(mode="json")})
