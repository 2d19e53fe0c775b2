"""A launcher that starts one command, watches it, and ends it with all processes that it has started.

It is a program of its own, standard library only: ``python -I -S -B launcher.py [ORDER]``.

    the caller ── launcher ── init of a PID namespace ── the command ── its child processes
     holds the    watches     reaps orphans; when it ends, the kernel ends all below it
     lifeline

*Jailed* (no ORDER: it comes on standard input, its length first): the command has no network, another user, limits, and
a file system of its own. Standard input stays open as the lifeline: when its other end is closed, everything ends. The
result of the command is written to ``report`` as one line of JSON.

*Kept* (ORDER is given): the command runs as it would by itself, but its processes and memory are watched, its log is
bounded, and none of its processes outlives it. The launcher ends as the command did.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.rollout.scoring.sandbox import jail, kernel, processes
else:  # its own folder, and nothing else of headrace: it starts in milliseconds
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import jail
    import kernel
    import processes

POLL_MS = {True: 20, False: 50}
"""The interval at which a command is checked, for a jailed and for a kept one."""
FIRST_USER, USERS = 40_000, 20_000
"""Users of jailed commands: ids that no person has, one per launcher as far as they go."""
PIPE_BYTES = 1 << 16
THREADS_EACH = 8
"""The average number of threads of a kept command's processes: the kernel's own limits count threads."""
Order = dict[str, Any]


def write_record(descriptor: int, record: Order) -> None:
    """Write a record as one line of JSON to a file descriptor, such as the pipe to the launcher or the caller's
    report."""
    os.write(descriptor, json.dumps(record).encode() + b"\n")


class CommandSupervisor:
    """A supervisor of one command, from its start to the end of the last process that it started. The launcher makes
    one from its order, and calls :meth:`prepare`, :meth:`start` and :meth:`watch`, one after the other."""

    def __init__(self, order: Order) -> None:
        """Prepare to run the command of ``order``, the description of a run as plain JSON; the pipe is for records of
        its processes."""
        self.order = order
        self.jailed = bool(order["jailed"])
        self.report: Order = {"reason": "", "missing": {}}
        """What became of the command: the limit that ended it, if one did, its status, and the missing guards."""
        self.has_pids = False
        """Whether the command has a PID namespace of its own."""
        self._unread = b""
        self._group = f"{processes.GROUP}{os.getpid()}"
        self._read, self._write = os.pipe()

    def prepare(self) -> None:
        """Create the namespaces that the command will run in; those that the kernel refuses are recorded as missing
        guards."""
        missing: dict[str, str] = self.report["missing"]
        if self.jailed or processes.succeeds(_check_own_proc):
            if os.getuid() != 0:
                missing["user"] = "only root can start a process as another user"
                jail.guard(missing, "namespaces", _enter_user_namespace)
            if self.jailed:
                jail.guard(missing, "network", lambda: kernel.unshare(kernel.NEW_NET))
                jail.guard(missing, "ipc", lambda: kernel.unshare(kernel.NEW_IPC))
            jail.guard(missing, "processes", lambda: kernel.unshare(kernel.NEW_PIDS))
            self.has_pids = "processes" not in missing
        else:
            missing["processes"] = "a namespace with its own /proc is refused"
        with contextlib.suppress(OSError):
            kernel.adopt_orphans()
        self.order["missing"] = missing

    def start(self) -> int:
        """Fork the init process, which starts the command, and return its process id; the child never returns."""
        user = FIRST_USER + os.getpid() % USERS if self.jailed and os.getuid() == 0 else os.getuid()
        init_pid = os.fork()
        if init_pid:
            os.close(self._write)
            os.set_blocking(self._read, False)
            return init_pid
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                kernel.die_with_parent()
            self._be_init(jail.Jail(self.order, user))
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            write_record(self._write, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)

    def _be_init(self, isolation: jail.Jail) -> None:
        """Start the command and reap processes as init of the PID namespace; send the exit status of the command to the
        launcher. ``isolation`` is applied to a jailed command."""
        if self.jailed:
            isolation.enter()
        elif self.has_pids:
            jail.own_mounts()  # as they were, but for /proc
            jail.mount_proc("/proc")
            self._bound_processes()
        command = os.fork()
        if not command:
            self._become_command(isolation)
        while True:  # orphans come here too
            pid, status, usage = os.wait4(-1, 0)
            if pid == command:
                cpu_s = usage.ru_utime + usage.ru_stime
                write_record(self._write, {"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s})
                return

    def _bound_processes(self) -> None:
        """Set the kernel's own limits, against commands that fork faster than they are counted."""
        limit = THREADS_EACH * self.order["limits"]["processes"]
        processes.bound_numbers(limit)
        processes.join_group(self._group, limit)
        if os.getuid() != 0:  # for root there is no such limit
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))

    def _become_command(self, isolation: jail.Jail) -> None:
        """Execute the command in place of this process, after locking it in if it is jailed. The child's end of the
        pipe closes when the command begins."""
        argv = self.order["argv"]
        try:
            if self.jailed:
                jail.give_input(base64.b64decode(self.order["stdin"]))
                isolation.lock()
                write_record(self._write, {"missing": isolation.missing})
                os.execve(argv[0], argv, self.order["env"])
            os.execv(argv[0], argv)
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            write_record(self._write, {"error": f"{argv[0]}: {error}"})
        finally:
            os._exit(127)

    def watch(self, init_pid: int, others: dict[int, Callable[[], bool]]) -> None:
        """Watch the command until the init process has ended, and end all its processes. ``others`` maps file
        descriptors to functions that are called when one is ready, and return whether to continue."""
        processes.watch_ahead()
        try:
            self._watch(init_pid, others)
        finally:
            processes.end_all(init_pid)
            processes.leave_group(self._group)
        self._read_records()

    def _watch(self, init_pid: int, others: dict[int, Callable[[], bool]]) -> None:
        """Wait until the init process ends, a limit is exceeded, or the caller asks for the end, and note the
        reason."""
        ended = os.pidfd_open(init_pid)
        poll = select.poll()
        for descriptor in (ended, *others):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(POLL_MS[self.jailed])}
            self._read_records()
            if ended in ready:
                return
            if not all(others[descriptor]() for descriptor in ready):
                self.report["reason"] = "asked"
                return
            self.report["reason"] = self._exceeded_limit(init_pid)
            if self.report["reason"]:
                return

    def _read_records(self) -> None:
        """Read the records that the init process and the command have sent, such as the exit status, into the
        report."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, PIPE_BYTES):
                self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            record = json.loads(line)
            self.report["missing"].update(record.pop("missing", {}))
            self.report.update(record)

    def _exceeded_limit(self, init_pid: int) -> str:
        """Return the limit that all processes below the init process together exceed, as a value of ``Reason``; empty
        for none."""
        limits = self.order["limits"]
        pids = list(islice(processes.descendants(init_pid), limits["processes"] + 1))  # there may be more every moment
        if len(pids) > limits["processes"]:
            return "processes"
        resident = {pid: processes.resident_bytes(pid) for pid in pids}
        if sum(resident.values()) > limits["memory_bytes"]:
            resident = {pid: processes.proportional_bytes(pid, limit) for pid, limit in resident.items()}
        if sum(resident.values()) > limits["memory_bytes"]:
            return "memory"
        if "files" in self.report["missing"] and processes.disk_bytes(self.order["scratch"]) > limits["disk_bytes"]:
            return "disk"
        return ""


def _check_own_proc() -> None:
    """Check that a command can have a PID namespace and its own /proc: some containers allow only the first."""
    if os.getuid() != 0:
        _enter_user_namespace()
    jail.own_mounts()
    kernel.unshare(kernel.NEW_PIDS)
    if not processes.succeeds(lambda: jail.mount_proc("/proc")):
        raise OSError("/proc cannot be mounted")


def _enter_user_namespace() -> None:
    """Enter a user namespace of its own, in which this user and group keep their ids."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def jailed() -> None:
    """Run one jailed command: read its order from standard input, watch it to its end, and write the result to the
    order's ``report``."""
    size = int.from_bytes(os.read(0, 8), "big")
    data = bytearray()
    while len(data) < size:
        data += os.read(0, PIPE_BYTES) or _exit_without_caller()
    order = json.loads(data)
    supervisor = CommandSupervisor(order)
    os.set_inheritable(order["report"], False)
    supervisor.prepare()
    init_pid = supervisor.start()
    null = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):  # only the command holds its outputs, so that they end with it
        os.dup2(null, output)
    supervisor.watch(init_pid, {0: lambda: False})  # any input, or its end, means: end the command
    with contextlib.suppress(
        OSError
    ):  # the caller may be gone; the directory is not empty where the jail had no root of its own
        os.rmdir(order["scratch"])
    write_record(order["report"], supervisor.report)


