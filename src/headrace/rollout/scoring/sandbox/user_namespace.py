"""Run a command in a user namespace of its own: ``python -I -S -B user_namespace.py COMMAND ...``.

It needs the standard library only.

The command is the same user with the same rights to files, and keeps its process, its group and its environment. But it
has no access to processes of other user namespaces, even those of the same user: it cannot read their environment or
their memory, nor trace them (ptrace(2), "Ptrace access mode checking": PTRACE_MODE_READ requires the same namespace or
CAP_SYS_PTRACE in the other one). If the kernel refuses such namespaces, the command runs without one. Without a COMMAND
it prints the reason of that refusal, or nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.rollout.scoring.sandbox import kernel, processes
else:  # its own folder, and nothing else of headrace: it starts in milliseconds
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kernel
    import processes


def enter(number: int | None = None) -> None:
    """Enter a new user namespace in which every user and group has its outer number; with ``number``, this user and its
    group are the only ones, and have that number. Raises ``OSError`` if the kernel refuses. Only root may map more
    users than itself, and has to do so from outside, in a helper process."""
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
            if os.read(read_end, 1):  # the namespace is there
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
    """Return the content of the kernel's map ``name`` of user or group numbers, in which every number that this process
    can see stands for itself."""
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in rows)


def _write(process: str, texts: dict[str, str]) -> None:
    """Write each text into the file of its name in ``/proc`` of the process."""
    for name, text in texts.items():
        with open(f"/proc/{process}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _print_refusal() -> None:
    """Print why the kernel refuses a user namespace, if it does."""
    try:
        enter()
    except OSError as error:
        sys.stdout.write(f"{error}\n")


def main(command: list[str]) -> None:
    """Replace this process by ``command``; without one, print why the kernel refuses a namespace, if it does."""
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
