"""What is special about Daytona: logs that are cut, padded and held back, and what it makes without a word."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.wings.sandboxes import LIMITS, SandboxSession, SandboxSpec, SessionEnded, open_sandboxes
from headrace.wings.sandboxes.served import daytona, hosted, owners
from tests.wings.sandboxes.conftest import hosted_service, memory_folder
from tests.wings.sandboxes.test_ends import of_sessions, wait_until

OPTIONS = {"image": "tree:base"}
LINES = ["hello\n", "headrace-launcher\n", "\n", "Z3JlZXRpbmc=\n\n", "AAEC", "/w==\n\n"]
"""A log: what a profile says, the launcher's line, and two lines of base64."""
TOLD = [b"hello\n", b"headrace-launcher\n", b"greeting", b"\0\1\2\xff"]
"""What the lines stand for. The third line of the log is an empty one, and tells nothing."""


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    with memory_folder() as folder, hosted_service("daytona", folder) as service:
        yield service


@pytest.fixture
def service(made: Any) -> Iterator[Any]:
    """The stand-in, which afterwards has nothing, and is as it was."""
    yield made
    made.refuse.clear()
    made.piece_bytes, made.padded, made.forgetful, made.cut_after = 1024, False, False, None
    assert (made.sandboxes, list(made.machines.images)) == ({}, ["tree:base"])


class Process:
    """The processes of a sandbox: each connection to the log brings some text, and then an error, or the end."""

    def __init__(self, connections: Sequence[tuple[str, Exception | None]]) -> None:
        self.connections = iter(connections)
        self.sent: list[str] = []

    async def get_session_command_logs_async(
        self, session: str, command: str, on_out: Callable[[str], Awaitable[None]], on_err: Callable[[str], None]
    ) -> None:
        text, error = next(self.connections)
        for start in range(0, len(text), 3):
            await on_out(text[start : start + 3])
            on_err("ignored")
        if error is not None:
            raise error

    async def send_session_command_input(self, session: str, command: str, data: str) -> None:
        self.sent.append(data)
        if len(self.sent) > 3:
            raise RuntimeError("the sandbox has gone")


class Sandbox:
    """A sandbox of the client."""

    def __init__(self, connections: Sequence[tuple[str, Exception | None]] = ()) -> None:
        self.process = Process(connections)

    async def delete(self, *, timeout: float) -> None:
        pass


def followed(connections: Sequence[tuple[str, Exception | None]]) -> tuple[bytes, str]:
    """What a channel reads to the end of a log, and its last words."""

    async def body() -> tuple[bytes, str]:
        channel = daytona.DaytonaChannel(None, Sandbox(connections), "name")  # type: ignore[arg-type]
        await channel._read_log()
        pieces = []
        while piece := await channel.piece():
            pieces.append(piece)
        return b"".join(pieces), await channel.exit_reason()

    return asyncio.run(body())


def test_a_log_is_lines_up_to_the_launchers_and_then_lines_of_base64() -> None:
    assert followed([("".join(LINES), None)]) == (b"".join(TOLD), "")


