"""Ways out of a session: each is closed in each local driver, and the session works on."""

from __future__ import annotations

import os
import platform
import socket
import sys
from pathlib import Path

import psutil
import pytest

from headrace.rollout.scoring.sandbox import Reason
from headrace.wings.sandboxes import SandboxSession
from tests.wings.sandboxes.conftest import Sandboxes

ONLY_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls of x86_64")
CALLS = {
    "a mount": "165, b'', b'/tmp', b'tmpfs', 0, 0",
    "a new root": "161, b'/tmp'",
    "pivot_root": "155, b'.', b'.'",
    "a user namespace": "272, 0x10000000",
    "a network namespace": "272, 0x40000000",
    "clone into a user namespace": "56, 0x10000011, 0, 0, 0, 0",
    "setns": "308, 0, 0",
    "ptrace of the first process": "101, 16, 1, 0, 0",
    "memory of the first process": "310, 1, 0, 0, 0, 0, 0",
    "files of the first process": "438, 3, 3, 0",
    "bpf": "321, 0, 0, 0",
    "performance events": "298, 0, 0, -1, -1, 0",
    "io_uring": "425, 1, 0",
    "userfaultfd": "323, 0",
    "keys of the kernel": "250, 0, 0, 0",
    "memory of no process": "319, b'x', 0",
    "shared memory of System V": "29, 0, 4096, 0o1600",
    "a file by its handle": "304, -100, 0, 0",
    "a kernel module": "175, 0, 0, b''",
    "another kernel": "246, 0, 0, 0, 0",
    "a restart": "169, 0xfee1dead, 672274793, 0x1234567",
    "swap": "167, b'/tmp/x', 0",
    "the clock": "164, 0, 0",
    "the kernel's log": "103, 10, 0, 0",
    "a mount by descriptor": "428, -100, b'/', 0",
    "a file system by descriptor": "430, b'tmpfs', 0",
    "process accounting": "163, b'/tmp/x'",
    "the machine's name": "170, b'x', 1",
    "the user root": "105, 0",
    "the group root": "106, 0",
    "a device": "133, b'/tmp/dev', 0o60666, 0x801",
    "the numbers of another system": "0x40000000 + 39",
}
"""System calls that fail, each with its arguments."""


@ONLY_X86
def test_the_ways_to_more_power_are_closed(sandboxes: Sandboxes, long_session: SandboxSession) -> None:
    """Each call is made in a process of its own, so that none changes what the next finds."""
    code = ["import ctypes, os", "libc = ctypes.CDLL(None, use_errno=True)"]
    for name, arguments in CALLS.items():
        call = f"print({name!r}, libc.syscall({arguments}), flush=True)"
        code += ["if not os.fork():", f"    {call}", "    os._exit(0)", "os.wait()"]
    done = sandboxes.python(long_session, "\n".join(code))
    assert done.stdout.splitlines() == [f"{name} -1" for name in CALLS], done.stderr


