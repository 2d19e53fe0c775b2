"""Whatever dies, no process, mount or file of a session is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import EnvError
from headrace.wings.sandboxes import SandboxSpec, SessionEnded, open_sandboxes
from tests.wings.sandboxes.conftest import KINDS, Sandboxes

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
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
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
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")

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
    if os.getuid() != 0 or shutil.which("setpriv") is None or shutil.which("bwrap") is None:
        pytest.skip("only root can give a right away for a test")
    without = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c"]
    program = f"open('/proc/sys/user/max_user_namespaces').read()\n{WITHOUT_NAMESPACES}"
    done = subprocess.run([*without, program, kind], capture_output=True, text=True, check=False)
    assert f"sandboxes of kind '{kind}' cannot be made here: unshare: Operation not permitted" in done.stderr
    assert "remedy: allow user namespaces" in done.stderr
