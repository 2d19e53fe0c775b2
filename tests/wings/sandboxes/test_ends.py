"""Whatever dies, no process, mount or file of a session is left."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import EnvError, EpisodeError
from headrace.wings.sandboxes import SandboxSession, SandboxSpec, SessionEnded, open_sandboxes
from headrace.wings.sandboxes.local import files, supervisor
from headrace.wings.sandboxes.local.driver import LocalDriver
from tests.wings.sandboxes.conftest import KINDS, Sandboxes, skip_missing

CLIENT = """
import asyncio, sys
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes

async def main():
    driver = await open_sandboxes(sys.argv[1])
    for _ in range(3):
        session = await driver.start(SandboxSpec())
        await session.run("head -c 1000000 /dev/zero > file; (setsid sleep 4321.5 &) ; sleep 4321.5 &")
        snapshot = await session.snapshot(end_background=True)
        await driver.fork(snapshot)
        await session.run("(setsid sleep 4321.5 &) ; sleep 4321.5 &")
    print("ready", driver._process.pid, flush=True)
    await session.run("trap '' TERM; sleep 4321.5; sleep 4321.5")

asyncio.run(main())
"""


def of_sessions(mark: str = "4321.5") -> list[psutil.Process]:
    """The processes of the test's sessions, and those of hosts."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.info["status"] != psutil.STATUS_ZOMBIE and (mark in line and "import asyncio" not in line):
            found.append(process)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what a signal does; the test's own deadline ends a wait in vain."""
    while not holds():
        os.sched_yield()


def kill_client(client: subprocess.Popen[str], host: int) -> None:
    client.kill()


def kill_host(client: subprocess.Popen[str], host: int) -> None:
    os.kill(host, signal.SIGKILL)


def kill_both(client: subprocess.Popen[str], host: int) -> None:
    for pid in (client.pid, host):
        os.kill(pid, signal.SIGKILL)


def kill_all_of_ours(client: subprocess.Popen[str], host: int) -> None:
    """Kill client, host and supervisors, in no good order, while nobody can react."""
    below = psutil.Process(host).children()
    for process in [psutil.Process(host), *below, psutil.Process(client.pid)]:
        process.kill()


@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        *(("jail", kill) for kill in (kill_client, kill_host, kill_both, kill_all_of_ours)),
        *(("bubblewrap", kill) for kill in (kill_client, kill_all_of_ours)),
    ],
)
def test_killed_programs_leave_no_process_mount_or_file(
    kind: str, kill: Callable[[subprocess.Popen[str], int], None], tmp_path: Path
) -> None:
    skip_missing(kind)
    mounts = Path("/proc/self/mountinfo").read_text()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CLIENT, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
        assert client.stdout is not None
        word, host = client.stdout.readline().split()
        assert word == "ready"
        assert of_sessions()
        descendants = psutil.Process(client.pid).children(recursive=True)
        assert len(descendants) > 12
        kill(client, int(host))
        wait_until(lambda: not of_sessions())
        client.kill()
    wait_until(lambda: not any(map(lives, descendants)))
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert [*tmp_path.iterdir()] == []


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that only waits for its parent has."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_stopped_sessions_free_their_processes_and_memory(sandboxes: Sandboxes) -> None:
    host = sandboxes.driver._process.pid  # type: ignore[attr-defined]
    before = len(psutil.Process(host).children(recursive=True))
    session = sandboxes.start()
    sandboxes(session.run("sleep 4321.6 & head -c 5000000 /dev/zero > file"))
    snapshot = sandboxes(session.snapshot(end_background=True))
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    assert len(psutil.Process(host).children(recursive=True)) > before
    for each in (session, fork):
        sandboxes(each.stop())
    sandboxes(sandboxes.driver.release(snapshot))
    wait_until(lambda: len(psutil.Process(host).children(recursive=True)) <= before)
    assert not of_sessions("4321.6")
    wait_until(lambda: stores_of(host) == 0)


