"""Machines that join a run, in real processes: what they bring, how they go, and who is not let in."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from headrace import __version__
from headrace.base.errors import ConfigError, DataError, HeadraceError
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.node import Farewell, JoinAnswer, JoinRefused, JoinRequest
from headrace.launch.channel import present_key
from headrace.launch.starts import ResourceLimits
from headrace.run.session import load_config
from headrace.wings.cluster.far.supervisor import get_socket_family
from headrace.wings.cluster.joining import node
from headrace.wings.cluster.joining.invitation import Invitation, read_invitation, write_invitation
from headrace.wings.cluster.joining.machine import JoinedStarter
from headrace.wings.cluster.joining.node import Offer, RunUnreachable, join
from tests.rollout.environments.pools import RunningPool, running_pool
from tests.rollout.environments.tasks import make_env_run
from tests.run.session.runs import command

PLACES = """
    import asyncio, os
    import headrace

    ME = float(int.from_bytes(os.urandom(4), "little"))  # process ids are those of a world of its own

    async def rollout(task, policy):
        deed, _, detail = task["deed"].partition(" ")
        await policy.chat("hello")
        if deed == "wait":
            await asyncio.sleep(float(detail))
        if deed == "exit":
            os._exit(7)
        return ME
"""
KEEP = ResourceLimits(memory_bytes=0, processes=40)
SINGLE = ("env.kind=single_turn", "env.entry=", "env.reward=reward.py:reward")


def free_address(host: str = "127.0.0.1") -> str:
    with socket.socket(get_socket_family(host)) as one:
        one.bind((host, 0))
        port = one.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@asynccontextmanager
async def joined(invitation: Path, *more: str) -> AsyncIterator[subprocess.Popen[str]]:
    """The program ``headrace join`` at work; it does not outlive the body."""
    begun = command("join", invitation, *more)
    program = await asyncio.to_thread(
        subprocess.Popen, begun, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with program:
        try:
            yield program
        finally:
            program.kill()


async def said(program: subprocess.Popen[str]) -> str:
    """All that it says, to its end."""
    return (await asyncio.to_thread(program.communicate, timeout=30))[0]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)


def elsewhere(at: RunningPool) -> list[int]:
    """Workers on other machines that episodes may begin in, by process id."""
    workers = [slot.worker.process for slot in at.pool._slots if slot.up and slot.worker is not None]
    return [child.pid for child in at.children if child.node and child in workers]


def test_episodes_run_on_a_machine_that_joins_and_here_again_when_it_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", keep=KEEP, join=free_address()) as at:
            assert len(set(await at.run(*["pid"] * 8))) == 1
            async with joined(at.invitation, "--workers", "2") as program:
                await until(lambda: len(elsewhere(at)) == 2)
                assert len(set(await at.run(*["wait 0.2"] * 9))) == 3
                running = asyncio.ensure_future(at.run(*["wait 1"] * 6))
                await asyncio.sleep(0.5)
                program.send_signal(signal.SIGINT)
                assert len(set(await running)) == 3, "what runs there ends there"
                words = await said(program)
                assert "left: what ran here has ended" in words
                assert (program.returncode, elsewhere(at)) == (0, [])
            assert len(set(await at.run(*["pid"] * 8))) == 1
            assert [text.partition(", ")[0] for text in at.events] == [
                "127.0.0.1 has joined", "127.0.0.1 has left",
            ]  # fmt: skip
            assert not at.warnings
        assert not at.invitation.exists()

    asyncio.run(main())


def test_machines_join_at_an_address_of_version_6_too(tmp_path: Path) -> None:
    try:
        address = free_address("::1")
    except OSError:
        pytest.skip("this machine has no such address")

    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", keep=KEEP, join=address) as at, joined(at.invitation):
            await until(lambda: len(elsewhere(at)) == 1)
            assert len(set(await at.run(*["wait 0.2"] * 4))) == 2

    asyncio.run(main())


def test_no_episode_is_lost_with_a_machine_and_none_of_them_is_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", keep=KEEP, join=free_address()) as at:
            async with joined(at.invitation) as program:
                await until(lambda: len(elsewhere(at)) == 1)
                (there,) = elsewhere(at)
                left = psutil.Process(there).children(recursive=True)
                running = asyncio.ensure_future(at.run(*["wait 0.5"] * 40))
                await asyncio.sleep(0.3)
                program.kill()
                done = await running
                assert set(map(type, done)) == {float}
                assert len(set(done)) == 1, "each of them ended here"
            assert at.events[-1] == "127.0.0.1 was lost: what ran there begins again elsewhere"
            assert len(at.children) == 2, "no worker was made for a suspect"
            assert not psutil.wait_procs(left, timeout=10)[1]

    asyncio.run(main())


def test_where_none_is_kept_here_episodes_wait_for_a_machine_and_a_worker_that_dies_is_replaced_there(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", keep=KEEP, join=free_address(), num_workers=0) as at:
            waiting = asyncio.ensure_future(at.run("pid", "exit", "pid"))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            async with joined(at.invitation) as program:
                first, failed, second = await waiting
                assert set(map(type, (first, second))) == {float}
                assert failed.startswith("env_crashed: the process that ran it died, alone too")
                assert "ended with exit code 7" in failed
                assert await at.run("pid") != [first]
                program.send_signal(signal.SIGTERM)
                await said(program)
            await until(lambda: bool(at.warnings))
            assert at.warnings[-1] == "no environment worker is left: episodes wait until a machine joins"
            later = asyncio.ensure_future(at.run("pid"))
            async with joined(at.invitation):
                assert set(map(type, await later)) == {float}

    asyncio.run(main())


def test_the_end_of_the_run_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", keep=KEEP, join=free_address()) as at:
            waiting = asyncio.ensure_future(_stays(at))
            await until(lambda: len(elsewhere(at)) == 1)
            left = psutil.Process(elsewhere(at)[0]).children(recursive=True)
        assert await waiting == ("the run has ended", 0)
        assert not psutil.wait_procs(left, timeout=10)[1]

    async def _stays(at: RunningPool) -> tuple[str, int]:
        async with joined(at.invitation) as program:
            words = await said(program)
            return words.splitlines()[-1], program.returncode

    asyncio.run(main())


def test_a_machine_without_the_environment_is_sent_away_in_words_or_says_where_it_has_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", keep=KEEP, join=free_address()) as at:
            here, there = tmp_path / "my_env.py", tmp_path / "there.py"
            here.rename(there)
            async with joined(at.invitation) as program:
                words = await said(program)
                assert f"the run sends this machine away: '{here}', which the environment needs, is not on" in words
                assert (program.returncode, "headrace join --entry FILE.py:NAME" in words) == (1, True)
            async with joined(at.invitation, "--entry", f"{os.path.relpath(there)}:rollout"):
                await until(lambda: len(elsewhere(at)) == 1)
                assert len(set(await at.run(*["wait 0.2"] * 4))) == 2
            broken = tmp_path / "broken.py"
            broken.write_text("1 / 0\nasync def rollout(task, policy):\n    return 1.0\n")
            async with joined(at.invitation, "--entry", f"{broken}:rollout") as program:
                words = await said(program)
                assert ("ZeroDivisionError" in words, program.returncode) == (True, 1)
            assert len(set(await at.run(*["pid"] * 4))) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"token": "another"}, "the invitation is not of this run"),
        ({"headrace": "0.0.1"}, f"this machine has headrace '0.0.1', and the run has {__version__}"),
        ({"workers": 0}, "0 workers"),
        ({"workers": 10_000}, "10000 workers"),
    ],
)
def test_who_is_not_invited_is_told_so_and_nothing_comes_of_it(
    tmp_path: Path, change: dict[str, object], problem: str
) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", join=free_address()) as at:
            invitation = read_invitation(at.invitation)
            knock = JoinRequest(token=invitation.token, headrace=__version__, address="x", workers=1)
            answer = await asyncio.to_thread(
                knocked, invitation, MessageCodec(JoinAnswer).encode(change_of(knock, change))
            )
            assert isinstance(answer, JoinRefused)
            assert problem in answer.problem
            assert at.events == []

    asyncio.run(main())


def change_of(knock: JoinRequest, change: dict[str, object]) -> JoinRequest:
    return msgspec.structs.replace(knock, **change)


def knocked(invitation: Invitation, data: bytes) -> object:
    """What the door answers; ``None`` where it does not for a second."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        present_key(line, f"tcp://{invitation.address}", invitation.key)
        line.connect(f"tcp://{invitation.address}")
        if not line.poll(1000, zmq.POLLOUT):  # the connection has ended by now, and is made once
            return None
        line.send(data)
        return MessageCodec(JoinAnswer).decode(line.recv()) if line.poll(1000) else None


