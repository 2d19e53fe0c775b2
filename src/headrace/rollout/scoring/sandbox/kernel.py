"""Linux system calls that Python does not provide, called through libc: namespaces, mounts and system call filters.
Standard library only.

Sources: man pages unshare(2), mount(2), mount_setattr(2), pivot_root(2), prctl(2), seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_ANY_NAMESPACE = 0x7E020000
"""All flags of clone(2) that create a namespace."""
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_DEATH_SIGNAL, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES, _FILTER = 1, 4, 22, 36, 38, 2
_MOUNT_SETATTR = 442
_MACHINE = os.uname().machine
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(_MACHINE)
"""The index of this processor's call numbers in the tuples below; ``None`` if they are not known for this processor."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PIVOT_ROOT, _CLONE, _SOCKET = (155, 41), (56, 220), (41, 198)
_UNIX, _INET, _INET6 = 1, 2, 10  # families of sockets, as linux/socket.h numbers them
_STREAM, _DATAGRAM, _TCP, _UDP = 1, 2, 6, 17  # their types (linux/net.h) and protocols (linux/in.h)
_CLONE3 = (435, 435)
_REFUSED_CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": _PIVOT_ROOT,
    "chroot": (161, 51), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "pidfd_getfd": (438, 438), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (_MOUNT_SETATTR,) * 2,
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "open_by_handle_at": (304, 265), "settimeofday": (164, 170), "clock_settime": (227, 112),
}  # fmt: skip
"""System calls that a graded program does not need and a hostile program could use, with their numbers on x86_64 and on
aarch64. They include calls that allocate memory outside of processes (memfd, System V), so that the memory of the
processes is all memory."""

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    _libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def _check_result(result: int, call: str) -> int:
    """Return the result of a system call. Raises ``OSError`` if it is negative; ``call`` names the call in the
    error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces of the kinds in ``flags``. Raises ``OSError`` if the kernel refuses."""
    if sys.platform != "linux":
        raise OSError("there are no namespaces here")
    _check_result(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2), which mounts ``source`` on ``target`` as a file system of type ``kind``. Empty strings are passed
    as NULL. Raises ``OSError`` if the kernel refuses."""
    texts = [text.encode() if text else None for text in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check_result(result, f"mount {kind or source} on {target}")


def make_read_only(target: str) -> None:
    """Make the mount ``target`` and all mounts below it read-only, without devices and without set-user-id programs."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", READ_ONLY | NO_SUID | NO_DEVICES, 0, 0, 0))
    arguments = (ctypes.c_int(-100), target.encode(), ctypes.c_uint(0x8000), attributes, ctypes.c_size_t(32))
    _check_result(_libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments), f"mount_setattr {target}")


def change_root(root: str) -> None:
    """Make ``root`` the root directory. The old root becomes unreachable."""
    if _COLUMN is None:
        raise OSError(f"pivot_root: unknown on {_MACHINE}")
    os.chdir(root)
    _check_result(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[_COLUMN]), b".", b"."), "pivot_root")
    _check_result(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")


def unmount(target: str) -> None:
    """Detach the mount at ``target``. Its files are freed when no process uses them any more."""
    _check_result(_libc.umount2(target.encode(), _DETACH), f"umount2 {target}")


def _prctl(option: int, first: int, second: int = 0) -> None:
    """Call prctl(2) with an option and two arguments. Raises ``OSError`` if the kernel refuses."""
    if sys.platform != "linux":
        raise OSError("there is no prctl here")
    _check_result(_libc.prctl(option, first, second, 0, 0), "prctl")


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when the thread that started it ends."""
    _prctl(_DEATH_SIGNAL, 9)


def hide_memory() -> None:
    """Make the memory, the open files and the environment of this process inaccessible to other processes of the same
    user, in /proc and through ptrace(2). The effect ends when this process executes another program."""
    _prctl(_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has ended, so that it can find and kill them."""
    _prctl(_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Prevent this process and every program that it executes from gaining privileges."""
    _prctl(_NO_NEW_PRIVILEGES, 1)


def filter_calls(*, loopback: bool = False) -> None:
    """Install a filter that refuses network sockets, namespaces and the system calls in ``_REFUSED_CALLS``. It cannot
    be removed. With ``loopback``, IPv4 and IPv6 sockets are allowed; use it only in a network namespace that has no
    other interface than the loopback interface.

    Call :func:`forbid_new_privileges` first.
    """
    if _COLUMN is None:
        raise OSError(f"seccomp: system calls are not known on {_MACHINE}")
    program = b"".join(_instructions(_COLUMN, loopback=loopback))
    instructions = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("HL", len(program) // 8, ctypes.addressof(instructions)))
    _prctl(_SECCOMP, _FILTER, ctypes.addressof(header))


def _instructions(column: int, *, loopback: bool) -> Iterable[bytes]:
    """Yield the instructions of the system call filter, in classic BPF (linux/filter.h). ``column`` is the index of
    this processor's call numbers in the tables above. ``loopback`` allows IPv4 and IPv6 sockets."""
    load, bit_and, equal, at_least, any_bit, ret = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # EPERM, ENOSYS

    def line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        """Return one instruction. ``yes`` and ``no`` are how many instructions are skipped if a comparison is true or
        false."""
        return struct.pack("HBBI", code, yes, no, value)

    yield line(load, 4)  # the architecture: call numbers have other meanings on another architecture
    yield line(equal, _AUDIT_ARCH[_MACHINE], 1, 0)
    yield line(ret, kill)
    yield line(load, 0)  # the number of the call
    yield line(at_least, 0x40000000, 0, 1)
    yield line(ret, unknown)
    for number in _REFUSED_CALLS.values():
        yield line(equal, number[column], 0, 1)
        yield line(ret, refuse)
    yield line(equal, _CLONE3[column], 0, 1)  # its flags are in memory, out of reach: libc falls back to clone
    yield line(ret, unknown)
    yield line(equal, _CLONE[column], 0, 3)
    yield line(load, 16)
    yield line(any_bit, _ANY_NAMESPACE, 0, 1)
    yield line(ret, refuse)
    yield line(load, 0)
    sockets = [line(load, 16), line(equal, _UNIX, 11 if loopback else 1, 0)]
    if loopback:  # only TCP and UDP: for other protocols the kernel might load a module
        sockets += [line(equal, _INET, 1, 0), line(equal, _INET6, 0, 8)]
        sockets += [line(load, 24), line(bit_and, 0xF), line(equal, _STREAM, 1, 0), line(equal, _DATAGRAM, 0, 4)]
        sockets += [line(load, 32), line(equal, 0, 3, 0), line(equal, _TCP, 2, 0), line(equal, _UDP, 1, 0)]
    yield line(equal, _SOCKET[column], 0, len(sockets) + 1)
    yield from sockets
    yield line(ret, refuse)
    yield line(ret, allow)
