"""Starts one command, watches it, and ends it with everything that it has started.

A program of its own, standard library only: ``python -I -S -B launcher.py [ORDER]``.

    whoever asks ── launcher ── init of a PID namespace ── the command ── whatever it starts
      holds the line   watches    reaps orphans; when it ends, the kernel ends all below it

*Jailed* (no ORDER: it comes on standard input, its length first): the command has no network, another user, limits, and
a file system of its own. Standard input stays open as the line of life: closed at its other end, everything ends. What
became of the command is written to ``report`` as one line of JSON.

*Kept* (ORDER is given): the command is what it would be by itself, but for processes and memory that are watched, a log
that is bounded, and that nothing of it outlives it. The launcher ends as the command did.
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
"""How often a command is looked at: a jailed one, a kept one."""
FIRST_USER, USERS = 40_000, 20_000
"""Users of jailed commands: ids that no person has, one per launcher as far as they go."""
PIPE_BYTES = 1 << 16
THREADS_EACH = 8
"""Of a kept command's processes, on average: the kernel's own bounds count threads."""
Order = dict[str, Any]


def tell(descriptor: int, record: Order) -> None:
    """One line of JSON."""
    os.write(descriptor, json.dumps(record).encode() + b"\n")


class CommandKeeper:
    """One command, from its start to the end of the last process that it started."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.jailed = bool(order["jailed"])
        self.report: Order = {"reason": "", "missing": {}}
        self.has_pids = False
        self._told = b""
        self._group = f"headrace-{os.getpid()}"
        self._read, self._write = os.pipe()

    def prepare(self) -> None:
        """The namespaces that the command will live in."""
        missing: dict[str, str] = self.report["missing"]
        if self.jailed or processes.succeeds(_own_processes_seen):
            if os.getuid() != 0:
                missing["user"] = "only root can start a process as another user"
                jail.guard(missing, "namespaces", _become_root_of_a_namespace)
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
        """Fork the init; the child never returns from here."""
        user = FIRST_USER + os.getpid() % USERS if self.jailed and os.getuid() == 0 else os.getuid()
        first = os.fork()
        if first:
            os.close(self._write)
            os.set_blocking(self._read, False)
            return first
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with contextlib.suppress(OSError):
                kernel.die_with_parent()
            self._be_init(jail.Jail(self.order, user))
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            tell(self._write, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(0)

    def _be_init(self, inside: jail.Jail) -> None:
        if self.jailed:
            inside.enter()
        elif self.has_pids:
            jail.own_mounts()  # as they were, but for /proc
            jail.mount_proc("/proc")
            self._bound_processes()
        command = os.fork()
        if not command:
            self._become_command(inside)
        while True:  # orphans come here too
            pid, status, usage = os.wait4(-1, 0)
            if pid == command:
                cpu_s = usage.ru_utime + usage.ru_stime
                tell(self._write, {"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s})
                return

    def _bound_processes(self) -> None:
        """The kernel's own bounds, for those who multiply faster than they are counted."""
        most = THREADS_EACH * self.order["limits"]["processes"]
        processes.bound_numbers(most)
        processes.join_group(self._group, most)
        if os.getuid() != 0:  # for root there is no such limit
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    def _become_command(self, inside: jail.Jail) -> None:
        """Its end of the pipe closes when the command begins."""
        argv = self.order["argv"]
        try:
            if self.jailed:
                jail.give_input(base64.b64decode(self.order["stdin"]))
                inside.lock()
                tell(self._write, {"missing": inside.missing})
                os.execve(argv[0], argv, self.order["env"])
            os.execv(argv[0], argv)
        except BaseException as error:  # noqa: BLE001 - the edge of a process
            tell(self._write, {"error": f"{argv[0]}: {error}"})
        finally:
            os._exit(127)

    def watch(self, first: int, others: dict[int, Callable[[], bool]]) -> None:
        """Until the init has ended. ``others``: what to do when a descriptor is ready; it says whether to go on."""
        processes.watch_ahead()
        try:
            self._watch(first, others)
        finally:
            processes.end_all(first)
            processes.leave_group(self._group)
        self._hear()

    def _watch(self, first: int, others: dict[int, Callable[[], bool]]) -> None:
        ended = os.pidfd_open(first)
        poll = select.poll()
        for descriptor in (ended, *others):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(POLL_MS[self.jailed])}
            self._hear()
            if ended in ready:
                return
            if not all(others[descriptor]() for descriptor in ready):
                self.report["reason"] = "asked"
                return
            self.report["reason"] = self._excess(first)
            if self.report["reason"]:
                return

    def _hear(self) -> None:
        """What init and command have said."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, PIPE_BYTES):
                self._told += data
        *lines, self._told = self._told.split(b"\n")
        for line in lines:
            record = json.loads(line)
            self.report["missing"].update(record.pop("missing", {}))
            self.report.update(record)

    def _excess(self, first: int) -> str:
        """Which limit all processes together are over; empty for none."""
        limits = self.order["limits"]
        pids = list(islice(processes.descendants(first), limits["processes"] + 1))  # there may be more every moment
        if len(pids) > limits["processes"]:
            return "processes"
        resident = {pid: processes.resident_bytes(pid) for pid in pids}
        if sum(resident.values()) > limits["memory_bytes"]:
            resident = {pid: processes.proportional_bytes(pid, most) for pid, most in resident.items()}
        if sum(resident.values()) > limits["memory_bytes"]:
            return "memory"
        if "files" in self.report["missing"] and processes.disk_bytes(self.order["scratch"]) > limits["disk_bytes"]:
            return "disk"
        return ""


def _own_processes_seen() -> None:
    """Whether a command can have its own processes and see them: some containers allow the one and not the other."""
    if os.getuid() != 0:
        _become_root_of_a_namespace()
    jail.own_mounts()
    kernel.unshare(kernel.NEW_PIDS)
    if not processes.succeeds(lambda: jail.mount_proc("/proc")):
        raise OSError("/proc cannot be mounted")


def _become_root_of_a_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEW_USER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def jailed() -> None:
    """Take the order from standard input; what became of it goes to its ``report``."""
    size = int.from_bytes(os.read(0, 8), "big")
    data = bytearray()
    while len(data) < size:
        data += os.read(0, PIPE_BYTES) or _gone()
    order = json.loads(data)
    keeper = CommandKeeper(order)
    os.set_inheritable(order["report"], False)
    keeper.prepare()
    first = keeper.start()
    null = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):  # the command's alone: they end when it does
        os.dup2(null, output)
    keeper.watch(first, {0: lambda: False})  # whatever comes is the wish to end it
    with contextlib.suppress(OSError):  # whoever asked may not be there to do it; not empty without a root of its own
        os.rmdir(order["scratch"])
    tell(order["report"], keeper.report)


def _gone() -> bytes:
    raise SystemExit("whoever asked is gone")


def kept(order: Order) -> None:
    """The order's command in place of this program: its output is passed on up to a bound, its end is mine."""
    die_with_line(order["line"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output, theirs = os.pipe()
    keeper = CommandKeeper(order)
    keeper.prepare()
    log = os.dup(2)
    for descriptor in (1, 2):
        os.dup2(theirs, descriptor)
    os.close(theirs)
    first = keeper.start()
    for descriptor in (1, 2):  # the command alone holds the pipe now
        os.dup2(log, descriptor)
    room = order["limits"]["log_bytes"]

    def pass_on() -> bool:
        nonlocal room
        data = os.read(output, PIPE_BYTES)
        write_all(log, data[: max(0, room)])
        if room > 0 >= room - len(data):
            write_all(log, b"\n... more output is not kept\n")
        room -= len(data)
        return True

    os.set_blocking(output, False)
    keeper.watch(first, {output: pass_on})
    with contextlib.suppress(BlockingIOError):
        while select.select([output], [], [], 0)[0] and (data := os.read(output, PIPE_BYTES)):
            write_all(log, data[: max(0, room)])
    if keeper.report["reason"]:
        write_all(log, f"killed: it went beyond its limit of {keeper.report['reason']}\n".encode())
    if "error" in keeper.report:
        write_all(log, keeper.report["error"].encode() + b"\n")
    end_as(int(keeper.report.get("status", -signal.SIGKILL)))


def die_with_line(line: int) -> None:
    """The kernel kills this process group when the other end of the pipe ``line`` is closed."""
    fcntl.fcntl(line, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)


def write_all(descriptor: int, data: bytes) -> None:
    """Write it; a full disk loses it."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


def end_as(status: int) -> None:
    """With that exit code, or by that signal (negative)."""
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
