"""Functions that create or open the ledger of a run. The ledger is the durable record of a run; it is stored in the run
directory, in memory or on a Redis server."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from headrace.base.errors import LedgerError
from headrace.flow.config import FlowConfig
from headrace.flow.ledger.base import Ledger
from headrace.flow.ledger.log import refuse_damaged_log
from headrace.flow.ledger.sqlite import IN_MEMORY, SqliteLedger

LOCK_FILE = "lock"
"""Name of the lock file of a run directory. The controller keeps the file locked as long as its process lives."""
SQLITE_FILE = "ledger.sqlite"
"""Name of the file of a SQLite ledger in a run directory."""
REDIS_FILE = "ledger.redis"
"""Name of the file in a run directory that locates a ledger on a Redis server. Its lines are the URL, the name of the
ledger and the environment variable of the password, which may be empty. The name has a random part, so that another
directory with the same path does not use the same ledger."""


def _sqlite(config: FlowConfig, run_dir: Path) -> Ledger:
    """Open the SQLite ledger of the run in ``run_dir``, or create it, and return it. Raises
    :class:`~headrace.base.errors.LedgerError` if the ledger or its write-ahead log is damaged."""
    path = run_dir / SQLITE_FILE
    refuse_damaged_log(path)
    return SqliteLedger(
        path, group_size=config.group_size, groups_per_step=config.groups_per_step, checked=path.exists()
    )  # fmt: skip


def _memory(config: FlowConfig, run_dir: Path) -> Ledger:
    """Return a new ledger in memory, which is lost when the process ends; ``run_dir`` is not used."""
    return SqliteLedger(IN_MEMORY, group_size=config.group_size, groups_per_step=config.groups_per_step)


def _redis(config: FlowConfig, run_dir: Path) -> Ledger:
    """Return the ledger on the Redis server that ``config`` names. The file :data:`REDIS_FILE` in ``run_dir`` contains
    its name; for a new run, choose a name and write the file."""
    from headrace.flow.ledger.redis import RedisLedger

    file = run_dir / REDIS_FILE
    exists = file.exists()
    name = file.read_text(encoding="utf-8").splitlines()[1] if exists else f"{run_dir}:{secrets.token_hex(8)}"
    ledger = RedisLedger(
        config.ledger_url, name, group_size=config.group_size, groups_per_step=config.groups_per_step,
        password_env=config.ledger_password_env, exists=exists,
    )  # fmt: skip
    lines = (config.ledger_url, name, config.ledger_password_env)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ledger


LEDGERS: dict[str, Callable[[FlowConfig, Path], Ledger]] = {"sqlite": _sqlite, "memory": _memory, "redis": _redis}
"""The functions that open or create the ledger of a run, by the value of ``flow.ledger``."""


def has_ledger(run_dir: Path) -> bool:
    """Return whether the run in ``run_dir`` has a ledger that outlives its process: a SQLite file, or a ledger on a
    Redis server."""
    return (run_dir / SQLITE_FILE).exists() or (run_dir / REDIS_FILE).exists()


def ledger_bytes(run_dir: Path) -> int:
    """Return the size of the ledger's files in ``run_dir``, in bytes; 0 for a ledger on a Redis server."""
    return sum(file.stat().st_size for file in run_dir.glob(f"{SQLITE_FILE}*"))


def make_ledger(config: FlowConfig, run_dir: Path) -> Ledger:
    """Open the ledger of the run in ``run_dir`` for writing, or create it as ``config`` says, and return it. Raises
    :class:`~headrace.base.errors.LedgerError` if the run was started with another kind of ledger, or if the ledger
    cannot be used."""
    for kind, file in (("sqlite", SQLITE_FILE), ("redis", REDIS_FILE)):
        if (run_dir / file).exists() and kind != config.ledger:
            raise LedgerError(
                f"flow.ledger={config.ledger!r}, but the run in {run_dir} was begun with {kind!r}",
                remedy=f"set flow.ledger={kind!r} to resume it, or start a new run directory",
            )
    return LEDGERS[config.ledger](config, run_dir)


def open_ledger(run_dir: Path) -> Ledger:
    """Open the existing ledger of the run in ``run_dir`` for reading, check every row against its checksum, and return
    the ledger.

    Raises :class:`~headrace.base.errors.LedgerError` if the run has no ledger, if the ledger is damaged, or if a run of
    an older version of Headrace is in progress.
    """
    if (run_dir / REDIS_FILE).exists():
        from headrace.flow.ledger.redis import RedisLedger

        url, name, *variable = (run_dir / REDIS_FILE).read_text(encoding="utf-8").splitlines()
        return RedisLedger.open(url, name, *variable)
    path = run_dir / SQLITE_FILE
    in_use = is_locked(run_dir)
    if not in_use:
        refuse_damaged_log(path)  # opening the file alone copies the log into it
    return SqliteLedger.open(path, checked=True, in_use=in_use)


def is_locked(run_dir: Path) -> bool:
    """Return whether a run is in progress in ``run_dir``: a process of this machine holds the lock of the directory.
    The controller holds it as long as its process exists, even while the process is suspended."""
    try:
        descriptor = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
