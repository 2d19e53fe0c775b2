"""The directory of a run: its lock, and the functions that write and read its settings, status and summary files."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import Clock
from headrace.base.config import leaves, merge
from headrace.base.errors import ConfigError, DataError, RunError
from headrace.control.metrics.rewards import RewardFailures
from headrace.control.recovery import find_starting_point
from headrace.control.saving import CHECKPOINTS
from headrace.flow.ledger.opening import LOCK_FILE, SQLITE_FILE, has_ledger
from headrace.launch.order import ComponentStatus
from headrace.learner.checkpoint import newest_weights
from headrace.learner.disk import CHECKSUMS_FILE, checksum, listed_checksums, verify, write_checksums
from headrace.models import ModelConfig

CONFIG_FILE = "config.json"
"""The file with the resolved settings of the run, with a checksum."""
FACTS_FILE = "parts.json"
"""The file with the facts that each part reported when it started, with a checksum."""
STATUS_FILE = "status.json"
"""The file with the present state of a run that is still running."""
SUMMARY_FILE = "summary.json"
"""The file with the figures of the run, written at the end of each life (start or resumption) of the run."""
LOCK_S = 0.2
"""The maximum time, in seconds, for which a process tries to acquire the lock of a run directory."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``status.json``: the present state of a run, written every second while it runs."""

    phase: str
    """The phase of the run in words, such as ``starting`` or ``training``."""
    steps_done: int
    """The number of optimizer steps so far, of all lives of the run."""
    steps_total: int
    """The number of optimizer steps that the whole run will have."""
    version: int
    """The version of the weights that the engine has committed; −1 before the first commit."""
    written_s: float
    """The time of writing, in seconds since 1970."""
    components: list[ComponentStatus]
    """The state of each process of the run; the controller comes first."""
    waits: list[str]
    """One line for each loop of the controller: its state, and what it waits for."""
    warnings: list[str] = []
    """The warnings of the run so far, one for each kind of warning."""
    rewards: dict[str, RewardFailures] = {}
    """The failure counts of the reward components that have failed since the run was started or resumed, by name."""
    requests: str = ""
    """The Unix socket at which the run receives requests of its user (``headrace engines``); empty: it receives
    none."""
    engines: int | None = None
    """The number of engines of the policy, without those that are being added; ``None`` for a run without engines, and
    in files of older versions of Headrace."""


def choose_directory(requested: str, clock: Clock, *, prefix: str = "") -> Path:
    """Return the directory of a run as an absolute path: ``requested``, the value of ``run.dir``, or if that is empty a
    new directory under ``runs/``, whose name is ``prefix`` and the present time by ``clock``. The directory is not
    created yet."""
    if requested:
        return Path(requested).expanduser().resolve()
    moment = datetime.datetime.fromtimestamp(clock.wall()).strftime("%Y%m%d-%H%M%S")
    return (Path("runs") / f"{prefix}{moment}").resolve()


class LockedDirectory:
    """A run directory that this process has locked, and that other programs may still remove or move.

    After such a loss, files that are open, SQLite's too, can still be written, but their content is lost when they are
    closed; and a second run may have started under the same path. Therefore call :meth:`refuse_lost` before writing to
    a path in the directory.
    """

    def __init__(self, run_dir: Path, descriptor: int) -> None:
        """Create the record of the locked ``run_dir``. ``descriptor`` is the open lock file in it, whose identity shows
        whether another directory has replaced it."""
        self.path = run_dir
        """The directory of the run."""
        self._descriptor = descriptor
        self._ledger_identity: tuple[int, int] | None = None
        """The device and inode of the ledger file when it was first found; ``None`` before that.

        The write-ahead log is not checked: SQLite removes it whenever the last connection is closed, for example at the
        end of each life of a run, and creates it again.
        """

    def refuse_lost(self) -> None:
        """Raise :class:`~headrace.base.errors.RunError` if the directory, or the ledger in it, was removed, moved or
        replaced.

        A directory whose state cannot be read, for example on a network file system that stalls, does not count as
        lost.
        """
        lock_stat = os.fstat(self._descriptor)
        if _identify(self.path / LOCK_FILE) not in ((lock_stat.st_dev, lock_stat.st_ino), None):
            raise self._make_loss_error()
        path = self.path / SQLITE_FILE
        identity = _identify(path)
        if self._ledger_identity is not None and identity not in (self._ledger_identity, None):
            raise RunError(
                f"{path} was removed or replaced while the run was writing it: what it recorded is lost",
                remedy="restore it from a copy and continue with --resume, or start a new run directory",
            )
        if identity not in (None, _MISSING_FILE):
            self._ledger_identity = identity

    def _make_loss_error(self) -> RunError:
        """Return the error to raise for the run directory after its loss during the run. Problem and remedy depend on
        whether the directory was removed or moved."""
        present_path = self._find_present_path()
        if present_path is None:
            return RunError(
                f"run.dir={str(self.path)!r} was removed while the run was writing it: what it recorded is lost",
                remedy="start the run again; remove the directory of a run when it has ended (headrace status RUN)",
            )
        return RunError(
            f"run.dir={str(self.path)!r} was moved to {str(present_path)!r} while the run was writing it",
            remedy=f"continue with --resume --set run.dir={present_path}; move the directory of a run when it has "
            "ended",
        )

    def _find_present_path(self) -> Path | None:
        """Return the present path of a directory that was moved; ``None`` if it was removed, or if the operating system
        cannot report the path (other systems than Linux)."""
        try:
            lock_stat = os.fstat(self._descriptor)
            lock_path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            return None
        return lock_path.parent if _identify(lock_path) == (lock_stat.st_dev, lock_stat.st_ino) else None