def test_whatever_is_said_at_the_door_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, PLACES, "rollout", join=free_address()) as at:
            invitation = read_invitation(at.invitation)
            stranger = msgspec.structs.replace(invitation, key=zmq.curve_keypair()[0].decode())
            assert await asyncio.to_thread(knocked, stranger, b"") is None, "without the key: no answer"
            for data in (b"", b"\xc1", b"\x81\xa4type\xa5Knock", os.urandom(60_000), b"\x91" * 60_000):
                answer = await asyncio.to_thread(knocked, invitation, data)
                assert isinstance(answer, JoinRefused)
                assert "does not understand" in answer.problem
            assert await asyncio.to_thread(knocked, invitation, os.urandom(1 << 17)) is None, "too long"
            host, _, port = invitation.address.rpartition(":")
            with socket.create_connection((host, int(port))) as line:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n")
            welcome = JoinRequest(token=invitation.token, headrace=__version__, address="\x1b[2J" * 99, workers=1)
            assert not isinstance(
                await asyncio.to_thread(knocked, invitation, MessageCodec(JoinAnswer).encode(welcome)), JoinRefused
            )
            assert set(map(type, await at.run("pid"))) == {float}  # it was let in, and never showed itself
            assert at.events == []

    asyncio.run(main())


# -- what is refused before it begins --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["launch.join=0.0.0.0:7781"], "launch.join='0.0.0.0:7781': 0.0.0.0 is not the address of one machine"),
        (["launch.join=myhost:7781"], "myhost is not the address of one machine"),
        (["launch.join=10.0.0.5"], "launch.join='10.0.0.5' is not an address with a port"),
        (["launch.join=10.0.0.5:0"], "not an address with a port"),
        (["launch.join=10.0.0.5:99999"], "not an address with a port"),
        (["launch.join=redis://10.0.0.5:6379/0"], "machines join over TCP, and no longer over a Redis server"),
        (["launch.join=redis://:hush@10.0.0.9"], "launch.join holds a password"),
        (["launch.join=unix:///redis.socket"], "machines join over TCP, and no longer over a Redis server"),
        (["launch.join=10.0.0.5:7781", "launch.kind=ray"], "the cluster is what machines join"),
        (["launch.join=10.0.0.5:7781", *SINGLE], "runs in no worker that another machine could bring"),
        (["env.workers=0"], "env.workers=0 keeps no environment on this machine, and no other may join"),
        (["env.host=127.0.0.2", *SINGLE], "no program reaches an episode"),
        (["env.tls_key=/key.pem"], "env.tls_key is set, env.tls_certificate is not"),
    ],
)
def test_settings_by_which_nobody_could_join_are_refused(tmp_path: Path, settings: list[str], problem: str) -> None:
    run_file = make_env_run(tmp_path, tmp_path, PLACES, "rollout")
    with pytest.raises(ConfigError) as raised:
        load_config(run_file, settings)
    assert problem in raised.value.problem


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"address": "nowhere", "key": "k", "token": "t"}', "\udcff"])
def test_what_is_no_invitation_is_told_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as raised:
        read_invitation(path)
    assert "is not an invitation" in raised.value.problem


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"key": "k"}, DataError, "the key in the invitation is none"),
        ({"address": "255.255.255.255:7781"}, RunUnreachable, "no way leads from this machine to 255.255.255.255:7781"),
        ({"address": "no..name:7781"}, RunUnreachable, "no way leads from this machine to no..name:7781"),
    ],
)
def test_an_invitation_that_leads_nowhere_is_told_so(
    tmp_path: Path, change: dict[str, str], error: type[HeadraceError], problem: str
) -> None:
    given = Invitation(address="127.0.0.1:9", key=zmq.curve_keypair()[0].decode(), token="t")
    write_invitation(tmp_path / "join.json", msgspec.structs.replace(given, **change))
    with pytest.raises(error, match=problem):
        join(tmp_path, Offer(workers=1), print)


