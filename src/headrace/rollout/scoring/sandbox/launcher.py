"""The launcher: a program that starts one command, watches it, and finally kills all processes that the command has
started.

It is started as ``python -I -S -B launcher.py [ORDER]`` and uses only the standard library. An *order* is the
description of a run as JSON.

    the caller ── launcher ── init of a PID namespace ── the command ── its child processes
     holds the    watches     reaps orphans; when it ends, the kernel kills all of its namespace
     lifeline

*Jailed* (no ORDER argument; the order is read from standard input, after its length): the command runs without network,
as another user, with resource limits, and in a file system of its own. Standard input stays open as the lifeline: when
the caller closes its end, all processes are killed. The result of the command is written to ``report`` as one line of
JSON.

*Kept* (with an ORDER argument): the command runs with the rights of the caller, but its processes and memory are
watched, its log is bounded, and none of its processes outlives it. The launcher ends with the exit status of the
command.
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
    from headrace.rollout.scoring.sandbox import jail, kernel, processes, user_namespace
else:  # only the modules in this folder are imported, so that the launcher starts in milliseconds
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import jail
    import kernel
    import processes
    import user_namespace

POLL_MS = {True: 20, False: 50}
"""The interval in milliseconds at which limits are checked, for a jailed (``True``) and for a kept command."""
FIRST_USER, USERS = 40_000, 20_000
"""The first user id of jailed commands, and the number of ids. No person uses these ids; launchers choose different ids
as long as there are enough."""
PIPE_BYTES = 1 << 16
THREADS_EACH = 8
"""The assumed average number of threads per process of a kept command. The kernel's own limits count threads."""
Order = dict[str, Any]


def write_record(descriptor: int, record: Order) -> None:
    """Write ``record`` as one line of JSON to a file descriptor: the pipe to the launcher, or the caller's report."""
    os.write(descriptor, json.dumps(record).encode() + b"\n")


