"""What is special about containers: their client, what is left of them, and what bad images and hostile worlds cost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.rollout.scoring.sandbox import Reason
from headrace.wings.sandboxes import LIMITS, SandboxSpec, SessionEnded, open_sandboxes
from headrace.wings.sandboxes.served import owners
from tests.wings.sandboxes.conftest import Sandboxes, container_options, memory_folder
from tests.wings.sandboxes.test_ends import of_sessions, wait_until

CLIENT = """
import asyncio, json, sys
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes

async def main():
    driver = await open_sandboxes(sys.argv[1], (), json.loads(sys.argv[2]))
    session = await driver.start(SandboxSpec())
    await driver.fork(await session.snapshot())
    await session.run("(setsid sleep 4322.5 &) ; sleep 4322.5 &")
    print("ready", flush=True)
    await session.run("trap '' TERM; sleep 4322.5; sleep 4322.5")

asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["docker", pytest.param("podman", marks=pytest.mark.slow)])
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    with asyncio.Runner() as runner, memory_folder() as folder:
        made = Sandboxes(request.param, runner, container_options(request.param, folder))
        yield made
        made(made.driver.close())


def listed(sandboxes: Sandboxes, *words: str) -> list[str]:
    """What the client lists."""
    command = [sandboxes.options["client"], *words, "--filter", f"label={owners.LABEL}", "--format"]
    command.append("{{.Names}}" if words[0] == "ps" else "{{.Repository}}:{{.Tag}}")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("passes", [3, 30, 100, 300, 1000])
def test_a_start_that_is_cut_off_leaves_no_container(sandboxes: Sandboxes, passes: int) -> None:
    """Also where it is cut off before there is a container that could be killed."""

    async def body() -> None:
        start = asyncio.ensure_future(sandboxes.driver.start(SandboxSpec()))
        for _ in range(passes):
            await asyncio.sleep(0)
            os.sched_yield()
        start.cancel()
        done, _ = await asyncio.wait([start], timeout=15)  # less than the driver would give a client that hangs
        assert done
        if not start.cancelled():
            await start.result().stop()
        assert not sandboxes.driver._sessions  # type: ignore[attr-defined]

    sandboxes(body())
    wait_until(lambda: not listed(sandboxes, "ps", "--all"))


def kill_worker(worker: psutil.Process) -> None:
    worker.kill()


def kill_worker_and_clients(worker: psutil.Process) -> None:
    for process in [worker, *worker.children()]:
        process.kill()


