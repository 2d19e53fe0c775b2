"""Which ledger a run keeps, and how to find it again."""

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
"""Locked by the process whose run it is, as long as that lives."""
SQLITE_FILE = "ledger.sqlite"
REDIS_FILE = "ledger.redis"
"""Says where the ledger is of a run that keeps it on a Redis server: a line each for the URL, the name, and the
environment variable of the password, where there is one. The name is a new run's own: no other in a directory of the
same path takes it for its own."""


def _sqlite(config: FlowConfig, run_dir: Path) -> Ledger:
    path = run_dir / SQLITE_FILE
    refuse_damaged_log(path)
    return SqliteLedger(
        path, group_size=config.group_size, groups_per_step=config.groups_per_step, checked=path.exists()
    )  # fmt: skip


def _memory(config: FlowConfig, run_dir: Path) -> Ledger:
    return SqliteLedger(IN_MEMORY, group_size=config.group_size, groups_per_step=config.groups_per_step)


def _redis(config: FlowConfig, run_dir: Path) -> Ledger:
    from headrace.flow.ledger.redis import RedisLedger

    file = run_dir / REDIS_FILE
    begun = file.exists()
    name = file.read_text(encoding="utf-8").splitlines()[1] if begun else f"{run_dir}:{secrets.token_hex(8)}"
    ledger = RedisLedger(
        config.ledger_url, name, group_size=config.group_size, groups_per_step=config.groups_per_step,
        password_env=config.ledger_password_env, begun=begun,
    )  # fmt: skip
    lines = (config.ledger_url, name, config.ledger_password_env)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ledger


LEDGERS: dict[str, Callable[[FlowConfig, Path], Ledger]] = {"sqlite": _sqlite, "memory": _memory, "redis": _redis}
"""The values of ``flow.ledger``."""


def has_ledger(run_dir: Path) -> bool:
    """Whether a run in ``run_dir`` has begun to keep one that outlives it."""
    return (run_dir / SQLITE_FILE).exists() or (run_dir / REDIS_FILE).exists()


def make_ledger(config: FlowConfig, run_dir: Path) -> Ledger:
    """The ledger of the run in ``run_dir``: the one it has, or a new one. :class:`~headrace.base.errors.LedgerError` if
    it
    is another kind of ledger than the one the run has begun, or cannot be used."""
    for kind, file in (("sqlite", SQLITE_FILE), ("redis", REDIS_FILE)):
        if (run_dir / file).exists() and kind != config.ledger:
            raise LedgerError(
                f"flow.ledger={config.ledger!r}, but the run in {run_dir} was begun with {kind!r}",
                remedy=f"set flow.ledger={kind!r} to resume it, or start a new run directory",
            )
    return LEDGERS[config.ledger](config, run_dir)


def open_ledger(run_dir: Path) -> Ledger:
    """The ledger that the run in ``run_dir`` has kept, for reading, every row of which is what was written.

    Raises :class:`~headrace.base.errors.LedgerError` where there is none, or it is damaged.
    """
    if (run_dir / REDIS_FILE).exists():
        from headrace.flow.ledger.redis import RedisLedger

        url, name, *variable = (run_dir / REDIS_FILE).read_text(encoding="utf-8").splitlines()
        return RedisLedger.open(url, name, *variable)
    path = run_dir / SQLITE_FILE
    if not _is_written(run_dir):
        refuse_damaged_log(path)  # to open it alone is to take what the log holds into the file
    return SqliteLedger.open(path, checked=True)


def _is_written(run_dir: Path) -> bool:
    """Whether a living run holds ``run_dir``."""
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