def _exit_without_caller() -> bytes:
    """End this program, because the caller has closed the input before the whole order was read."""
    raise SystemExit("the caller is gone")


def kept(order: Order) -> None:
    """Run the order's command in place of this program: its output is passed on up to a limit, and its exit status
    becomes that of this process."""
    die_with_line(order["line"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output, write_end = os.pipe()
    supervisor = CommandSupervisor(order)
    supervisor.prepare()
    log = os.dup(2)
    for descriptor in (1, 2):
        os.dup2(write_end, descriptor)
    os.close(write_end)
    init_pid = supervisor.start()
    for descriptor in (1, 2):  # the command alone holds the pipe now
        os.dup2(log, descriptor)
    bytes_left = order["limits"]["log_bytes"]

    def pass_on() -> bool:
        """Copy output of the program to the log, up to the limit in bytes; return ``True``, so that the watch goes
        on."""
        nonlocal bytes_left
        data = os.read(output, PIPE_BYTES)
        write_all(log, data[: max(0, bytes_left)])
        if bytes_left > 0 >= bytes_left - len(data):
            write_all(log, b"\n... more output is not kept\n")
        bytes_left -= len(data)
        return True

    os.set_blocking(output, False)
    supervisor.watch(init_pid, {output: pass_on})
    with contextlib.suppress(BlockingIOError):
        while select.select([output], [], [], 0)[0] and (data := os.read(output, PIPE_BYTES)):
            write_all(log, data[: max(0, bytes_left)])
    if supervisor.report["reason"]:
        write_all(log, f"killed: it went beyond its limit of {supervisor.report['reason']}\n".encode())
    if "error" in supervisor.report:
        write_all(log, supervisor.report["error"].encode() + b"\n")
    end_as(int(supervisor.report.get("status", -signal.SIGKILL)))


def die_with_line(line: int) -> None:
    """Let the kernel kill this process group when the other end of the pipe ``line`` is closed."""
    fcntl.fcntl(line, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data to a file descriptor; a full disk loses it."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def end_as(status: int) -> None:
    """End this process as the command ended: with the exit code ``status``, or by the signal ``-status`` if it is
    negative."""
    if status >= 0:
        os._exit(status)
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to take away
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    signal.pause()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kept(json.loads(sys.argv[1]))
    else:
        jailed()