@pytest.mark.parametrize("at", range(1, len("".join(LINES)), 3))
def test_a_log_whose_connection_is_cut_is_read_again_from_where_it_was(at: int) -> None:
    text = "".join(LINES)
    cut = text[:at] + "\1\1"  # part of a mark
    assert followed([(cut, OSError("cut")), (text[: max(1, at // 2)], OSError("cut")), (text, None)])[0] == b"".join(
        TOLD
    )


def test_what_older_services_fill_messages_with_is_no_part_of_a_log() -> None:
    text = "".join(line + "\0" * 5 for line in LINES)
    assert followed([(text[:30], OSError("cut")), (text, None)])[0] == b"".join(TOLD)


def test_a_log_that_cannot_be_opened_again_has_ended_with_the_words_of_the_service() -> None:
    text, words = followed([("".join(LINES), OSError("cut")), ("", RuntimeError("sandbox not found"))])
    assert (text, words) == (b"".join(TOLD), "RuntimeError: sandbox not found")


def test_a_log_whose_connections_are_all_cut_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daytona, "CONNECTIONS", 3)
    assert followed([("".join(LINES), OSError("cut"))] * 3) == (b"".join(TOLD), "OSError: cut")


@pytest.mark.parametrize("full", [False, True])
def test_the_end_of_a_channel_is_read_whether_somebody_waits_or_nobody_has_read(full: bool) -> None:
    async def body() -> None:
        channel = daytona.DaytonaChannel(None, Sandbox(), "name")  # type: ignore[arg-type]
        while full and not channel._pieces.full():
            channel._pieces.put_nowait(b"unread")
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            if not full:
                waiting = group.create_task(channel.piece())
                await asyncio.sleep(0)
            await channel.close()
            assert (await channel.piece() if full else await waiting) == b""

    asyncio.run(body())


def test_a_line_without_end_is_passed_on_in_parts() -> None:
    output = hosted.EncodedOutput()
    output.take("headrace-launcher\n")
    assert b"".join(output.take("=" * 5_000_000)).startswith(b"====")
    assert len(output._text) == 0


def test_input_is_sent_in_parts_and_a_sandbox_that_has_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daytona, "SENT_BYTES", 4)
    sandbox = Sandbox()
    channel = daytona.DaytonaChannel(None, sandbox, "name")  # type: ignore[arg-type]
    asyncio.run(channel.send(b"\0\1\2\3\xff"))
    assert sandbox.process.sent == ["9\nAAECAw==\n", "5\n/w==\n"]
    with pytest.raises(OSError, match="the sandbox has gone"):
        asyncio.run(channel.send(b"123456789"))
    assert asyncio.run(channel.exit_reason()) == "RuntimeError: the sandbox has gone"


@pytest.mark.parametrize("unshare", [True, False])
def test_a_launcher_turns_lines_into_the_bytes_of_its_program_and_back(unshare: bool, tmp_path: Path) -> None:
    words = hosted.make_launcher_arguments(SandboxSpec(), encoded=True, lined=True, rights=True)
    words[words.index("launcher") + 1] = "head -c 100003"  # in place of the server
    refusing = tmp_path / "unshare"
    if not unshare:
        refusing.write_text("#!/bin/sh\nexit 1\n")
        refusing.chmod(0o755)
    data = bytes(range(256)) * 391
    sent = "".join(hosted.encode_input(data[start : start + 40_000]) for start in range(0, len(data), 40_000))
    done = subprocess.run(
        ["bash", *words], input=sent, capture_output=True, text=True, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60,
    )  # fmt: skip
    assert "\n\n" in done.stdout  # an empty line behind each one
    first, *pieces = hosted.EncodedOutput().take(done.stdout)
    assert first.startswith(b"headrace-launcher")
    assert b"".join(pieces) == data[:100_003]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"cpus": 0}, "the setting 'cpus'"), ({"idle_s": 5}, "the setting 'idle_s'"), ({"disk_gib": 0}, "'disk_gib'")],
)
def test_a_setting_that_daytona_cannot_keep_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(open_sandboxes("daytona", (), options))


