"""A program that runs a command in a new user namespace: ``python -I -S -B user_namespace.py COMMAND ...``.

It uses only the standard library.

The command runs as the same user, with the same rights to files, and keeps the process id, the process group and the
environment. It has no access to processes in other user namespaces, even if they belong to the same user: it cannot
read their environment or their memory, and cannot trace them (ptrace(2), "Ptrace access mode checking":
PTRACE_MODE_READ requires the same namespace, or CAP_SYS_PTRACE in the namespace of the other process). If the kernel
refuses a new namespace, the command runs without it. If no COMMAND is given, the program prints why the kernel refuses
a namespace, or nothing if it does not.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.rollout.scoring.sandbox import kernel, processes
else:  # only the modules in this folder are imported, so that the program starts in milliseconds
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kernel
    import processes


def enter(number: int | None = None) -> None:
    """Enter a new user namespace in which every user and group has the same number as outside. With ``number``, the
    current user and its group are the only ones, and have that number inside. Raises ``OSError`` if the kernel refuses.
    Only root may map other users than itself; the kernel requires that another process, a helper outside of the
    namespace, writes the map."""
    if os.getuid() != 0 or number is not None:
        user, group = os.getuid(), os.getgid()
        inner_user, inner_group = (user, group) if number is None else (number, number)
        kernel.unshare(kernel.NEW_USER)
        maps = {"uid_map": f"{inner_user} {user} 1", "gid_map": f"{inner_group} {group} 1"}
        _write("self", {"setgroups": "deny", **maps})
        return
    own_pid, maps = os.getpid(), {name: _same_numbers(name) for name in ("uid_map", "gid_map")}
    read_end, write_end = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(write_end)
        code = 1
        try:
            if os.read(read_end, 1):  # the namespace was created
                _write(str(own_pid), maps)
                code = 0
        finally:
            os._exit(code)
    try:
        kernel.unshare(kernel.NEW_USER)
        os.write(write_end, b"x")
    finally:
        os.close(write_end)
        os.close(read_end)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise OSError("the users of the namespace cannot be mapped")


def _same_numbers(name: str) -> str:
    """Return the content for the kernel's file ``name``, ``uid_map`` or ``gid_map``, that maps every number that this
    process can see to itself."""
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in rows)


def _write(process: str, texts: dict[str, str]) -> None:
    """Write each text into the file of its name in ``/proc/PROCESS``."""
    for name, text in texts.items():
        with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _print_refusal() -> None:
    """Print why the kernel refuses a user namespace; print nothing if it allows one."""
    try:
        enter()
    except OSError as error:
        sys.stdout.write(f"{error}\n")


def main(command: list[str]) -> None:
    """Replace this process by ``command``, in a new user namespace if the kernel allows it. Without a command, print
    why the kernel refuses a namespace, if it does."""
    if not command:
        _print_refusal()
        return
    if processes.succeeds(enter):
        enter()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"it cannot be started: {error}\n")
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
