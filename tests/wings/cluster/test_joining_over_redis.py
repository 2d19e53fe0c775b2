"""Machines that join over a real Redis server: what it costs where that goes away, and what others can do who write
there."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import ConfigError, DeadlineError, HeadraceError
from headrace.run.session import load_config
from headrace.wings.cluster.joining import door, streams
from headrace.wings.cluster.joining.invitation import Invitation, read_invitation, write_invitation
from headrace.wings.cluster.joining.node import Offer, RunUnreachable, join
from tests.redis_server import RedisServer, redis_server
from tests.rollout.environments.crews import Crew, crew
from tests.rollout.environments.tasks import make_env_run
from tests.wings.cluster.test_joining import KEEP, PLACES, SINGLE, elsewhere, joined, said, until

PASSWORD = "relay-1f0c2d8f5a"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server(appendonly="no") as server:
        yield server


@asynccontextmanager
async def visiting(at: Crew, *more: str) -> AsyncIterator[subprocess.Popen[str]]:
    """A machine with one worker, which leaves when the body is over, if it has not before."""
    async with joined(at.invitation, *more) as program:
        await until(lambda: len(elsewhere(at)) == 1)
        yield program
        program.terminate()
        await said(program)


async def goes_on(at: Crew) -> bool:
    return set(map(type, await at.run("pid", "pid"))) == {float} and not at.keeping.done()


def test_a_machine_comes_and_goes_over_the_server_and_no_key_stays(tmp_path: Path, redis: RedisServer) -> None:
    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, join=redis.url, num_workers=0) as at:
            async with joined(at.invitation, "--workers", "2") as program:
                await until(lambda: len(elsewhere(at)) == 2)
                assert len(set(await at.run(*["wait 0.2"] * 9))) == 2
                running = asyncio.ensure_future(at.run(*["wait 1"] * 6))
                await asyncio.sleep(0.5)
                assert all(0 < redis.client().ttl(key) <= streams.KEPT_S for key in redis.client().scan_iter())
                program.send_signal(signal.SIGINT)
                assert len(set(await running)) == 2, "what runs there ends there"
                assert "left: what ran here has ended" in await said(program)
                assert program.returncode == 0
            assert [text.partition(", ")[0] for text in at.events] == ["127.0.0.1 has joined", "127.0.0.1 has left"]
            staying = asyncio.ensure_future(_stays(at))
            await until(lambda: len(elsewhere(at)) == 1)
            assert await goes_on(at)
        assert await staying == "the run has ended"
        assert not redis.client().keys()

    async def _stays(at: Crew) -> str:
        async with joined(at.invitation) as program:
            return (await said(program)).splitlines()[-1]

    asyncio.run(main())


def test_a_server_that_is_killed_costs_the_machines_and_no_episode_and_they_join_again_when_it_is_back(
    tmp_path: Path, redis: RedisServer
) -> None:
    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, join=redis.url) as at:
            async with visiting(at) as program:
                running = asyncio.ensure_future(at.run(*["wait 0.5"] * 40))
                await asyncio.sleep(0.3)
                redis.kill()
                done = await running
                assert set(map(type, done)) == {float}
                assert len(set(done)) == 1, "each of them ended here"
                assert "the connection to the run is broken" in await said(program)
            assert at.events[-1] == "127.0.0.1 was lost: what ran there begins again elsewhere"
            assert any("who has is lost, until it is back" in text for text in at.events)
            async with joined(at.invitation, "--wait", "60") as program:
                await asyncio.sleep(1)
                redis.start(appendonly="no")  # it has forgotten all
                await until(lambda: len(elsewhere(at)) == 1)
                assert len(set(await at.run(*["wait 0.2"] * 4))) == 2
                program.terminate()
                await said(program)
            assert any(text.endswith("r.sock is back") for text in at.events)

    asyncio.run(main())


def test_a_server_that_is_full_costs_the_machines_alone_and_says_so(tmp_path: Path, redis: RedisServer) -> None:
    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, join=redis.url) as at:
            async with visiting(at) as program:
                redis.client().config_set("maxmemory", "1mb")
                words = await said(program)
                assert "command not allowed when used memory > 'maxmemory'" in words
                await until(lambda: at.events[-1] == "127.0.0.1 was lost: what ran there begins again elsewhere")
                redis.client().config_set("maxmemory", "0")
            async with visiting(at):
                assert await goes_on(at)

    asyncio.run(main())


def test_a_machine_that_is_killed_is_silent_and_lost(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "QUIET_LOOKS", 2)

    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, join=redis.url) as at:
            async with visiting(at) as program:
                running = asyncio.ensure_future(at.run(*["wait 0.5"] * 4))
                await asyncio.sleep(0.2)
                program.kill()
                assert set(map(type, await running)) == {float}
            assert at.events[-1] == "127.0.0.1 was lost: what ran there begins again elsewhere"

    asyncio.run(main())


def test_a_machine_is_lost_where_others_write_into_its_streams_and_the_run_goes_on(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "QUIET_LOOKS", 3)

    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, join=redis.url) as at:
            async with visiting(at) as program:
                for key in redis.client().scan_iter("*:down"):
                    redis.client().xadd(key, {"data": os.urandom(100)})
                assert "the connection to the run is broken" in await said(program)
                await until(lambda: at.events[-1] == "127.0.0.1 was lost: what ran there begins again elsewhere")
            assert await goes_on(at)

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_stands_still_costs_the_machines_and_they_join_again(tmp_path: Path, redis: RedisServer) -> None:
    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, join=redis.url) as at:
            async with visiting(at) as program:
                assert redis.process is not None
                redis.process.send_signal(signal.SIGSTOP)
                assert "the connection to the run is broken" in await said(program)
                await until(lambda: at.events[-1] == "127.0.0.1 was lost: what ran there begins again elsewhere")
                redis.process.send_signal(signal.SIGCONT)
                await until(lambda: at.events[-1].endswith("r.sock is back"))
            async with visiting(at):
                assert await goes_on(at)

    asyncio.run(main())


# -- who may ---------------------------------------------------------------------------------------------------------


def test_a_password_stands_in_a_variable_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(server: RedisServer) -> None:
        terms = {"join": server.url, "join_password_env": "RELAY_PASSWORD"}
        with pytest.raises(ConfigError, match=r"launch\.join_password_env='RELAY_PASSWORD', and that env"):
            async with crew(tmp_path, PLACES, "rollout", **terms):
                pass
        monkeypatch.setenv("RELAY_PASSWORD", "wrong")
        with pytest.raises(ConfigError, match=r"refuses: .*invalid username-password"):
            async with crew(tmp_path, PLACES, "rollout", **terms):
                pass
        monkeypatch.setenv("RELAY_PASSWORD", PASSWORD)
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, **terms) as at:
            async with joined(at.invitation) as program:
                await until(lambda: len(elsewhere(at)) == 1)
                program.terminate()
                words = await said(program)
            monkeypatch.setenv("ANOTHER", PASSWORD)
            monkeypatch.delenv("RELAY_PASSWORD")
            async with joined(at.invitation) as program:
                assert "is to be in RELAY_PASSWORD, and that environment variable is not set" in await said(program)
            async with visiting(at, "--password-env", "ANOTHER"):
                pass
            held = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
            assert PASSWORD.encode() not in b"".join([*held, words.encode(), *map(str.encode, at.events)])

    with redis_server(appendonly="no", requirepass=PASSWORD) as server:
        asyncio.run(main(server))


def test_a_user_of_the_server_needs_no_more_than_the_page_says(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "joining.md").read_text()
    found = re.search(r"`(~headrace:join:[^`]+)`", page)
    assert found is not None
    redis.client().execute_command("ACL", "SETUSER", "me", "on", f">{PASSWORD}", *found[1].split())
    monkeypatch.setenv("RELAY_PASSWORD", PASSWORD)

    async def main() -> None:
        url = redis.url.replace("unix://", "unix://me@")
        terms = {"join": url, "join_password_env": "RELAY_PASSWORD", "num_workers": 0}
        async with crew(tmp_path, PLACES, "rollout", keep=KEEP, **terms) as at, visiting(at):
            assert await goes_on(at)
        assert redis.client().execute_command("ACL", "LOG") == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["launch.join=redis://:hush@10.0.0.9"], "launch.join holds a password"),
        (["launch.join=redis://"], "launch.join='redis://' is no Redis server"),
        (["launch.join=unix://"], "launch.join='unix://' is no Redis server"),
        (["launch.join=http://10.0.0.9"], "launch.join='http://10.0.0.9' is no Redis server"),
        (["launch.join_password_env=P"], "launch.join_password_env='P' is set, and launch.join='' needs none"),
        (["launch.join=10.0.0.5:7781", "launch.join_password_env=P"], "launch.join='10.0.0.5:7781' needs none"),
        (["launch.join=redis://10.0.0.9", "launch.kind=ray"], "the cluster is what machines join"),
        (["launch.join=redis://10.0.0.9", *SINGLE], "runs in no worker that another machine could bring"),
    ],
)
def test_settings_by_which_nobody_could_join_are_refused(tmp_path: Path, settings: list[str], problem: str) -> None:
    run_file = make_env_run(tmp_path, tmp_path, PLACES, "rollout")
    with pytest.raises(ConfigError) as raised:
        load_config(run_file, settings)
    assert problem in raised.value.problem


def test_a_server_that_is_not_there_is_named_with_how_long_it_was_waited_for(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "REACHED_S", 0.2)
    redis.kill()

    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", join=redis.url):
            pass

    with pytest.raises(DeadlineError, match=r"the Redis server at unix://\S+ does not answer for 0.2 s: .*111"):
        asyncio.run(main())
    assert not (tmp_path / "join.json").exists()
    given = Invitation(address=redis.url, key="k" * 40, token="t", relay="r")
    write_invitation(tmp_path / "join.json", given)
    assert read_invitation(tmp_path) == given
    with pytest.raises(RunUnreachable, match=r"does not answer for 0.2 s"):
        join(tmp_path, Offer(workers=1), print)


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"relay": "another"}, "nobody answers at unix://"), ({"key": "k"}, "the key in the invitation is none")],
)
def test_an_invitation_of_another_run_leads_to_nobody(
    tmp_path: Path, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], problem: str
) -> None:
    monkeypatch.setattr("headrace.wings.cluster.joining.node.ANSWER_S", 0.5)

    async def main() -> None:
        async with crew(tmp_path, PLACES, "rollout", join=redis.url) as at:
            changed = msgspec.structs.replace(read_invitation(at.invitation), **change)
            (tmp_path / "other").mkdir()
            write_invitation(tmp_path / "other" / "join.json", changed)
            with pytest.raises(HeadraceError, match=problem):
                await asyncio.to_thread(join, tmp_path / "other", Offer(workers=1), print)
            assert await goes_on(at)

    asyncio.run(main())
