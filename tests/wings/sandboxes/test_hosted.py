"""What is special about services: what they are asked for, what they refuse, what dies, and what is left."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.wings.sandboxes import LIMITS, SandboxSpec, SessionEnded, open_sandboxes
from headrace.wings.sandboxes.served import hosted, owners
from headrace.wings.sandboxes.served import session as served
from tests.wings.sandboxes.conftest import HOSTED, Sandboxes, hosted_service, memory_folder
from tests.wings.sandboxes.test_ends import of_sessions, wait_until

OPTIONS = {"image": "tree:base"}
KEYS = {"e2b": ["E2B_API_KEY"], "modal": ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"], "daytona": ["DAYTONA_API_KEY"]}
URLS = {"e2b": "E2B_API_URL", "modal": "MODAL_SERVER_URL", "daytona": "DAYTONA_API_URL"}
CLIENT = """
import asyncio, json, sys
from headrace.wings.sandboxes import SandboxSpec, open_sandboxes

async def main():
    driver = await open_sandboxes(sys.argv[1], (), json.loads(sys.argv[2]))
    session = await driver.start(SandboxSpec(life_s=float(sys.argv[3])))
    await driver.fork(await session.snapshot())
    await session.run("(setsid sleep 4401.5 &) ; sleep 4401.5 &")
    print("ready", flush=True)
    await session.run("trap '' TERM; sleep 4401.5; sleep 4401.5")

