"""Hostile and broken programs: each ends, for its reason, and nothing of it is left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import ConfigError
from headrace.rollout.scoring.sandbox import Finished, Reason, SandboxLimits, run, run_python

MIB = 1 << 20
DEFAULT = SandboxLimits()
BUSY = SandboxLimits(wall_s=40.0, cpu_s=1)
IDLE = SandboxLimits(wall_s=1.0)


def python(code: str, limits: SandboxLimits = DEFAULT, **given: object) -> Finished:
    return run_python(textwrap.dedent(code), limits=limits, **given)  # type: ignore[arg-type]


def left(mark: str) -> list[int]:
    """The processes whose command line holds ``mark``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and mark in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_a_program_gets_its_input_and_its_files_and_nothing_else() -> None:
    done = python(
        """
        import os, sys
        print(sys.stdin.read(), open("note").read(), sorted(os.environ), os.getcwd(), sorted(os.listdir(".")))
        sys.stderr.write("aside")
        sys.exit(3)
        """,
        stdin="in",
        files={"note": b"here"},
    )
    assert done.stdout.startswith("in here ['HOME', 'LANG'")
    assert "HEADRACE" not in done.stdout
    mine = {"main.py", "note"} | {part for part in Path(sys.prefix).parts[2:3] if sys.prefix.startswith("/tmp/")}
    assert done.stdout.endswith(f"/tmp {sorted(mine)}\n")  # a Python that lies in /tmp is seen there
    assert (done.reason, done.exit_code, done.stderr, done.ok) == (Reason.EXITED, 3, "aside", False)


def test_every_guard_stands_here_where_root_may_put_them_up() -> None:
    if os.getuid() != 0:
        pytest.skip("only root may put up all of them")
    assert python("").missing == {}


def test_packages_that_are_installed_can_be_imported() -> None:
    assert python("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"


def test_any_program_can_be_run() -> None:
    assert run(["/bin/sh", "-c", "cat; exit 4"], stdin=b"\xff\x00").exit_code == 4


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("while True: pass", Reason.CPU_TIME),
        ("import threading; threading.Event().wait() # idle", Reason.WALL_TIME),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Reason.SIGNALLED),
        ("import os\nwhile True:\n  os.write(1, b'x' * 65536)", Reason.OUTPUT),
        ("import os\nwhile True:\n  os.write(2, b'x' * 65536)", Reason.OUTPUT),
        ("import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n"
         "while True: pass", Reason.CPU_TIME),
    ],
)  # fmt: skip
def test_a_program_that_does_not_stop_is_stopped(deed: str, reason: Reason) -> None:
    done = python(deed, IDLE if reason is Reason.WALL_TIME else BUSY)
    assert done.reason is reason
    assert done.exit_code is None
    assert len(done.stdout) + len(done.stderr) <= BUSY.output_bytes


