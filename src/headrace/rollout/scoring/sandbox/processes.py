"""Functions that count, limit and kill Linux processes, through /proc and control groups. Standard library only."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator

PIDS_V1, PIDS_V2 = "/sys/fs/cgroup/pids", "/sys/fs/cgroup"
GROUP = "headrace-"
"""The prefix of the names of control groups. The id of the process that created the group follows."""
RESERVED_PIDS = 300
"""The number of lowest process ids. A PID namespace does not use them again."""


def limit_process_ids(limit: int) -> None:
    """Limit the processes and threads of the current PID namespace, whose /proc must be mounted, to about ``limit``.
    Before Linux 6.14 the limit would apply to the whole machine, so nothing is done."""
    release = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2])
    if release >= (6, 14):
        with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w", encoding="ascii") as file:
            file.write(str(RESERVED_PIDS + limit))


def enter_control_group(name: str, limit: int) -> None:
    """Move this process, and with it all processes that it will start, into the new control group ``name`` of at most
    ``limit`` processes and threads. Nothing happens if no control group can be created."""
    for group in _groups(name):
        with contextlib.suppress(OSError):
            os.makedirs(group, exist_ok=True)
            _write(f"{group}/pids.max", str(limit))
            _write(f"{group}/cgroup.procs", "0")
            return


def remove_control_groups(name: str) -> None:
    """Remove the control group ``name``, whose processes have ended, and control groups that were left behind when the
    process that created them was killed."""
    for group in _groups(name):
        folder = os.path.dirname(group)
        names = [entry for entry in os.listdir(folder) if entry.startswith(GROUP)]
        abandoned = [entry for entry in names if not os.path.exists(f"/proc/{entry[len(GROUP) :]}")]
        for removed in [name, *abandoned]:
            with contextlib.suppress(OSError):  # the kernel keeps groups that still have processes
                os.rmdir(f"{folder}/{removed}")


def _groups(name: str) -> list[str]:
    """Return the paths at which a control group called ``name`` could be created. In version 1 of control groups, the
    path is below this process's own group. In version 2 it is next to it, because a group with processes cannot have
    subgroups."""
    below = _cgroup_path(PIDS_V1, ":pids:")
    beside = os.path.dirname(_cgroup_path(PIDS_V2, "0::"))
    return [f"{folder}/{name}" for folder in (below, beside) if os.path.exists(f"{folder}/cgroup.procs")]


def _cgroup_path(root: str, mark: str) -> str:
    """Return the folder of this process's control group. ``root`` is the mount point of the hierarchy, and ``mark``
    identifies its line in /proc/self/cgroup."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            path = next((line.partition(mark)[2].strip() for line in file if mark in line), "")
    except OSError:
        return root
    return root + path.rstrip("/")


def _write(path: str, text: str) -> None:
    """Write ``text`` to an existing file with a single system call."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def raise_priority() -> None:
    """Give this process a higher scheduling priority than the processes that it watches, if the system allows it. Child
    processes do not inherit the priority."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def succeeds(attempt: Callable[[], None]) -> bool:
    """Return whether ``attempt`` runs without an ``OSError``. It runs in a forked process, so that it changes nothing
    in this process."""
    pid = os.fork()
    if not pid:
        try:
            attempt()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def descendants(pid: int) -> Iterator[int]:
    """Yield the process ids of all current descendants of the process ``pid``."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # the process has just ended
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from descendants(child)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, including shared pages; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):  # the process has just ended
        return 0


def proportional_bytes(pid: int, default: int) -> int:
    """Return the memory of a process in bytes, in which each shared page is divided by the number of its users (PSS);
    ``default`` if it cannot be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith("Pss:")), default)
    except OSError:
        return default


def disk_bytes(directory: str) -> int:
    """Return the disk space that the files below a directory use, in bytes."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def kill_all(init_pid: int) -> None:
    """Kill the init process, whose process id is ``init_pid``, and wait for it; all processes of its PID namespace end
    with it. Without a namespace, its descendants become children of this process, and are killed until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(init_pid, signal.SIGKILL)
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
