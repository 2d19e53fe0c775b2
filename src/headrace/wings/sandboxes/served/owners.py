"""The owners of what drivers make elsewhere: processes, by a name that tells whether they have died.

What a killed process has left, such as the images of snapshots, carries its name as a label; the next driver on the
machine removes what belongs to processes that have died.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil

LABEL = "headrace.owner"
"""The label that carries the name of an owner."""


def owner_name() -> str:
    """Return the name of this process: machine, boot, namespace of processes, process id, and the time of its start."""
    machine = _word("/etc/machine-id") or platform.node()
    pid, boot = os.getpid(), _word("/proc/sys/kernel/random/boot_id")
    return f"{_short(machine)}-{_short(boot)}-{_space()}-{pid}-{_began(pid)}"


def is_dead(name: str) -> bool:
    """Return whether the name of a container or an image belongs to a process of this machine that has died. What
    belongs to another machine, or to processes that cannot be seen from here, is taken to be alive."""
    parts, own = name.split("-"), owner_name().split("-")
    if len(parts) < len(own) or parts[0] != own[0]:
        return False
    if parts[1] != own[1]:
        return True  # the machine has started again since
    if parts[2] != own[2]:
        return False
    try:
        return _began(int(parts[3])) != int(parts[4])
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return True
    except ValueError:
        return False


def _began(pid: int) -> int:
    """Return when a process began: on Linux in ticks since the machine was started, which no setting of its clock
    changes; elsewhere in seconds of the clock. Raises ``FileNotFoundError``, ``ProcessLookupError`` or
    ``psutil.NoSuchProcess`` if there is no such process."""
    if platform.system() != "Linux":
        return int(psutil.Process(pid).create_time())
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])  # field 22, of which the name of the program is the second


def _short(text: str) -> str:
    """Return the first letters of an identifier, without what names cannot have."""
    return "".join(filter(str.isalnum, text)).lower()[:12] or "0"


def _word(path: str) -> str:
    """Return the text of a file; empty if there is none."""
    with suppress(OSError):
        return Path(path).read_text(encoding="ascii").strip()
    return ""


def _space() -> str:
    """Return the number of this process's namespace of processes."""
    with suppress(OSError):
        return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
    return "0"