def test_output_of_a_gigabyte_costs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = python(
        "import sys\nfor _ in range(1024): sys.stdout.write('x' * (1 << 20))", SandboxLimits(output_bytes=1000)
    )
    assert (done.reason, done.stdout) == (Reason.OUTPUT, "x" * 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


def test_a_memory_bomb_costs_its_own_process() -> None:
    done = python("x = bytearray(1 << 34)")
    assert (done.reason, done.exit_code) == (Reason.EXITED, 1)
    assert "MemoryError" in done.stderr


def test_memory_of_many_processes_counts_together() -> None:
    done = python(
        """
        import os, threading
        for _ in range(8):
            if not os.fork():
                x = bytearray(os.urandom(1 << 10) * (40 << 10))
                break
        threading.Event().wait()
        """,
        SandboxLimits(wall_s=8, memory_bytes=128 * MIB),
    )
    assert done.reason is Reason.MEMORY


def test_memory_that_belongs_to_no_process_is_refused() -> None:
    done = python("import os; os.memfd_create('x')")
    assert "PermissionError" in done.stderr


def test_a_fork_bomb_ends_within_its_time_and_leaves_nothing() -> None:
    bomb = "import os # bomb-mark\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    done = run([sys.executable, "-I", "-c", bomb], limits=SandboxLimits(wall_s=1.5, processes=16))
    assert done.reason in (Reason.WALL_TIME, Reason.CPU_TIME, Reason.PROCESSES)
    assert not left("bomb-mark")


def test_what_daemonises_is_gone_when_the_program_has_ended() -> None:
    done = python(
        """
        import os, sys, threading
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.closerange(0, 64)
                code = "import threading; threading.Event().wait() # daemon-mark"
                os.execv(sys.executable, [sys.executable, "-c", code])
            os._exit(0)
        os.wait()
        print("gone")
        """
    )
    assert (done.ok, done.stdout) == (True, "gone\n")
    assert not left("daemon-mark")


def test_the_disk_has_a_bound_for_one_file_and_for_all() -> None:
    limits = SandboxLimits(file_bytes=1 * MIB, disk_bytes=4 * MIB)
    one = python("open('big', 'wb').write(b'x' * (2 << 20))", limits)
    assert "File too large" in one.stderr
    many = python(
        """
        for number in range(100):
            open(str(number), "wb").write(b"x" * (1 << 19))
        """,
        limits,
    )
    assert many.reason is Reason.DISK or "No space left" in many.stderr


def test_no_file_outside_can_be_written_or_looked_at(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of this user")
    done = python(
        f"""
        import os
        for path in ({str(tmp_path / "secret")!r}, "/etc/shadow", "/etc/passwd", {__file__!r}, "/proc/1/environ"):
            try:
                open(path).read() if not os.path.isdir(path) else os.listdir(path)
                print("read", path)
            except OSError: pass
        for path in ({str(tmp_path / "new")!r}, "/usr/lib/new", "/new", "/dev/new", "/etc/new"):
            try:
                open(path, "w")
                print("wrote", path)
            except OSError: pass
        """
    )
    assert done.stdout == ""
    assert done.ok
    assert not (tmp_path / "new").exists()


def test_the_files_of_one_run_are_gone_in_the_next() -> None:
    assert python("open('/tmp/mark', 'w').write('x')").ok
    assert "FileNotFoundError" in python("open('/tmp/mark')").stderr


@pytest.mark.parametrize("deed", ["AF_INET, socket.SOCK_STREAM", "AF_INET6, socket.SOCK_DGRAM", "AF_NETLINK, 3"])
def test_no_network_socket_can_be_opened(deed: str) -> None:
    done = python(f"import socket; socket.socket(socket.{deed})")
    assert "PermissionError" in done.stderr


def test_threads_and_event_loops_work_all_the_same() -> None:
    done = python("import asyncio; print(asyncio.run(asyncio.to_thread(lambda: 'fine')))")
    assert done.stdout == "fine\n"


def test_nobody_outside_can_be_signalled_or_seen() -> None:
    done = python(
        f"""
        import os, signal
        for pid in ({os.getpid()}, os.getppid(), 1, -1):
            try: os.kill(pid, signal.SIGTERM if pid == -1 else signal.SIGKILL)
            except OSError: pass
        try: print([pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 100])
        except OSError: print([])
        """
    )
    assert psutil.Process().is_running()
    assert done.stdout in ("[]\n", "")


@pytest.mark.parametrize("call", ["unshare(0x10000000)", "ptrace(0, 0, 0, 0)", "mount(b'', b'/', b'tmpfs', 0, 0)"])
def test_the_ways_to_more_power_are_closed(call: str) -> None:
    done = python(f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.{call}, ctypes.get_errno())")
    assert done.stdout == "-1 1\n"


def test_it_is_another_user_without_any_capability() -> None:
    done = python("import os; print(os.getuid(), [line for line in open('/proc/self/status') if 'CapEff' in line])")
    user, _, capabilities = done.stdout.partition(" ")
    assert "0000000000000000" in capabilities
    assert int(user) != 0


def test_runs_at_once_do_not_get_into_each_others_way() -> None:
    done: list[Finished] = []
    threads = [
        threading.Thread(target=lambda n=n: done.append(python(f"import os; os.fork() and os.wait(); print({n})")))  # type: ignore[misc]
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.stdout for one in done) == [f"{n}\n{n}\n" for n in range(8)]


def test_what_a_killed_asker_was_running_dies_with_it() -> None:
    code = "import threading; threading.Event().wait() # orphan-mark"
    asker = f"from headrace.rollout.scoring.sandbox import run; run([{sys.executable!r}, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", asker]) as process:
        while not [pid for pid in left("orphan-mark") if pid != process.pid]:
            assert process.poll() is None
        process.kill()
    while left("orphan-mark"):  # the signal is on its way; the test's own deadline ends a wait in vain
        pass


WITHOUT_NAMESPACES = """
import os
from headrace.rollout.scoring.sandbox import SandboxLimits, run
def sh(code, **limits): return run(["/bin/sh", "-c", code], files={"note": "hi"}, limits=SandboxLimits(**limits))
print(sorted(sh("true").missing), flush=True)
print(sh("cat note; test $(id -u) != 0 && echo other").stdout, flush=True)
print(sh("echo x > /etc/new || kill -9 $PPID || echo refused").stdout, flush=True)
print(sh("(setsid sh -c '(sleep 1234.5; true) &'); true").reason, flush=True)
print(os.system("ps aux | grep -q '[s]leep 1234.5'"), flush=True)
print(sh("i=0; while [ $i -lt 50 ]; do head -c 1000000 /dev/zero > f$i; i=$((i+1)); done; sleep 9",
         disk_bytes=8 << 20).reason)
"""


def test_where_namespaces_are_refused_the_other_guards_hold_and_those_that_miss_are_named() -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give a right away for a test")
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c"]
    done = subprocess.run([*without, WITHOUT_NAMESPACES], capture_output=True, text=True, check=True)
    missing, note, refused, exited, gone, disk = [line for line in done.stdout.splitlines() if line]
    assert missing == "['files', 'ipc', 'network', 'processes']"
    assert (note, refused) == ("hiother", "refused")
    assert (exited, disk) == ("exited", "disk")
    assert gone != "0"  # nobody is found


def test_a_command_that_is_not_there_is_told_in_words() -> None:
    done = run(["/not/there"])
    assert done.reason is Reason.NOT_STARTED
    assert "/not/there: [Errno 2]" in done.detail


@pytest.mark.parametrize(
    ("argv", "files", "limits", "words"),
    [
        ([], {}, SandboxLimits(), r"argv=\[\]"),
        (["sh"], {}, SandboxLimits(), "whole path"),
        (["/bin/sh"], {"../x": ""}, SandboxLimits(), "not a plain name"),
        (["/bin/sh"], {}, SandboxLimits(wall_s=0), "limits.wall_s=0 leaves nothing"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    argv: list[str], files: dict[str, str], limits: SandboxLimits, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(argv, files=files, limits=limits)