asyncio.run(main())
"""

SLOW = """#!/usr/bin/bash
sleep 0.3
exec /usr/bin/.dd "$@"
"""
"""A program that makes its file late, as all do on a machine that is busy."""
REFUSING = """#!/usr/bin/bash
[[ ${{!#}} == true ]] && exit 1
exec /usr/bin/.{} "$@"
"""
"""A program that refuses what the launcher tries with it. The stand-in makes machines with the same programs."""


class Hosted(Sandboxes):
    """A driver, and the stand-in for its service."""

    def __init__(self, kind: str, runner: asyncio.Runner, service: Any) -> None:
        super().__init__(kind, runner, OPTIONS)
        self.service = service

    @property
    def machines(self) -> list[str]:
        return list(self.service.machines.alive)

    @property
    def snapshots(self) -> list[str]:
        return [image for image in self.service.machines.images if image != "tree:base"]

    def first_machine(self) -> str:
        return self.machines[0]


@pytest.fixture(scope="module", params=HOSTED)
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Hosted]:
    with asyncio.Runner() as runner, memory_folder() as folder, hosted_service(request.param, folder) as service:
        made = Hosted(request.param, runner, service)
        yield made
        made(made.driver.close())


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no machine and no snapshot is there, and nothing is refused any more."""
    yield
    if "sandboxes" in request.fixturenames:
        made = request.getfixturevalue("sandboxes")
        made.service.refuse.clear()
        assert (made.machines, made.snapshots) == ([], [])


def asked(sandboxes: Hosted) -> dict[str, Any]:
    """What the last machine was asked to be, in the same words for all services."""
    if sandboxes.kind == "e2b":
        body = [body for name, body in sandboxes.service.calls if name == "create"][-1]
        return {"life": body["timeout"], "network": body["allow_internet_access"], "tags": body["metadata"]}
    if sandboxes.kind == "daytona":
        body = [body for name, body in sandboxes.service.calls if name == "create"][-1]
        assert (body["memory"], body["user"], body["autoStopInterval"], body["autoDeleteInterval"]) == (
            1,
            "root",
            15,
            0,
        )
        return {"life": body["ttlMinutes"], "network": not body["networkBlockAll"], "tags": body["labels"]}
    request = [request for name, request in sandboxes.service.calls if name == "SandboxCreateV2"][-1]
    wanted = request.definition
    assert wanted.resources.memory_mb_max == wanted.resources.memory_mb == 512 + 64
    return {
        "life": wanted.timeout_secs,
        "network": wanted.network_access.network_access_type != wanted.network_access.BLOCKED,
        "tags": {tag.tag_name: tag.tag_value for tag in request.tags},
    }


def refuse(sandboxes: Hosted, what: str, how: str) -> None:
    """Have the service refuse to start or to keep: for a quota, or because it is broken."""
    if sandboxes.kind == "e2b":
        status = {"quota": (429, "too many sandboxes"), "broken": (500, "it is broken"), "key": (401, "revoked")}
        for name in {"start": ["create"], "keep": ["snapshot", "snapshot of files"]}[what]:
            sandboxes.service.refuse[name] = status[how]
        return
    if sandboxes.kind == "daytona":
        of_daytona = {
            "quota": (400, "too many: Total CPU limit exceeded. Maximum allowed: 10."),
            "broken": (500, "it is broken"),
            "key": (401, "revoked"),
        }
        sandboxes.service.refuse[{"start": "create", "keep": "snapshot"}[what]] = of_daytona[how]
        return
    from grpclib import Status

    status_of = {
        "quota": (Status.RESOURCE_EXHAUSTED, "too many"),
        "broken": (Status.FAILED_PRECONDITION, "broken"),
        "key": (Status.UNAUTHENTICATED, "revoked"),
    }
    name = {"start": "SandboxCreateV2", "keep": "TaskSnapshotFilesystem"}[what]
    sandboxes.service.refuse[name] = status_of[how]


def test_a_session_is_what_was_asked_for_and_its_forks_go_their_own_ways(sandboxes: Hosted) -> None:
    session = sandboxes.start(life_s=77.5)
    wanted = asked(sandboxes)
    assert (wanted["life"], wanted["network"]) == (2 if sandboxes.kind == "daytona" else 78, False)
    assert wanted["tags"][owners.LABEL] == owners.make_owner_name()
    assert list(session.missing) == ["disk"]
    data = bytes(range(256)) * 600 + b"\n\n"  # more than one line of base64, and every byte
    sandboxes(session.write({"data": data}))
    assert sandboxes(session.read("data")) == data
    snapshot = sandboxes(session.snapshot())
    forks = [sandboxes(sandboxes.driver.fork(snapshot)) for _ in range(2)]
    for number, each in enumerate([session, *forks]):
        assert sandboxes(each.run(f"echo {number} >> data; tail -n 1 data")).stdout == f"{number}\n"
    sandboxes(session.stop())
    sandboxes(sandboxes.driver.release(snapshot))
    assert len(sandboxes.snapshots) == 1  # two sessions are built on it
    for each in forks:
        sandboxes(each.stop())


def test_commands_have_no_right_of_root_no_network_and_cannot_end_the_server(sandboxes: Hosted) -> None:
    session = sandboxes.start()
    done = sandboxes(session.run("grep -E '^(Cap(Eff|Bnd|Amb)|NoNewPrivs):' /proc/self/status"))
    values = dict(line.split() for line in done.stdout.splitlines())
    assert values == {"CapEff:": "0" * 16, "CapBnd:": "0" * 16, "CapAmb:": "0" * 16, "NoNewPrivs:": "1"}
    assert sandboxes(session.run("exec 3<>/dev/tcp/127.0.0.1/22 && echo connected")).stdout == ""
    assert sandboxes(session.run("kill -9 1 -1; echo not reached")).stdout == ""
    assert sandboxes(session.run("echo next")).stdout == "next\n"
    sandboxes(session.stop())


def test_a_command_may_kill_all_before_the_server_has_made_the_files_of_its_output(sandboxes: Hosted) -> None:
    session = sandboxes.start()
    sandboxes(session.write({"/usr/bin/slow": SLOW}))
    sandboxes(session.run("cd /usr/bin && chmod 755 slow && mv dd .dd && mv slow dd"))
    assert sandboxes(session.run("kill -9 1 -1; echo not reached")).stdout == ""
    assert sandboxes(session.run("echo next")).stdout == "next\n"
    sandboxes(session.stop())


@pytest.mark.parametrize(
    ("how", "reason", "words"), [("quota", "session_quota", "too many"), ("broken", "session_start", "broken")]
)
def test_a_start_that_the_service_refuses_is_told_with_its_words(
    sandboxes: Hosted, how: str, reason: str, words: str
) -> None:
    refuse(sandboxes, "start", how)
    with pytest.raises(EpisodeError, match=f"cannot start from 'tree:base': .*{words}") as error:
        sandboxes.start()
    assert error.value.reason == reason


def test_a_key_that_was_revoked_meanwhile_refuses_the_run(sandboxes: Hosted) -> None:
    refuse(sandboxes, "start", "key")
    with pytest.raises(EnvError, match="revoked"):
        sandboxes.start()


def test_a_closed_driver_leaves_no_machine_and_no_snapshot(sandboxes: Hosted) -> None:
    async def body() -> None:
        driver = await open_sandboxes(sandboxes.kind, (), OPTIONS)
        session = await driver.start(SandboxSpec())
        await session.snapshot()
        await driver.close()
        with pytest.raises(SessionEnded, match="its driver was closed"):
            await session.run("true")

    sandboxes(body())


def test_an_image_that_is_missing_is_told_by_name(sandboxes: Hosted) -> None:
    with pytest.raises(EpisodeError, match=r"cannot start from 'nothing:here': .*not found") as error:
        sandboxes.start(image="nothing:here")
    assert error.value.reason == "session_start"


def test_a_snapshot_that_the_service_refuses_leaves_the_session(sandboxes: Hosted) -> None:
    session = sandboxes.start()
    refuse(sandboxes, "keep", "broken")
    with pytest.raises(EpisodeError, match=r"cannot be kept: .*broken") as error:
        sandboxes(session.snapshot())
    assert error.value.reason == "session_snapshot"
    assert sandboxes(session.run("echo fine")).stdout == "fine\n"
    sandboxes(session.stop())


def test_a_machine_that_dies_in_the_middle_of_a_command_ends_its_session_with_the_services_words(
    sandboxes: Hosted,
) -> None:
    session = sandboxes.start()

    async def dies() -> None:
        running = asyncio.ensure_future(session.run("(setsid sleep 4401.6 &); sleep 1000"))
        await asyncio.to_thread(wait_until, lambda: bool(of_sessions("4401.6")))
        await asyncio.to_thread(sandboxes.service, sandboxes.service.machines.end(sandboxes.first_machine()))
        async with asyncio.timeout(30):
            await running

    with pytest.raises(
        SessionEnded,
        match=r"its processes were killed \(.*(not found|ended before|terminated|closed|Invalid response status)",
    ):
        sandboxes(dies())
    wait_until(lambda: not of_sessions("4401.6"))


@pytest.mark.slow
def test_a_connection_that_is_cut_in_the_middle_of_an_answer_is_resumed_or_told(sandboxes: Hosted) -> None:
    session = sandboxes.start()
    sandboxes(session.run("seq 200000 > numbers"))
    sandboxes.service.cut_after = 400_000
    if sandboxes.kind != "e2b":  # the client, or the driver, goes on at the byte where it was
        expected = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
        assert sandboxes(session.read("numbers", 2 << 20)) == expected[: 2 << 20]
        assert sandboxes.service.cut_after is None
        sandboxes(session.stop())
        return
    with pytest.raises(SessionEnded, match=r"its processes were killed \(.*"):
        sandboxes(session.read("numbers", 2 << 20))
    sandboxes.service.cut_after = None


async def set_slow(sandboxes: Hosted, makes: bool) -> None:
    """Whether the service makes machines, or lets the callers wait."""
    (sandboxes.service.slow.set if makes else sandboxes.service.slow.clear)()


def test_a_service_that_does_not_answer_is_told_by_name_and_its_late_machine_is_ended(
    sandboxes: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "CALL_S", 0.3)
    sandboxes.service(set_slow(sandboxes, False))
    before = next(sandboxes.service.machines._numbers)
    with pytest.raises(EpisodeError, match=r"has not answered within 0.3 s") as error:
        sandboxes.start()
    assert error.value.reason == "session_start"
    sandboxes.service(set_slow(sandboxes, True))

    async def body() -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*sandboxes.driver._tasks._tasks)  # type: ignore[attr-defined]

    sandboxes(body())
    assert next(sandboxes.service.machines._numbers) == before + 2  # one was made


@pytest.mark.slow
@pytest.mark.parametrize("at", ["create", "launcher"])
def test_a_start_that_is_cut_off_leaves_no_machine(sandboxes: Hosted, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if at == "launcher":  # a machine whose server never greets
        monkeypatch.setattr(hosted, "_LAUNCHER", "sleep 4401.7")

    async def body() -> None:
        await asyncio.to_thread(sandboxes.service, set_slow(sandboxes, at == "launcher"))
        before = len(sandboxes.service.calls)
        start = asyncio.ensure_future(sandboxes.driver.start(SandboxSpec()))
        async with asyncio.timeout(30):
            await asyncio.to_thread(
                wait_until,
                lambda: bool(of_sessions("4401.7")) if at == "launcher" else len(sandboxes.service.calls) > before,
            )
            start.cancel()
            await asyncio.wait([start])
            assert start.cancelled()
            await asyncio.to_thread(sandboxes.service, set_slow(sandboxes, True))
            left = sandboxes.driver._tasks._tasks  # type: ignore[attr-defined]
            await asyncio.gather(*left, return_exceptions=True)  # the machine is made after all, and ended

    sandboxes(body())
    assert not sandboxes.driver._sessions  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_killed_workers_leave_is_removed_by_the_next_driver(sandboxes: Hosted) -> None:
    mine = sandboxes.start()
    command = [sys.executable, "-c", CLIENT, sandboxes.kind, json.dumps(OPTIONS), "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        sandboxes(sandboxes.driver.sweep())  # type: ignore[attr-defined]
        assert len(sandboxes.machines) == 3  # its owner lives
        worker.kill()
    assert len(of_sessions("4401.5")) >= 2
    sandboxes(sandboxes.driver.sweep())  # type: ignore[attr-defined]
    wait_until(lambda: not of_sessions("4401.5"))
    assert len(sandboxes.machines) == 1
    if sandboxes.kind == "modal":  # which cannot list them: they have a time of their own
        (kept,) = [request for name, request in sandboxes.service.calls if name == "TaskSnapshotFilesystem"][-1:]
        assert kept.ttl_seconds == 86400
        for image in sandboxes.snapshots:
            sandboxes.service(sandboxes.service.machines.remove(image))
    assert sandboxes(mine.run("echo fine")).stdout == "fine\n"
    sandboxes(mine.stop())


@pytest.mark.slow
def test_what_killed_workers_leave_ends_at_its_time(sandboxes: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    if sandboxes.kind == "daytona":
        monkeypatch.setattr(sandboxes.service, "minute_s", 8.0)  # the service counts in minutes
    command = [sys.executable, "-c", CLIENT, sandboxes.kind, json.dumps(OPTIONS), "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        worker.kill()
    wait_until(lambda: not of_sessions("4401.5"))
    wait_until(lambda: not sandboxes.machines)
    for image in sandboxes.snapshots:
        sandboxes.service(sandboxes.service.machines.remove(image))


@pytest.mark.slow
@pytest.mark.parametrize(("program", "guard"), [("unshare", "first process"), ("setpriv", "rights")])
def test_an_image_that_cannot_hold_a_guard_is_served_and_says_so(sandboxes: Hosted, program: str, guard: str) -> None:
    session = sandboxes.start()
    greeting = "echo welcome; echo to this image\n"  # shells of a login say it before the launcher does
    sandboxes(session.write({"/etc/profile": greeting}))
    sandboxes(session.write({"/usr/bin/refusing": REFUSING.format(program)}))
    sandboxes(session.run(f"cd /usr/bin && mv {program} .{program} && mv refusing {program}"))
    snapshot = sandboxes(session.snapshot())
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    assert sorted(fork.missing) == sorted(["disk", guard])
    data = bytes(range(256)) * 2000
    sandboxes(fork.write({"data": data}))
    sandboxes(fork.run("(setsid sleep 1000 &); sleep 1000 &"))
    assert sandboxes(fork.count_background()) == 2
    assert sandboxes(fork.read("data")) == data
    assert sandboxes(fork.end_background()) == 2
    if guard == "first process":
        with pytest.raises(SessionEnded):
            sandboxes(fork.run("kill -9 -1", limits=replace(LIMITS, wall_s=1.0)))
    else:
        assert sandboxes(fork.run("echo fine")).stdout == "fine\n"
    for each in (session, fork):
        sandboxes(each.stop())
    sandboxes(sandboxes.driver.release(snapshot))


@pytest.mark.slow
@pytest.mark.parametrize(
    "forged", ["echo forged > /proc/1/fd/1", "echo > /proc/1/fd/1", "head -c 5000000 /dev/zero > /proc/1/fd/1"]
)
def test_an_answer_that_the_server_did_not_give_ends_the_session(sandboxes: Hosted, forged: str) -> None:
    session = sandboxes.start()
    with pytest.raises(SessionEnded, match="something else than it was asked"):
        sandboxes(session.run(forged))


@pytest.mark.slow
def test_output_that_nobody_reads_does_not_hold_up_the_end_of_a_driver(
    sandboxes: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandboxes.kind == "modal":
        pytest.skip("the client of this service is asked for each piece")
    monkeypatch.setattr(f"headrace.wings.sandboxes.served.{sandboxes.kind}.PIECES", 1)

    async def body() -> None:
        driver = await open_sandboxes(sandboxes.kind, (), OPTIONS)
        session = await driver.start(SandboxSpec())
        await session.run("(setsid sleep 4401.8 &); (sleep 0.3; echo unasked > /proc/1/fd/1) &")
        channel: Any = session._channel  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            await asyncio.to_thread(wait_until, channel._pieces.full)
            await asyncio.to_thread(sandboxes.service, sandboxes.service.machines.end(sandboxes.first_machine()))
            if sandboxes.kind == "e2b":
                await asyncio.to_thread(wait_until, channel._handle._wait.done)
                await asyncio.to_thread(wait_until, lambda: bool(channel._ended))
            await driver.close()

    sandboxes(body())


@pytest.mark.slow
def test_a_service_that_goes_away_ends_sessions_by_name(sandboxes: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "GRACE_S", 1.0)
    monkeypatch.setattr(hosted, "END_S", 1.0)
    with memory_folder() as folder, hosted_service(sandboxes.kind, folder) as service:

        async def body() -> None:
            driver = await open_sandboxes(sandboxes.kind, (), OPTIONS)
            session = await driver.start(SandboxSpec())
            await asyncio.to_thread(service.stop)
            with pytest.raises(SessionEnded, match=r"its processes were killed|did not answer"):
                await session.run("echo x", limits=replace(LIMITS, wall_s=1.0))
            monkeypatch.setattr(hosted, "CALL_S", 2.0)
            monkeypatch.setattr(hosted, "LATE_S", 4.0)
            with pytest.raises(EpisodeError, match=r"cannot start|has not answered within 2 s"):
                await driver.start(SandboxSpec())
            await driver.close()

        asyncio.run(body())


@pytest.mark.slow
def test_memory_in_a_snapshot_is_ended_where_the_service_cannot_keep_files_alone(sandboxes: Hosted) -> None:
    if sandboxes.kind != "e2b":
        pytest.skip("the other services keep files alone")
    sandboxes.service.refuse["snapshot of files"] = (400, "snapshot_filesystem_only_disabled")
    session = sandboxes.start()
    snapshot = sandboxes(session.snapshot())
    assert [name for name, _ in sandboxes.service.calls[-2:]] == ["snapshot of files", "snapshot"]
    fork = sandboxes(sandboxes.driver.fork(snapshot))
    wait_until(lambda: not of_sessions("4400.5"))
    assert sandboxes(fork.run("echo fine")).stdout == "fine\n"
    assert sandboxes(session.run("echo fine")).stdout == "fine\n"
    again = sandboxes(fork.snapshot())
    assert [name for name, _ in sandboxes.service.calls[-1:]] == ["snapshot"]  # it is not asked again
    for each in (session, fork):
        sandboxes(each.stop())
    for kept in (snapshot, again):
        sandboxes(sandboxes.driver.release(kept))


@pytest.mark.slow
def test_rights_and_network_are_given_if_they_are_asked_for(sandboxes: Hosted) -> None:
    async def body() -> str:
        options = {**OPTIONS, "rights": True, "network": True}
        async with await open_sandboxes(sandboxes.kind, (), options) as driver:
            session = await driver.start(SandboxSpec())
            return (await session.run("grep CapEff /proc/self/status")).stdout

    assert int(sandboxes(body()).split()[1], 16)
    assert asked(sandboxes)["network"]


def test_a_wrong_key_is_told_by_name(sandboxes: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS[sandboxes.kind][-1], "e2b_wrong")
    words = r"cannot be used: .*(Unauthorized|wrong)"
    with new_modal_client(sandboxes.kind), pytest.raises(EnvError, match=words) as error:
        asyncio.run(open_sandboxes(sandboxes.kind, (), OPTIONS))
    assert KEYS[sandboxes.kind][0] in str(error.value)


@pytest.mark.parametrize("listens", [False, True])
def test_a_service_that_is_not_reached_is_told_by_name(
    sandboxes: Hosted, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "CALL_S", 1.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()  # and never answers
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setenv(URLS[sandboxes.kind], url)
        with new_modal_client(sandboxes.kind), pytest.raises(EnvError, match=r"cannot be used|does not answer within"):
            asyncio.run(open_sandboxes(sandboxes.kind, (), OPTIONS))


class new_modal_client:
    """Modal's client is one of the process: in the body, and after it, it is made anew."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __enter__(self) -> None:
        if self.kind == "modal":
            import modal.client

            modal.client._Client._set_env_client(None)

    def __exit__(self, *_: object) -> None:
        self.__enter__()


@pytest.mark.parametrize("kind", HOSTED)
@pytest.mark.parametrize(
    ("options", "readable", "words"),
    [
        ({"imagge": "x"}, (), "the setting 'imagge'"),
        ({"network": "maybe"}, (), "the setting 'network'"),
        ({}, ("/data",), "cannot be shown to sandboxes of kind"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(
    kind: str, options: dict[str, Any], readable: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(open_sandboxes(kind, readable, options))


@pytest.mark.parametrize("kind", HOSTED)
def test_a_client_that_is_not_installed_is_told_with_the_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(EnvError, match=rf"need the package '{kind}'") as error:
        asyncio.run(open_sandboxes(kind, (), OPTIONS))
    assert f"pip install 'headrace[{kind}]'" in str(error.value)


def test_a_session_without_an_image_is_refused(sandboxes: Hosted) -> None:
    async def body() -> None:
        async with await open_sandboxes(sandboxes.kind) as driver:
            with pytest.raises(ConfigError, match="has no image"):
                await driver.start(SandboxSpec())

    sandboxes(body())