@pytest.mark.parametrize("kill", [kill_worker, kill_worker_and_clients])
def test_killed_workers_leave_no_process_and_their_images_go_with_the_next_driver(
    sandboxes: Sandboxes, kill: Callable[[psutil.Process], None]
) -> None:
    before = listed(sandboxes, "images"), listed(sandboxes, "ps", "--all")
    command = [sys.executable, "-c", CLIENT, sandboxes.kind, json.dumps(sandboxes.options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        began = len(of_sessions("4322.5"))
        kill(psutil.Process(worker.pid))
    assert began >= 2
    wait_until(lambda: not of_sessions("4322.5"))
    wait_until(lambda: listed(sandboxes, "ps", "--all") == before[1])
    assert len(listed(sandboxes, "images")) == len(before[0]) + 1  # until a driver looks
    sandboxes(sandboxes.driver.sweep())  # type: ignore[attr-defined]
    assert (listed(sandboxes, "images"), listed(sandboxes, "ps", "--all")) == before


def test_ways_outside_are_refused_by_name(sandboxes: Sandboxes) -> None:
    with pytest.raises(EpisodeError, match=r"forwards=.*cannot be served"):
        sandboxes.start(loopback=True, forwards={8008: "127.0.0.1:80"})


def test_stopped_sessions_and_released_snapshots_leave_nothing(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()
    snapshot = sandboxes(session.snapshot())
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    again = sandboxes(fork.snapshot())
    for each in (session, fork):
        sandboxes(each.stop())
    sandboxes(sandboxes.driver.release(snapshot))
    assert len(listed(sandboxes, "images")) == 2  # the second is built on the first
    sandboxes(sandboxes.driver.release(again))
    assert listed(sandboxes, "images") == listed(sandboxes, "ps", "--all") == []


def test_owners_that_live_or_cannot_be_known_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = owners.make_owner_name()
    with monkeypatch.context() as patched:  # somebody sets the clock
        patched.setattr(psutil.Process, "create_time", lambda *_, **__: 5e9)
        assert not owners.is_dead(own)
    machine, boot, space, pid, start = own.split("-")
    assert not owners.is_dead(f"{own}-7")
    assert owners.is_dead(f"{machine}-{boot}-{space}-{pid}-{int(start) - 5}-7")  # the number was given again
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert owners.is_dead(f"{machine}-{boot}-{space}-{gone.pid}-{start}-7")
    assert owners.is_dead(f"{machine}-other-{space}-{pid}-{start}-7")
    for name in (f"other-{boot}-{space}-1-2-3", f"{machine}-{boot}-1-{gone.pid}-{start}-7", "something", "a-b-c-d-e"):
        assert not owners.is_dead(name)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SandboxSpec(image="localhost/nothing:here"), "cannot start: .*(nothing|denied|refused|not known)"),
        (SandboxSpec(directory="/dev/null/x"), "cannot be made"),
    ],
)
def test_an_image_or_directory_that_cannot_be_is_told_by_name(
    sandboxes: Sandboxes, spec: SandboxSpec, words: str
) -> None:
    with pytest.raises((EpisodeError, ConfigError), match=words):
        sandboxes(sandboxes.driver.start(spec))
    assert listed(sandboxes, "ps", "--all") == []