COMMANDS = {
    "processes outside": "ls /proc | grep -c '^[0-9]' | (read n; test $n -gt 8 && echo seen)",
    "the first process's environment": "cat /proc/1/environ",
    "the first process's root": "ls /proc/1/root/",
    "the first process's files": "ls -l /proc/1/fd",
    "the first process's memory": "head -c 1 /proc/1/mem; : > /proc/1/mem",
    "the first process's directory": "ls /proc/1/cwd/",
    "the end of the first process": "kill -9 1; kill -TERM 1; false",
    "settings of the kernel": "echo 1 > /proc/sys/kernel/sysrq; echo x > /proc/sys/kernel/core_pattern",
    "a magic key": "echo b > /proc/sysrq-trigger",
    "memory of the kernel": "head -c 1 /proc/kcore; head -c 1 /dev/mem; head -c 1 /dev/kmsg",
    "the system's programs": "echo x > /usr/bin/env; rm -f /usr/bin/env; mv /usr/bin /usr/sbin2",
    "a mount made writable": "mount -o remount,rw /usr",
    "a mount taken away": "umount /usr /proc /dev/null",
    "passwords": "cat /etc/shadow /root/.bashrc /root/.ssh/id_rsa",
    "the library that is tested": f"ls {Path(__file__).parent} {Path.cwd()}/src",
    "control groups": "ls /sys/fs/cgroup; mkdir /sys",
    "a better place among processes": "nice -n -5 true 2>&1 | grep -v cannot; chrt -f 1 true",
    "higher limits": "ulimit -H -n 99999; ulimit -H -v unlimited; ulimit -c unlimited",
    "a terminal": "cat < /dev/tty; ls /dev/pts",
    "open files": "ls /proc/self/fd | grep -vE '^([0-3]|99)$'",
    "another user": "su root -c id; sudo -n id; chown root /tmp",
    "a file of root": "touch /tmp/own && chown root /tmp/own",
    "a network by its file": "exec 3<>/dev/tcp/127.0.0.1/22 && echo connected",
    "a network by its names": "getent hosts localhost.example.com",
    "other interfaces": "grep -v -e lo: -e Inter -e face /proc/net/dev",
    "a program that takes on another user": (
        "cp /bin/bash /tmp/shell && chmod 6755 /tmp/shell && /tmp/shell -p -c 'test $(id -u) = 0 && id'"
    ),
    "secrets of the caller": "env | grep -i -e headrace -e secret -e token",
    "a link out": f"ln -sf {__file__} /tmp/link && cat /tmp/link",
    "a hard link to a program": "ln /usr/bin/env /tmp/env",
    "a device by mknod": "mknod /tmp/disk b 8 0",
}  # fmt: skip
"""Commands that must print nothing."""


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_nothing_outside_is_seen_or_changed(
    sandboxes: Sandboxes, long_session: SandboxSession, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    done = sandboxes(long_session.run(f"{{ {command}; }} 2>/dev/null"))
    assert done.stdout.replace("total 0\n", "") == ""
    assert done.reason is Reason.EXITED
    assert psutil.Process().is_running()
    assert sandboxes(long_session.run("/usr/bin/env true && echo fine")).stdout == "fine\n"


@pytest.mark.parametrize("deed", ["AF_INET, socket.SOCK_STREAM", "AF_INET6, socket.SOCK_DGRAM", "AF_NETLINK, 3"])
def test_no_network_socket_can_be_opened(sandboxes: Sandboxes, long_session: SandboxSession, deed: str) -> None:
    done = sandboxes.python(long_session, f"import socket; socket.socket(socket.{deed})")
    assert "PermissionError" in done.stderr


def test_no_socket_of_the_machine_can_be_reached(sandboxes: Sandboxes, long_session: SandboxSession) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0headrace-test-{os.getpid()}")
        listening.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0headrace-test-{os.getpid()}')"
        assert "ConnectionRefusedError" in sandboxes.python(long_session, code).stderr


def test_commands_have_no_capability_and_stand_behind_a_filter(
    sandboxes: Sandboxes, long_session: SandboxSession
) -> None:
    done = sandboxes(long_session.run("grep -E '^(Cap(Eff|Prm|Inh|Amb)|NoNewPrivs|Seccomp):' /proc/self/status; id -u"))
    *lines, user = done.stdout.split("\n")[:-1]
    values = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    assert {values.pop(name) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert values == {"NoNewPrivs": "1", "Seccomp": "2"}
    assert int(user) != 0


def test_every_guard_stands_here_where_root_may_put_them_up(sandboxes: Sandboxes) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may put up all of them")
    assert sandboxes.driver.missing == {}


def test_a_program_that_kills_everything_it_can_kills_only_itself(
    sandboxes: Sandboxes, long_session: SandboxSession
) -> None:
    done = sandboxes(long_session.run("sleep 1000 & kill -9 -1; echo still here"))
    assert (done.reason, done.stdout) in ((Reason.SIGNALLED, ""), (Reason.EXITED, "still here\n"))
    sandboxes(long_session.end_background())
    assert sandboxes(long_session.run("echo next")).stdout == "next\n"


def test_a_command_cannot_forge_how_it_ended(sandboxes: Sandboxes, session: SandboxSession) -> None:
    forged = "printf '/etc\\nPATH=/tmp/evil\\0' >&99; exit 9"
    done = sandboxes(session.run(forged))
    assert done.exit_code == 9
    assert sandboxes(session.run("exit 4")).exit_code == 4  # with whatever PATH: it has only harmed itself


def test_a_fork_bomb_costs_its_own_command(sandboxes: Sandboxes, session: SandboxSession) -> None:
    done = sandboxes(session.run("b() { b | b & }; b; while :; do b; done"))
    assert done.reason in (Reason.PROCESSES, Reason.EXITED, Reason.SIGNALLED)
    assert sandboxes(session.end_background()) >= 0
    assert sandboxes(session.run("echo next")).stdout == "next\n"


def test_packages_threads_and_event_loops_work_all_the_same(sandboxes: Sandboxes, long_session: SandboxSession) -> None:
    code = "import asyncio, numpy; print(asyncio.run(asyncio.to_thread(lambda: numpy.arange(3).sum())))"
    assert sandboxes.python(long_session, code).stdout == "3\n"
    assert sandboxes(long_session.run(f"{sys.executable} -c 'import tempfile; print(tempfile.gettempdir())'")).ok
    assert sandboxes(long_session.run("diff <(echo a) <(echo a) && echo x > /dev/stdout")).stdout == "x\n"


SYSTEM = {
    "a preloaded library": "echo /tmp/evil.so > /etc/ld.so.preload",
    "the loader's cache": "rm -f /etc/ld.so.cache; mv /etc/ld.so.cache /tmp/",
    "a profile": "echo 'echo evil' > /etc/profile; mkdir /etc/profile.d",
    "the names of users": "rm -f /etc/passwd; echo evil >> /etc/passwd",
    "another /etc": "mv /etc /etc2; rm -rf /etc; ln -sfn /tmp /etc",
    "other programs": "mkdir -p /tmp/evil; ln -sfn /tmp/evil /bin; mv /bin /bin2; rm -f /bin; touch /bin/evil",
    "other libraries": "mv /lib /lib2; rm -f /lib; rm -f /lib64; ln -sfn /tmp /lib64; touch /lib/x.evil",
    "other programs of the administrator": "rm -f /sbin; mv /sbin /sbin2; touch /sbin/evil",
    "other devices": "mv /dev /dev2; rm -f /dev/null /dev/fd; ln -sfn /tmp /dev/shm; touch /dev/evil",
    "another Python": f"top={sys.prefix}; while test $top != /; do mv $top $top.evil; "
    "touch $top/evil; top=${top%/*}; test $top || top=/; done; touch -c /",
}  # fmt: skip
"""Commands that would have the system's programs, or what the loader and shells read, be the session's own."""


@pytest.mark.parametrize("how", ["session", "fork"])
@pytest.mark.parametrize("command", SYSTEM.values(), ids=SYSTEM)
def test_the_system_cannot_be_replaced(sandboxes: Sandboxes, command: str, how: str) -> None:
    look = (
        "ls -d /etc /bin /lib /lib64 /sbin /usr /dev; ls -A /etc /dev; cut -d: -f1 /etc/passwd; "
        f"readlink -f /bin/cat /lib64 /dev/shm; {sys.executable} -c 'print(1)'; "
        "find / -xdev -name '*evil*' ! -path '/tmp/*'"
    )
    session = sandboxes.start()
    before = sandboxes(session.run(look)).stdout
    assert before.endswith("1\n")
    if how == "fork":
        snapshot = sandboxes(session.snapshot())
        sandboxes(session.stop())
        session = sandboxes(sandboxes.driver.fork(snapshot))
        sandboxes(sandboxes.driver.release(snapshot))
    sandboxes(session.run(command))
    assert sandboxes(session.run(look)).stdout == before
    sandboxes(session.run("mkdir /app /logs; echo fine > /app/file; echo fine > /tmp/file"))
    assert sandboxes(session.run("cat /app/file /tmp/file")).stdout == "fine\nfine\n"
    sandboxes(session.stop())


@pytest.mark.parametrize(
    "left",
    [
        "export BASH_ENV=/tmp/evil ENV=/tmp/evil; echo 'echo evil' > /tmp/evil",
        "echo 'echo evil' | tee /tmp/.bashrc /tmp/.profile /tmp/.bash_profile",
        "mkdir /tmp/bin; printf '#!/bin/sh\\necho evil' > /tmp/bin/cat; chmod +x /tmp/bin/cat; "
        "export PATH=/tmp/bin:$PATH",
        "export LD_PRELOAD=/tmp/evil.so LD_LIBRARY_PATH=/tmp; cat() { echo evil; }; export -f cat",
    ],
    ids=["BASH_ENV", "bashrc", "PATH", "exported"],
)
def test_what_an_agent_leaves_in_its_shell_does_not_reach_scripts_and_files_of_the_driver(
    sandboxes: Sandboxes, session: SandboxSession, left: str
) -> None:
    sandboxes(session.run(f"echo good > note; {left}"))
    done = sandboxes(session.run_apart("cat /workspace/note; env | grep -c -e evil -e /tmp/bin"))
    assert (done.stdout, done.stderr) == (b"good\n0\n", b"")
    assert sandboxes(session.read("note")) == b"good\n"