def test_a_missing_key_is_told_by_name(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(EnvError, match="credentials not found") as error:
        asyncio.run(open_sandboxes("daytona", (), OPTIONS))
    assert "set DAYTONA_API_KEY" in str(error.value)


def test_what_is_asked_for_is_what_the_settings_say(service: Any) -> None:
    async def body() -> None:
        more = {"target": "us", "cpus": 2, "disk_gib": 5, "idle_s": 61, "user": "agent"}
        async with await open_sandboxes("daytona", (), {**OPTIONS, **more}) as driver:
            session = await driver.start(SandboxSpec())
            snapshot = await session.snapshot()
            fork = await driver.fork(snapshot)
            named = await driver.start(SandboxSpec(image=f"snapshot:{snapshot.files.name}"))  # type: ignore[attr-defined]
            for each in (session, fork, named):
                await each.stop()

    asyncio.run(body())
    first, fork, named = [body for name, body in service.calls if name == "create"][-3:]
    assert (first["target"], first["cpu"], first["disk"], first["memory"], first["user"]) == ("us", 2, 5, 1, "agent")
    assert (first["autoStopInterval"], first["ttlMinutes"]) == (2, 60)
    assert fork["snapshot"] == named["snapshot"]
    assert fork["snapshot"].startswith(daytona.PREFIX)
    assert "cpu" not in fork  # which is that of the snapshot
    assert all(body["suppressInputEcho"] for name, body in service.calls if name == "execute")


def test_a_sandbox_whose_image_cannot_be_built_is_ended(service: Any) -> None:
    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver:
            with pytest.raises(EpisodeError, match="manifest for nothing:here not found"):
                await driver.start(SandboxSpec(image="nothing:here"))
            assert not service.sandboxes
            with pytest.raises(EpisodeError, match="Snapshot nothing not found"):
                await driver.start(SandboxSpec(image="snapshot:nothing"))

    asyncio.run(body())


def test_a_key_without_the_right_to_make_sandboxes_refuses_the_run(service: Any) -> None:
    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver:
            service.refuse["create"] = (403, "Forbidden resource")
            with pytest.raises(EnvError, match="Forbidden resource") as error:
                await driver.start(SandboxSpec())
            assert "may write and delete sandboxes" in str(error.value)

    asyncio.run(body())


@pytest.mark.parametrize(("piece_bytes", "padded"), [(1, False), (3, False), (1024, True)])
def test_no_answer_waits_for_bytes_that_the_client_holds_back(service: Any, piece_bytes: int, padded: bool) -> None:
    service.piece_bytes, service.padded = piece_bytes, padded

    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver, asyncio.timeout(60):
            session = await driver.start(SandboxSpec())
            for size in range(1, 5):
                assert (await session.run(f"head -c {size} /dev/zero")).stdout == "\0" * size

    asyncio.run(body())


def test_a_cut_connection_costs_a_session_nothing(service: Any) -> None:
    service.piece_bytes = 7

    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver, asyncio.timeout(60):
            session = await driver.start(SandboxSpec())
            for number in range(20):
                service.cut_after = 100 + 31 * number
                assert (await session.run(f"echo {number}")).stdout == f"{number}\n"

    asyncio.run(body())


def test_a_snapshot_that_fails_without_a_word_is_told_and_one_that_comes_late_is_removed(service: Any) -> None:
    service.forgetful = True

    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver:
            session = await driver.start(SandboxSpec())
            with pytest.raises(EpisodeError, match=r"cannot be kept: .*not found") as error:
                await session.snapshot()
            assert error.value.reason == "session_snapshot"
            assert (await session.run("echo fine")).stdout == "fine\n"
            (name,) = [body["name"] for kind, body in service.calls if kind == "snapshot"][-1:]
            await asyncio.to_thread(keep_late, service, name)

    asyncio.run(body())


def keep_late(service: Any, name: str) -> None:
    """Have the service make a snapshot of its only machine after all."""
    image = service(service.machines.keep(next(iter(service.machines.alive)), name))
    service.ids[image] = "00000000-0000-4000-8000-000000000000"


def test_snapshots_of_dead_owners_are_found_on_every_page(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daytona, "PAGE", 1)
    parts = owners.make_owner_name().split("-")
    dead = "-".join([*parts[:3], "999999999", "1"])

    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver:
            session = await driver.start(SandboxSpec())
            own = await session.snapshot()
            for number, name in enumerate(("mine", f"{daytona.PREFIX}{dead}-1", f"{daytona.PREFIX}{dead}-2")):
                await asyncio.to_thread(keep_late, service, name)
                service.ids[list(service.ids)[-1]] = f"00000000-0000-4000-8000-00000000000{number}"
            await driver.sweep()  # type: ignore[attr-defined]
            left = [name for names in service.machines.images.values() for name in names]
            assert left == [own.files.name, "mine"]  # type: ignore[attr-defined]
            await driver.remove("mine")  # type: ignore[attr-defined]
            await session.stop()

    asyncio.run(body())


def test_a_server_that_ends_before_it_has_greeted_is_told_at_once(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "_LAUNCHER", "sleep 1000 > /dev/null &")  # what it leaves holds its errors

    async def body() -> None:
        async with await open_sandboxes("daytona", (), OPTIONS) as driver, asyncio.timeout(60):
            with pytest.raises(EpisodeError, match="a session cannot start"):
                await driver.start(SandboxSpec())

    asyncio.run(body())


def test_a_driver_that_is_closed_ends_its_commands_at_once(service: Any) -> None:
    async def body() -> None:
        driver = await open_sandboxes("daytona", (), OPTIONS)
        session = await driver.start(SandboxSpec())
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            running = group.create_task(refused(session))
            await asyncio.to_thread(wait_until, lambda: bool(of_sessions("4402.1")))
            await driver.close()
        assert running.result() == "its driver was closed"

    asyncio.run(body())


async def refused(session: SandboxSession) -> str:
    """Why a command that does not end by itself was ended."""
    with pytest.raises(SessionEnded):
        await session.run("sleep 4402.1", limits=replace(LIMITS, wall_s=600.0))
    return session.ended