_MISSING_FILE = (-1, -1)
"""The identity of a file that does not exist, as :func:`_identify` returns it."""


def _identify(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the file ``path``, which together identify the file; :data:`_MISSING_FILE` if it
    does not exist, ``None`` if its state cannot be read."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _MISSING_FILE
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


@contextmanager
def lock_directory(run_dir: Path, *, resume: bool) -> Iterator[LockedDirectory]:
    """Lock the run directory ``run_dir`` for this process alone while the context is open, and yield the locked
    directory. A missing directory is created. ``resume`` is true if the run in the directory will be continued.

    Raises :class:`~headrace.base.errors.ConfigError` if another process holds the lock, if the directory has a run
    already and ``resume`` is false, or if it has no run and ``resume`` is true. Raises
    :class:`~headrace.learner.disk.Damaged` if the recorded settings of a run to resume were changed.
    """
    _refuse_lost_ledger(run_dir)
    if resume and not has_ledger(run_dir):
        raise ConfigError(
            f"run.dir={str(run_dir)!r} holds no run to resume",
            remedy="leave --resume out, or name the directory of the run: --set run.dir=DIRECTORY",
        )
    if resume and (run_dir / CONFIG_FILE).is_file():
        verify(run_dir, [CONFIG_FILE])
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"run.dir={str(run_dir)!r} cannot be used: {error}", remedy="choose a directory that can be written"
        ) from None
    try:
        if not _try_lock(descriptor):
            raise ConfigError(
                f"run.dir={str(run_dir)!r} is in use by another process",
                remedy=f"wait for it (headrace status {run_dir}), or choose another run.dir",
            )
        if has_ledger(run_dir) and not resume:
            raise ConfigError(
                f"run.dir={str(run_dir)!r} holds a run already",
                remedy="add --resume to continue, or choose another run.dir",
            )
        with suppress(OSError):  # a full disk is reported later, by the first write that the run depends on
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield LockedDirectory(run_dir, descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock the open file ``descriptor`` for this process alone, and return whether that succeeded within
    :data:`LOCK_S`. Several attempts are needed, since a process that checks whether a run holds the lock
    (:func:`~headrace.flow.ledger.opening.is_locked`) itself has a shared lock for a moment."""
    for wait_s in (*[LOCK_S / 10] * 10, 0.0):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            threading.Event().wait(wait_s)
        else:
            return True
    return False


def _refuse_lost_ledger(run_dir: Path) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``run_dir`` has checkpoints of a run but no ledger: this run
    cannot be resumed, and no other run may start in its directory."""
    if has_ledger(run_dir) or (newest := find_starting_point(run_dir)).snapshot is None:
        return
    raise ConfigError(
        f"run.dir={str(run_dir)!r} holds checkpoints of a run, the newest of step {newest.step}, and no ledger "
        f"({SQLITE_FILE} is missing, or it was kept in memory): without it nobody knows which groups they have learned",
        remedy=f"put the ledger back; or choose another run.dir, and begin from those weights with model.path = "
        f"{str(newest.snapshot)!r}",
    )


def refuse_no_ledger(run_dir: Path) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a command that needs the ledger of a run, if ``run_dir`` has
    no ledger. The message depends on whether the directory is missing, has a run without a ledger, or has runs in its
    subdirectories."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no directory {run_dir}", remedy="give the directory of a run (run.dir)")
    _refuse_lost_ledger(run_dir)
    if not (run_dir / CONFIG_FILE).is_file():
        inside = sorted(path.parent.name for path in run_dir.glob(f"*/{SQLITE_FILE}"))
        remedy = f"give one of its runs: {', '.join(map(str, inside[:8]))}" if inside else "give the directory of a run"
        raise ConfigError(f"{run_dir} holds no run: neither {CONFIG_FILE} nor {SQLITE_FILE} is in it", remedy=remedy)
    raise ConfigError(
        f"the run in {run_dir} has no ledger: {SQLITE_FILE} is missing, or it was kept in memory (flow.ledger)",
        remedy=f"put {SQLITE_FILE} back from a copy; headrace report {run_dir} shows what the other files hold",
    )


def write_json(path: Path, tree: Any) -> None:
    """Write ``tree``, nested dictionaries or a record, to the file ``path`` as JSON. The file is replaced atomically:
    another process reads the whole old or the whole new content. Raises :class:`~headrace.base.errors.RunError` if the
    file cannot be written."""
    data = msgspec.json.format(msgspec.json.encode(tree), indent=2)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}", remedy="check that its disk has room (df -h)") from None