class CommandSupervisor:
    """A supervisor of one command, from its start to the end of the last process that it has started. The launcher
    creates one per order, and calls :meth:`prepare`, :meth:`start` and :meth:`watch` in this order."""

    def __init__(self, order: Order) -> None:
        """Create a supervisor for the command of ``order``. Its processes send records to the launcher through a
        pipe."""
        self.order = order
        self.jailed = bool(order["jailed"])
        self.report: Order = {"reason": "", "missing": {}}
        """The result of the command: ``reason``, the limit that ended it, if any; its exit status; and the missing
        guards."""
        self.has_pids = False
        """Whether the command runs in a PID namespace of its own."""
        self._incomplete_line = b""
        """The beginning of a record whose end has not arrived."""
        self._group = f"{processes.GROUP}{os.getpid()}"
        """The name of the control group of the command's processes."""
        self._read, self._write = os.pipe()
        """The pipe through which the processes of the command send records to the launcher."""

    def prepare(self) -> None:
        """Create the namespaces that the command will run in. A namespace that the kernel refuses is recorded as a
        missing guard."""
        missing: dict[str, str] = self.report["missing"]
        if self.jailed or processes.succeeds(_check_own_proc):
            if os.getuid() != 0:
                missing["user"] = "only root can start a process as another user"
                jail.guard(missing, "namespaces", user_namespace.enter)
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
        """Fork the init process, which starts the command, and return its process id. The child process never returns
        from this method."""
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
            self._run_as_init(jail.Jail(self.order, user))
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            write_record(self._write, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)

    def _run_as_init(self, isolation: jail.Jail) -> None:
        """Start the command and reap processes, as the init process of the PID namespace. Send the exit status of the
        command to the launcher, then return. ``isolation`` is applied to a jailed command."""
        if self.jailed:
            isolation.enter()
        elif self.has_pids:
            jail.enter_mount_namespace()  # the same mounts as before, except for /proc
            jail.mount_proc("/proc")
            self._bound_processes()
        command = os.fork()
        if not command:
            self._execute_command(isolation)
        while True:  # orphaned processes become children of init and are reaped too
            pid, status, usage = os.wait4(-1, 0)
            if pid == command:
                cpu_s = usage.ru_utime + usage.ru_stime
                write_record(self._write, {"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s})
                return

    def _bound_processes(self) -> None:
        """Set limits that the kernel enforces, against commands that fork faster than the launcher can count."""
        limit = THREADS_EACH * self.order["limits"]["processes"]
        processes.limit_process_ids(limit)
        processes.enter_control_group(self._group, limit)
        if os.getuid() != 0:  # the kernel does not apply this limit to root
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))

    def _execute_command(self, isolation: jail.Jail) -> None:
        """Replace this process by the command. A jailed command is first deprived of its rights. The process's end of
        the pipe closes when the command begins."""
        argv = self.order["argv"]
        try:
            if self.jailed:
                jail.set_stdin(base64.b64decode(self.order["stdin"]))
                isolation.lock()
                write_record(self._write, {"missing": isolation.missing})
                os.execve(argv[0], argv, self.order["env"])
            os.execv(argv[0], argv)
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            write_record(self._write, {"error": f"{argv[0]}: {error}"})
        finally:
            os._exit(127)

    def watch(self, init_pid: int, others: dict[int, Callable[[], bool]]) -> None:
        """Watch the command until the init process ``init_pid`` has ended or a limit is exceeded, then kill all
        remaining processes. ``others`` maps file descriptors to functions. A function is called when its descriptor is
        readable, and returns whether to continue."""
        processes.raise_priority()
        try:
            self._watch(init_pid, others)
        finally:
            processes.kill_all(init_pid)
            processes.remove_control_groups(self._group)
        self._read_records()

    def _watch(self, init_pid: int, others: dict[int, Callable[[], bool]]) -> None:
        """Wait until the init process ``init_pid`` ends, a limit is exceeded, or a function of ``others`` returns
        ``False``. Record the reason in the report."""
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
        """Read the records that the init process and the command have sent, such as the exit status, and store them in
        the report."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, PIPE_BYTES):
                self._incomplete_line += data
        *lines, self._incomplete_line = self._incomplete_line.split(b"\n")
        for line in lines:
            record = json.loads(line)
            self.report["missing"].update(record.pop("missing", {}))
            self.report.update(record)

    def _exceeded_limit(self, init_pid: int) -> str:
        """Return the limit that all descendants of the init process together exceed, as a value of ``Reason``; empty if
        none."""
        limits = self.order["limits"]
        pids = list(islice(processes.descendants(init_pid), limits["processes"] + 1))  # stop counting beyond the limit
        if len(pids) > limits["processes"]:
            return "processes"
        resident = {pid: processes.resident_bytes(pid) for pid in pids}
        if sum(resident.values()) > limits["memory_bytes"]:
            resident = {pid: processes.proportional_bytes(pid, size) for pid, size in resident.items()}
        if sum(resident.values()) > limits["memory_bytes"]:
            return "memory"
        if "files" in self.report["missing"] and processes.disk_bytes(self.order["scratch"]) > limits["disk_bytes"]:
            return "disk"
        return ""


def _check_own_proc() -> None:
    """Raise ``OSError`` if a command cannot have a PID namespace together with its own /proc. Some containers allow
    only the namespace. This runs in a forked process."""
    if os.getuid() != 0:
        user_namespace.enter()
    jail.enter_mount_namespace()
    kernel.unshare(kernel.NEW_PIDS)
    if not processes.succeeds(lambda: jail.mount_proc("/proc")):
        raise OSError("/proc cannot be mounted")


def run_jailed() -> None:
    """Run one jailed command: read the order from standard input, watch the command until it ends, and write the result
    to the file descriptor ``report`` of the order."""
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
    for output in (1, 2):  # the outputs are closed when the command ends, because no other process keeps them open
        os.dup2(null, output)
    supervisor.watch(init_pid, {0: lambda: False})  # input, or its end, means: kill the command
    # the caller may be gone, and the directory is not empty if the jail had no root of its own
    with contextlib.suppress(OSError):
        os.rmdir(order["scratch"])
    write_record(order["report"], supervisor.report)


def _exit_without_caller() -> bytes:
    """End this program, because the caller has closed the input before the complete order was read."""
    raise SystemExit("the caller is gone")


def run_kept(order: Order) -> None:
    """Run the order's command in place of this program. Its output is copied to the log up to a limit, and its exit
    status becomes the exit status of this process."""
    die_with_lifeline(order["line"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output, write_end = os.pipe()
    supervisor = CommandSupervisor(order)
    supervisor.prepare()
    log = os.dup(2)
    for descriptor in (1, 2):
        os.dup2(write_end, descriptor)
    os.close(write_end)
    init_pid = supervisor.start()
    for descriptor in (1, 2):  # from here on only the command keeps the pipe open
        os.dup2(log, descriptor)
    bytes_left = order["limits"]["log_bytes"]

    def copy_output() -> bool:
        """Copy output of the command to the log, up to the limit. Return ``True``, so that the watch continues."""
        nonlocal bytes_left
        data = os.read(output, PIPE_BYTES)
        write_all(log, data[: max(0, bytes_left)])
        if bytes_left > 0 >= bytes_left - len(data):
            write_all(log, b"\n... more output is not kept\n")
        bytes_left -= len(data)
        return True

    os.set_blocking(output, False)
    supervisor.watch(init_pid, {output: copy_output})
    with contextlib.suppress(BlockingIOError):
        while select.select([output], [], [], 0)[0] and (data := os.read(output, PIPE_BYTES)):
            write_all(log, data[: max(0, bytes_left)])
    if supervisor.report["reason"]:
        write_all(log, f"killed: it went beyond its limit of {supervisor.report['reason']}\n".encode())
    if "error" in supervisor.report:
        write_all(log, supervisor.report["error"].encode() + b"\n")
    exit_with_status(int(supervisor.report.get("status", -signal.SIGKILL)))


def die_with_lifeline(lifeline: int) -> None:
    """Make the kernel kill this process group when the other end of the pipe ``lifeline`` is closed."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data to a file descriptor. If the disk is full, the data is lost without an error."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def exit_with_status(status: int) -> None:
    """End this process with the status of the command: with the exit code ``status``, or by the signal ``-status`` if
    it is negative."""
    if status >= 0:
        os._exit(status)
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler that could be reset
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    signal.pause()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_kept(json.loads(sys.argv[1]))
    else:
        run_jailed()