def stores_of(host: int) -> int:
    """How many stores of files the host has mounted."""
    lines = Path(f"/proc/{host}/mountinfo").read_text().splitlines()
    return sum(line.split()[4].rpartition("/")[2].isdigit() for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_a_supervisor_that_is_killed_or_stopped_costs_its_own_session(kind: str) -> None:
    skip_missing(kind)

    async def body() -> None:
        async with await open_sandboxes(kind) as driver:
            session, other = await driver.start(SandboxSpec()), await driver.start(SandboxSpec())
            host = psutil.Process(driver._process.pid)  # type: ignore[attr-defined]
            min(host.children(), key=lambda child: child.create_time()).kill()
            with pytest.raises(SessionEnded, match="its processes were killed"):
                await session.run("sleep 1000")
            assert (await other.run("echo fine")).stdout == "fine\n"
            host.kill()
            with pytest.raises(SessionEnded):
                await other.run("sleep 1000")
            with pytest.raises(EnvError, match="has ended"):
                await driver.start(SandboxSpec())

    asyncio.run(body())


def test_a_closed_driver_ends_its_sessions(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        driver = await open_sandboxes(sandboxes.kind)
        session = await driver.start(SandboxSpec())
        await session.run("sleep 4321.7 &")
        await driver.close()
        with pytest.raises(SessionEnded, match="its driver was closed"):
            await session.run("true")

    sandboxes(body())
    wait_until(lambda: not of_sessions("4321.7"))


WITHOUT_NAMESPACES = """
import asyncio, sys
from headrace.wings.sandboxes import open_sandboxes
asyncio.run(open_sandboxes(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_without_namespaces_is_refused_by_name(kind: str) -> None:
    if os.getuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("only root can take namespaces away for a test")
    program = f"open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n{WITHOUT_NAMESPACES}"
    within = ["unshare", "--user", "--map-root-user", sys.executable, "-c", program, kind]
    done = subprocess.run(within, capture_output=True, text=True, check=False)
    assert f"sandboxes of kind '{kind}' cannot be made here: unshare: No space left on device" in done.stderr
    assert "remedy: allow user namespaces" in done.stderr
    assert done.stderr.count("Traceback") == 1  # that of this program, and none of the host


LITTLE_ROOT = """
import asyncio, sys
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes

async def main():
    async with await open_sandboxes(sys.argv[1]) as driver:
        session = await driver.start(SandboxSpec())
        print(sorted(driver.missing))
        print((await session.run("id -un; grep -c 'CapEff.*0000000000000000' /proc/self/status; mkdir d")).stdout)
        fork = await driver.fork(await session.snapshot())
        print((await fork.run("rmdir d && mkdir d && ls; echo x > /etc/x || ln -sfn /tmp /bin || echo kept")).stdout)

asyncio.run(main())
"""


@pytest.mark.parametrize("without", ["users", "rights"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_root_of_few_rights_has_the_sessions_of_a_plain_user(kind: str, without: str) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None or shutil.which("bwrap") is None:
        pytest.skip("only root can give rights away for a test")
    words = {
        "users": ["unshare", "--user", "--map-root-user"],
        "rights": ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"],
    }
    within = [*words[without], sys.executable, "-c", LITTLE_ROOT, kind]
    done = subprocess.run(within, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == ["['user']", "agent", "1", "d", "kept"]


PLAIN_USER = """
import asyncio, os, sys
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes

async def main():
    async with await open_sandboxes(sys.argv[1]) as driver:
        async with await driver.start(SandboxSpec(loopback=True, forwards={8008: "127.0.0.1:9"})) as connected:
            print((await connected.run(": < /dev/tcp/127.0.0.1/8008 && echo connected")).stdout)
        session = await driver.start(SandboxSpec())
        print(sorted(driver.missing), sorted(session.missing), os.getuid())
        print((await session.run("id -u; grep -c 'CapEff.*0000000000000000' /proc/self/status")).stdout.split())
        bomb = await session.run("b() { b | b & }; b; while :; do b; done")
        await session.end_background()
        print(bomb.reason, (await session.run("cat /proc/1/maps /proc/1/environ; ls /proc/1/fd; echo fine")).stdout)
        await session.run("rm -r /etc /dev; ln -s /home /dev; mkdir d; echo x > d/file; rm -r /srv; ln -sfn / /srv")
        snapshot = await session.snapshot()
        fork = await driver.fork(snapshot)
        print((await fork.run("rm -r d; mkdir d; ls -A d; echo y > d/new; cat d/new")).stdout)
        trap = await fork.run("mv /etc /etc2; ln -s /tmp /etc; echo trapped")
        print(trap.stdout)
        try:
            twice = await fork.snapshot()
            other = await driver.fork(twice)
            print((await other.run("echo fine")).stdout)
        except Exception as error:
            print(error)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_without_rights_has_sessions_too_and_is_told_what_is_weaker(kind: str) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if os.getuid() != 0 or python is None or shutil.which("setpriv") is None or shutil.which("bwrap") is None:
        pytest.skip("only root can become another user, who needs a Python that he can read")
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout
    if version.split()[1].split(".")[:2] != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("that Python cannot import what this one has installed")
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-c", PLAIN_USER, kind]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
    done = subprocess.run(other, capture_output=True, text=True, check=False, env=environment, cwd="/")
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines.pop(0) == "connected"
    assert lines[:5] == ["['user'] ['user'] 65534", "['65534', '1']", "processes fine", "y", "trapped"]
    assert len(lines) > 5  # the fork works, or the damaged place of a mount is named


def test_what_a_session_may_read_it_cannot_write_whoever_else_could(sandboxes: Sandboxes, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    (tmp_path / "note").write_text("as it was")
    (tmp_path / "note").chmod(0o666)
    tmp_path.chmod(0o777)

    async def body() -> None:
        async with await open_sandboxes(sandboxes.kind, [str(tmp_path)]) as driver:
            session = await driver.start(SandboxSpec())
            done = await session.run(f"cat {tmp_path}/note; echo x > {tmp_path}/note; echo x > {tmp_path}/new")
            assert done.stdout == "as it was"
            assert done.stderr.count("Read-only file system") == 2

    sandboxes(body())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["as it was"]


def test_a_stop_that_is_cancelled_leaves_nothing(sandboxes: Sandboxes) -> None:
    driver = sandboxes.driver
    assert isinstance(driver, LocalDriver)
    before, stores = len(os.listdir("/proc/self/fd")), len(driver._uses)

    async def stopped() -> None:
        session = await driver.start(SandboxSpec())
        stopping = asyncio.create_task(session.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        await session.stop()

    for _ in range(5):
        sandboxes(stopped())
    assert len(driver._uses) == stores
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_starts_that_are_cancelled_together_cost_no_other_session(sandboxes: Sandboxes) -> None:
    """So many that the host cannot take all messages at once: some are cancelled before it knows of their files."""

    async def body() -> None:
        first = await sandboxes.driver.start(SandboxSpec())
        starts = [asyncio.create_task(sandboxes.driver.start(SandboxSpec())) for _ in range(300)]
        await asyncio.sleep(0.02)
        for start in starts:
            start.cancel()
        for done in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(done, SandboxSession):
                await done.stop()
        assert (await first.run("echo fine")).stdout == "fine\n"
        another = await sandboxes.driver.start(SandboxSpec())
        assert (await another.run("echo new")).stdout == "new\n"
        await another.stop()
        await first.stop()

    sandboxes(body())


FEW_FILES = """
import asyncio, resource, sys
from headrace.base.errors import EpisodeError
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    async with await open_sandboxes(sys.argv[1]) as driver:
        sessions = [await driver.start(SandboxSpec())]
        try:
            while len(sessions) < 250:
                sessions.append(await driver.start(SandboxSpec()))
        except EpisodeError as error:
            print(error.reason)
        for session in sessions[1:20]:
            await session.stop()
        print((await sessions[0].run("echo fine")).stdout.strip())
        print((await (await driver.start(SandboxSpec())).run("echo new")).stdout.strip())

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_may_open_no_more_files_starts_no_session_and_keeps_the_others(kind: str) -> None:
    skip_missing(kind)
    done = subprocess.run([sys.executable, "-c", FEW_FILES, kind], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["session_start", "fine", "new"], done.stderr


def test_copies_leave_files_to_open_for_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_missing("bubblewrap")

    async def body() -> None:
        async with await open_sandboxes("bubblewrap") as driver:
            session = await driver.start(SandboxSpec())
            monkeypatch.setattr(files, "LEFT_OPEN", 1 << 40)
            with pytest.raises(EpisodeError, match="files are the most that this process may have open") as error:
                await session.snapshot()
            assert error.value.reason == "session_snapshot"
            monkeypatch.setattr(files.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await driver.release(await session.snapshot())
            assert (await session.run("echo well")).stdout == "well\n"

    asyncio.run(body())


def test_files_of_one_session_are_bounded_in_number(sandboxes: Sandboxes, session: SandboxSession) -> None:
    """Empty files take memory of the kernel, which no limit of bytes counts."""
    assert session.spec.limits.disk_bytes == 256 << 20
    inodes = sandboxes(session.run("stat -f -c %c /workspace")).stdout
    assert int(inodes) <= (256 << 20) // 4096


@pytest.mark.parametrize("before", [0, 1])
def test_a_session_without_processes_is_looked_at_once_a_second(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap has a process of its own before those of the commands."""
    channel, other_end = socket.socketpair()
    with channel, other_end:
        order = {"programs_before": before, "life_s": 60.0, "limits": {"processes": 8}, "way": other_end.fileno()}
        watching = supervisor.SessionSupervisor(order, channel)
        for number, wait_ms in ((before, supervisor.IDLE_MS), (before + 1, supervisor.POLL_MS)):
            monkeypatch.setattr(supervisor.processes, "descendants", lambda _, found=number: iter(range(found)))
            assert watching._wait_ms() == wait_ms
        for each in (watching._control, watching._other_end, watching._descriptors):
            each.close()
