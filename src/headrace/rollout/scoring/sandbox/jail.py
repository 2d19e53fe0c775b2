"""The isolation of a jailed command: a root file system of its own, another user, and resource limits. Standard library
only.

An *order* is the description of a run as plain JSON: the command, its files and input, and its limits. A *guard* is one
measure of the isolation; the kernel may refuse to install it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from headrace.rollout.scoring.sandbox import kernel
else:  # the launcher is a program without packages: its modules are in one folder
    import kernel

DEVICES = ("null", "zero", "full", "random", "urandom")
"""The device files that exist in the sandbox."""
_DEFAULT_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGPIPE", "SIGXFSZ")
"""The signals that have their default effect in a command. Python ignores some of them, and a run that a script or
``nohup`` has started in the background ignores others; a shell cannot trap signals that it inherits as ignored."""
Order = dict[str, Any]


def guard(missing: dict[str, str], name: str, install: Callable[[], None]) -> None:
    """Install the guard ``name`` by calling ``install``. If the kernel refuses it, store the cause in ``missing``."""
    try:
        install()
    except OSError as error:
        missing[name] = str(error)


class Jail:
    """The isolation of one jailed order. The init process calls :meth:`enter`, and the command's process calls
    :meth:`lock`."""

    def __init__(self, order: Order, user: int) -> None:
        """Create the isolation that ``order`` describes, for a command that will run with the user id ``user``."""
        self.order = order
        self.user = user
        self.missing: dict[str, str] = {}
        """The guards that the kernel refused, each with the cause."""

    def enter(self) -> None:
        """Replace the root directory, in the init process, by one that contains only the readable paths and a small
        /tmp. If the kernel refuses, make the scratch directory the working directory instead."""
        os.setsid()
        guard(self.missing, "files", self._change_root)
        if "files" in self.missing:
            os.chdir(self.order["scratch"])
            self._write_files(".")
            if self.user != os.getuid():
                os.chown(".", self.user, -1)

    def _change_root(self) -> None:
        """Build a file system with /tmp, /dev, /proc and the readable paths, and make it the root, read-only."""
        root, disk = self.order["scratch"], self.order["limits"]["disk_bytes"]
        no_privileges = kernel.NO_SUID | kernel.NO_DEVICES
        enter_mount_namespace()
        kernel.mount("tmpfs", root, "tmpfs", no_privileges, "size=1m,mode=755")
        os.makedirs(f"{root}/tmp")
        options = f"size={disk},nr_inodes={max(64, disk >> 14)},mode=1777"
        kernel.mount("tmpfs", f"{root}/tmp", "tmpfs", no_privileges, options)
        for path in self.order["readable"]:  # after /tmp is mounted, because a path may be below /tmp
            self._bind_readable(path, root + path)
        os.makedirs(f"{root}/dev", exist_ok=True)
        for name in DEVICES:
            bind(f"/dev/{name}", f"{root}/dev/{name}")
        os.makedirs(f"{root}/proc", exist_ok=True)
        with contextlib.suppress(OSError):  # in some containers /proc is masked: then the sandbox has no /proc
            mount_proc(f"{root}/proc")
        os.symlink("/tmp", f"{root}/dev/shm")
        self._write_files(f"{root}/tmp")
        kernel.mount("", root, flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | no_privileges)
        kernel.change_root(root)
        os.chdir("/tmp")

    def _bind_readable(self, path: str, target: str) -> None:
        """Make a path of the machine visible in the sandbox at ``target``, read-only. A symbolic link is copied as a
        link."""
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
        elif os.path.exists(path):
            bind(path, target)
            kernel.make_read_only(target)

    def _write_files(self, directory: str) -> None:
        """Write the files of the order into a directory of the sandbox."""
        for name, content in self.order["files"].items():
            path = os.path.join(directory, name)
            with open(path, "wb") as file:
                file.write(base64.b64decode(content))
            os.chmod(path, 0o644)

    def lock(self) -> None:
        """Drop all rights that the command must not have: its user, its resource limits, its privileges and system
        calls. The command's process calls this before it executes the command."""
        if self.user != os.getuid():
            os.setgroups([])
            os.setresgid(self.user, self.user, self.user)
            os.setresuid(self.user, self.user, self.user)
        limits = self.order["limits"]
        limits_by_resource = {
            resource.RLIMIT_CPU: (limits["cpu_s"], limits["cpu_s"] + 1),
            resource.RLIMIT_AS: (limits["address_bytes"] or limits["memory_bytes"],) * 2,
            resource.RLIMIT_FSIZE: (limits["file_bytes"],) * 2,
            resource.RLIMIT_NOFILE: (limits["open_files"],) * 2,
            resource.RLIMIT_CORE: (0, 0),
        }
        if self.user != 0 and "namespaces" not in self.order["missing"]:  # else all of the user's processes count
            limits_by_resource[resource.RLIMIT_NPROC] = (limits["processes"] + 1,) * 2
        for resource_id, values in limits_by_resource.items():
            resource.setrlimit(resource_id, values)
        for name in _DEFAULT_SIGNALS:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        guard(self.missing, "privileges", kernel.forbid_new_privileges)
        guard(self.missing, "system calls", partial(kernel.filter_calls, loopback=self.order.get("loopback", False)))


def enter_mount_namespace() -> None:
    """Enter a new mount namespace with the same mounts. Changes in it are not visible outside."""
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)


def mount_proc(target: str) -> None:
    """Mount a proc file system at ``target`` that shows the processes of this PID namespace."""
    kernel.mount("proc", target, "proc", kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC)


def bind(path: str, target: str) -> None:
    """Make the file or folder ``path`` also visible at ``target``, by a bind mount. ``target`` is created."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb"):
            pass
    kernel.mount(path, target, flags=kernel.BIND | kernel.RECURSIVE)


def set_stdin(data: bytes) -> None:
    """Make ``data`` the standard input of this process. A command that it executes inherits the input."""
    descriptor = os.memfd_create("stdin")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.close(descriptor)