def test_an_image_that_lacks_a_program_is_told_by_name(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()
    sandboxes(session.run("rm /usr/bin/setsid"))
    snapshot = sandboxes(session.snapshot())
    with pytest.raises(EpisodeError, match="its image lacks setsid") as error:
        sandboxes(sandboxes.driver.fork(snapshot))
    assert error.value.reason == "session_start"
    sandboxes(session.stop())
    sandboxes(sandboxes.driver.release(snapshot))


def test_a_world_that_was_taken_away_ends_by_name(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()

    async def destroy() -> None:
        await session.run("rm -rf --no-preserve-root /usr /etc /workspace")
        await session.run("true")
        await session.write({"x": "y"})

    with pytest.raises(EpisodeError):
        sandboxes(destroy())
    sandboxes(session.stop())
    assert listed(sandboxes, "ps", "--all") == []


@pytest.mark.parametrize("forged", ["echo forged exited 0 0 0 0 0 0 > /proc/1/fd/1", "echo > /proc/1/fd/1"])
def test_an_answer_that_the_server_did_not_give_ends_the_session(sandboxes: Sandboxes, forged: str) -> None:
    session = sandboxes.start()
    with pytest.raises(SessionEnded, match="something else than it was asked"):
        sandboxes(session.run(forged))
    sandboxes(session.stop())


def test_a_program_that_kills_everything_it_can_kills_only_itself(sandboxes: Sandboxes) -> None:
    session = sandboxes.start()
    done = sandboxes(session.run("sleep 1000 & kill -9 -1; echo still here"))
    assert (done.reason, done.stdout) == (Reason.SIGNALLED, "")
    assert sandboxes(session.run("echo next")).stdout == "next\n"
    sandboxes(session.stop())


def test_commands_have_no_right_of_root_no_network_and_nothing_of_the_caller(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    session = sandboxes.start()
    done = sandboxes(session.run("grep -E '^(Cap(Eff|Bnd|Amb)|NoNewPrivs):' /proc/self/status"))
    values = dict(line.split() for line in done.stdout.splitlines())
    assert values == {"CapEff:": "0" * 16, "CapBnd:": "0" * 16, "CapAmb:": "0" * 16, "NoNewPrivs:": "1"}
    assert "SECRET" not in sandboxes(session.run("env; cat /proc/1/environ")).stdout
    assert sandboxes(session.run("exec 3<>/dev/tcp/127.0.0.1/22 && echo connected")).stdout == ""
    assert sandboxes(session.run("grep -v -e lo: -e Inter -e face /proc/net/dev")).stdout == ""
    assert sandboxes(session.run("echo $LC_ALL:$PATH")).stdout.startswith(":/usr")
    sandboxes(session.stop())


@pytest.mark.slow
def test_a_fork_bomb_costs_its_own_command(sandboxes: Sandboxes) -> None:
    if sandboxes.kind != "podman":
        pytest.skip("the stand-in has no bound on processes")
    session = sandboxes.start(replace(LIMITS, processes=32))
    done = sandboxes(session.run("b() { b | b & }; b; while :; do b; done"))
    assert done.reason in (Reason.PROCESSES, Reason.EXITED, Reason.SIGNALLED)
    sandboxes(session.end_background())
    assert sandboxes(session.run("echo next")).stdout == "next\n"
    sandboxes(session.stop())


def test_paths_of_the_machine_are_read_where_the_client_can_show_them(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.kind != "podman":
        pytest.skip("the stand-in shows no paths")
    (tmp_path / "note").write_text("as it was")

    async def body() -> None:
        async with await open_sandboxes(sandboxes.kind, [str(tmp_path)], sandboxes.options) as driver:
            session = await driver.start(SandboxSpec())
            done = await session.run(f"cat {tmp_path}/note; echo x > {tmp_path}/note")
            assert done.stdout == "as it was"
            assert "Read-only file system" in done.stderr

    sandboxes(body())


def test_a_server_that_stands_still_costs_its_own_session(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.wings.sandboxes.served.session.GRACE_S", 0.2)
    session = sandboxes.start()
    sandboxes(session.run("(setsid sleep 4322.6 &)"))
    (mark,) = of_sessions("4322.6")
    server = mark.parent()
    assert server is not None
    server.send_signal(signal.SIGSTOP)
    with pytest.raises(SessionEnded, match="did not answer in time"):
        sandboxes(session.run("true", limits=replace(LIMITS, wall_s=0.2)))
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert listed(sandboxes, "ps", "--all") == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client": "/nowhere/docker"}, "no program /nowhere/docker here"),
        ({"client": "false"}, "cannot be used"),
        ({"imagge": "x"}, "the setting 'imagge'"),
        ({"cpus": 0}, "the setting 'cpus'"),
        ({"pull": "sometimes"}, "the setting 'pull'"),
    ],
)
def test_a_client_or_setting_that_cannot_be_used_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises((EnvError, ConfigError), match=words):
        asyncio.run(open_sandboxes("docker", (), options))


def test_a_driver_without_an_image_and_settings_of_a_kind_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'jail' do not take the settings \['image'\]"):
        asyncio.run(open_sandboxes("jail", (), {"image": "x"}))

    async def body() -> None:
        async with await open_sandboxes("jail") as driver:
            with pytest.raises(EpisodeError, match="'jail' have no images, and image='x' is one"):
                await driver.start(SandboxSpec(image="x"))
        driver = await open_sandboxes("docker", (), {"client": "true"})
        with pytest.raises(ConfigError, match="has no image"):
            await driver.start(SandboxSpec())

    asyncio.run(body())


def test_a_real_client_without_its_service_is_told_with_its_words() -> None:
    if shutil.which("docker") is None or os.path.exists("/var/run/docker.sock"):
        pytest.skip("docker is not here, or has its service")
    with pytest.raises(EnvError, match=r"docker cannot be used: .*[Dd]ocker"):
        asyncio.run(open_sandboxes("docker"))