def test_a_connection_that_has_ended_before_anything_could_be_sent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = zmq.asyncio.Socket.connect
    with socket.create_server(("127.0.0.1", 0)) as door:

        def connected(line: zmq.asyncio.Socket, address: str) -> None:
            connect(line, address)
            door.accept()[0].close()
            while line.poll(0, zmq.POLLOUT).result():
                pass  # until it knows

        monkeypatch.setattr(zmq.asyncio.Socket, "connect", connected)
        monkeypatch.setattr(node, "ANSWER_S", 1.0)
        address = f"127.0.0.1:{door.getsockname()[1]}"
        given = Invitation(address=address, key=zmq.curve_keypair()[0].decode(), token="t")
        write_invitation(tmp_path / "join.json", given)
        with pytest.raises(RunUnreachable, match="nobody answers"):
            join(tmp_path, Offer(workers=1), print)


def test_an_invitation_is_for_its_owner_alone_whatever_lay_there(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    path.write_text("old")
    path.chmod(0o666)
    given = Invitation(address="10.0.0.5:7781", key="k", token="t")
    write_invitation(path, given)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_invitation(tmp_path) == given


def test_the_channel_of_a_machine_is_closed_where_its_farewell_is_cancelled() -> None:
    closed: list[bool] = []
    peer: Any = SimpleNamespace(send=lambda _: None, left=asyncio.Event(), close=lambda: closed.append(True))
    config: Any = SimpleNamespace(home="127.0.0.1", start_timeout_s=1.0, query=None)
    channel: Any = None

    async def main() -> None:
        leaving = asyncio.create_task(JoinedStarter(peer, channel, "far", config).send_away(Farewell()))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    asyncio.run(main())
    assert closed == [True]