def write_sealed(path: Path, tree: Any) -> None:
    """Write ``tree`` as :func:`write_json` does, and record the checksum of the file, which :func:`read_sealed`
    verifies.

    The old checksums are removed first: a kill between the two writes leaves a directory without checksums, not with
    wrong checksums.
    """
    listed = listed_checksums(path.parent)
    (path.parent / CHECKSUMS_FILE).unlink(missing_ok=True)
    write_json(path, tree)
    write_checksums(path.parent, {**listed, path.name: checksum(path)})


def find_changed_settings(run_dir: Path, tree: Mapping[str, Any]) -> list[str]:
    """Return the settings in ``tree`` that affect what is learned and differ from the recorded settings of the run in
    ``run_dir``, each as text with both values; an empty list for a new run. Settings that the program which recorded
    them did not have are skipped."""
    if not (run_dir / CONFIG_FILE).is_file():
        return []
    before, now = leaves(read_sealed(run_dir / CONFIG_FILE)), leaves(tree)
    relevant = (name for name in now if not name.startswith(("run.", "launch.", "observe.")) or name == "run.seed")
    return [
        f"{name} = {now[name]!r} (before: {before[name]!r})"
        for name in relevant
        if name in before and before[name] != now[name]
    ]


def find_final_num_engines(run_dir: Path) -> int | None:
    """Return the number of engines that the run in ``run_dir`` had when it ended, if that is not the recorded
    ``engine.count`` with which it began; ``None`` otherwise, and for a run that never began."""
    last = read_status(run_dir)
    if last is None or not (run_dir / CONFIG_FILE).is_file():
        return None
    num_final = last.engines
    if num_final is None:
        num_final = sum(part.role.partition("-")[0] == "engine" for part in last.components)
    num_initial = leaves(read_sealed(run_dir / CONFIG_FILE)).get("engine.count", num_final)
    return None if num_final in (0, num_initial) else num_final


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content of the JSON file ``path`` that :func:`write_sealed` wrote, after its checksum is verified. A
    file in a directory without checksums, from an older version of Headrace, is not verified.

    Raises :class:`~headrace.base.errors.DataError` if the file was changed afterwards, and ``OSError`` if it cannot be
    read.
    """
    if path.is_file():
        verify(path.parent, [path.name])
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}", remedy="restore it from a copy") from None
    return tree


REMOVED_SETTINGS = {"launch": ("join_password_env",)}
"""The settings that no longer exist, by section; the recorded settings of older runs contain them."""


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Return the recorded settings of the run in ``run_dir``, without the settings that no longer exist.

    Raises :class:`~headrace.base.errors.ConfigError` if the directory has no run, and
    :class:`~headrace.base.errors.DataError` if the file is damaged.
    """
    try:
        tree = read_sealed(run_dir / CONFIG_FILE)
    except OSError as error:
        raise ConfigError(f"{run_dir} has no settings: {error}", remedy="give the directory of a run") from None
    for section, keys in REMOVED_SETTINGS.items():
        for key in keys:
            tree.get(section, {}).pop(key, None)
    return tree


def read_status(run_dir: Path) -> Status | None:
    """Return the last status of the run in ``run_dir``; ``None`` if it has not written a status. Raises
    :class:`~headrace.base.errors.DataError` if the file is damaged."""
    try:
        return msgspec.json.decode((run_dir / STATUS_FILE).read_bytes(), type=Status)
    except OSError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damage_error(run_dir / STATUS_FILE, error) from None


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Return the summary of the last life of the run in ``run_dir``; ``None`` if this life has not written its summary.
    Raises :class:`~headrace.base.errors.DataError` if the file is damaged."""
    try:
        tree: dict[str, Any] = json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        raise _damage_error(run_dir / SUMMARY_FILE, error) from None
    return tree


def _damage_error(path: Path, error: Exception) -> DataError:
    """Return the error to raise for the status or summary file ``path``, which could not be decoded."""
    return DataError(f"{path} is damaged: {error}", remedy="remove that file; the run itself does not read it")


def find_run_file(path: Path) -> dict[str, Any] | Path:
    """Return the run file to evaluate, for :func:`~headrace.run.session.config.load_config`. If ``path`` is a file,
    this is ``path`` itself; if it is a run directory, the settings of the run, with its newest checkpoint (if any) as
    the model. Raises :class:`~headrace.base.errors.ConfigError` if it is neither."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist", remedy="name a run file, or the directory of a run")
    if not path.is_dir():
        return path
    try:
        tree = read_sealed(path / CONFIG_FILE)
    except OSError:
        raise ConfigError(f"{path} holds no run", remedy="name a run file, or the directory of a run") from None
    snapshot = newest_weights(path / CHECKPOINTS)
    if snapshot is None:
        return tree
    trained = ModelConfig.model_validate(tree["model"]).with_snapshot(str(snapshot))
    return merge(tree, {"model": trained.model_dump(mode="json")})
