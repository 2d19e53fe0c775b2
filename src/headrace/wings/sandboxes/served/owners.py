"""The owners of containers, machines and snapshots. An owner is the process that created them.

Each of them is labelled with its owner's name. From the name another process on the same machine can find out whether
the owner has died. A new driver then deletes what dead owners have left, such as images of snapshots.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil

LABEL = "headrace.owner"
"""The key of the label with the owner's name."""


def make_owner_name() -> str:
    """Return the name of this process: machine, boot, process namespace, process id, and start time."""
    machine = _read_text("/etc/machine-id") or platform.node()
    pid, boot = os.getpid(), _read_text("/proc/sys/kernel/random/boot_id")
    return f"{_shorten(machine)}-{_shorten(boot)}-{_pid_namespace()}-{pid}-{_start_time(pid)}"


def is_dead(name: str) -> bool:
    """Return whether ``name`` is the name of a process of this machine that has died. Processes of another machine, and
    processes that are not visible from here, are assumed to be alive."""
    parts, own = name.split("-"), make_owner_name().split("-")
    if len(parts) < len(own) or parts[0] != own[0]:
        return False
    if parts[1] != own[1]:
        return True  # the machine has rebooted since
    if parts[2] != own[2]:
        return False
    try:
        return _start_time(int(parts[3])) != int(parts[4])
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return True
    except ValueError:
        return False


def _start_time(pid: int) -> int:
    """Return the start time of a process: on Linux in ticks since boot, which no clock setting changes; elsewhere in
    seconds of the clock. Raises ``FileNotFoundError``, ``ProcessLookupError`` or ``psutil.NoSuchProcess`` if there is
    no such process."""
    if platform.system() != "Linux":
        return int(psutil.Process(pid).create_time())
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])  # field 22; field 2 is the program's name in parentheses


def _shorten(text: str) -> str:
    """Return the first twelve letters and digits of an identifier."""
    return "".join(filter(str.isalnum, text)).lower()[:12] or "0"


def _read_text(path: str) -> str:
    """Return the stripped text of a file; empty if it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text(encoding="ascii").strip()
    return ""


def _pid_namespace() -> str:
    """Return the number of this process's process namespace; 0 if it is unknown."""
    with suppress(OSError):
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    return "0"
