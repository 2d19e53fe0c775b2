"""Versions that are carried to a server's machine: what arrives, what goes wrong, what is left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace.base import environ
from headrace.base.errors import ComponentDied, ConfigError, EngineUnfit, NeedsFull
from headrace.base.types.weights import BUCKET_BYTES, Interrupt
from headrace.engine import EngineConfig
from headrace.models.tiny import TinySpec, make_tiny
from headrace.testing.engine_rig import MAX_CONTEXT, served_rig
from headrace.testing.servers import FakeServer, fake_server
from headrace.wings.servers.client.carrier import Carrier, CarrierConfig
from headrace.wings.servers.client.config import ServerConfig
from headrace.wings.servers.client.launching import ServeRequirements
from headrace.wings.servers.client.wire import Address, Wire
from headrace.wings.servers.vllm.dialect import call_workers
from headrace.wings.servers.vllm.inside import headrace_receiver
from tests.launch.test_leases import interrupted_removal

WAY = CarrierConfig(backend="gloo", host="127.0.0.1", device="cpu", deadline_s=1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A carrier, and the server that it carries to."""

    carrier: Carrier
    server: FakeServer
    wire: Wire


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "m", TinySpec(vocab="0123456789+= abcdefgh", init_std=0.2))


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the server's machine."""
    made = tmp_path / "shm"
    made.mkdir()
    monkeypatch.setattr(headrace_receiver, "_SHARED_MEMORY", made)
    return made


@pytest.fixture
def line(model: Path) -> Iterator[Line]:
    wanted = ServeRequirements(path=str(model), dtype="float32", max_context=MAX_CONTEXT)
    with (
        fake_server("vllm", wanted) as (url, server),
        Wire(Address(url=url)) as wire,
        closing(Carrier(wire, call_workers, WAY)) as carrier,
    ):
        yield Line(carrier=carrier, server=server, wire=wire)


def version(directory: Path, number: int, **files: bytes) -> Path:
    made = directory / f"v{number}"
    for name, content in files.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    return made


def held(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_files_arrive_as_they_are_and_the_newest_version_but_one_stays_until_the_end(
    line: Line, tmp_path: Path, shared_memory: Path
) -> None:
    long = os.urandom(2 * BUCKET_BYTES + 17)
    for number in range(4):
        files = {"weights": long[number:], "one/config": b"{}", "two/config": b"x" * number + b"y"}
        sent = version(tmp_path, number, **files)
        there = line.carrier.carry(sent, number)
        assert held(there) == held(sent)
        assert there.is_relative_to(shared_memory)
        assert not {path.name for path in there.parent.glob("v*")} - {f"v{number - 1}", f"v{number}"}
    assert there.parent.stat().st_mode & 0o077 == 0
    line.carrier.close()
    assert list(shared_memory.iterdir()) == []


def test_empty_file_arrives_too(line: Line, tmp_path: Path) -> None:
    sent = version(tmp_path, 1, first=b"", weights=b"abc", zero=b"")
    assert held(line.carrier.carry(sent, 1)) == held(sent)


def test_what_changes_on_the_way_is_refused_and_may_come_again(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = version(tmp_path, 1, weights=os.urandom(1000))
    whole = headrace_receiver._Group.receive

    def flipped(group: Any, path: Path, *how: int) -> str:
        found = whole(group, path, *how)
        return f"{int(found, 16) ^ 1:064x}"

    with monkeypatch.context() as changed:
        changed.setattr(headrace_receiver._Group, "receive", flipped)
        with pytest.raises(NeedsFull, match=r"version 1 \(1000 bytes\) was not brought .* bytes changed on the way"):
            line.carrier.carry(sent, 1)
    assert held(line.carrier.carry(sent, 1)) == held(sent)


def test_machine_without_room_says_so_and_keeps_nothing_and_the_next_version_meets_anew(
    line: Line, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = version(tmp_path, 1, weights=os.urandom(100_000))

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(headrace_receiver._Group, "receive", full)
        with pytest.raises(NeedsFull, match="No space left on device") as raised:
            line.carrier.carry(sent, 1)
    assert "room in /dev/shm" in raised.value.remedy
    assert list(shared_memory.glob("*/v*")) == []
    assert held(line.carrier.carry(sent, 1)) == held(sent)


def test_worker_that_never_joins_is_not_waited_for_longer_than_the_deadline(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = version(tmp_path, 1, weights=b"abc")
    with monkeypatch.context() as changed:
        changed.setattr(headrace_receiver.VersionReceiver, "start_receiving", lambda *_: None)
        with pytest.raises(NeedsFull) as raised:
            line.carrier.carry(sent, 1)
    assert "its workers have not joined the group" in raised.value.problem
    assert "TCP connections to 127.0.0.1 (engine.server.weights_host)" in raised.value.remedy
    assert held(line.carrier.carry(sent, 1)) == held(sent)


def test_worker_that_never_ends_is_not_waited_for_longer_than_the_deadline(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = version(tmp_path, 1, weights=b"abc")
    with monkeypatch.context() as changed:
        whole = headrace_receiver.VersionReceiver.receive_status
        changed.setattr(
            headrace_receiver.VersionReceiver, "receive_status", lambda self: {"attempt": whole(self)["attempt"]}
        )
        with pytest.raises(NeedsFull, match=r"had not arrived 1\.5 s after its last byte was sent"):
            line.carrier.carry(sent, 1)
    assert held(line.carrier.carry(sent, 1)) == held(sent)


def given_up(line: Line, sent: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], str]) -> Callable[[], None]:
    """Carry what the worker does not take in in time; has its thread continue, with ``end`` of the first file."""
    go_on = threading.Event()

    def stuck(*_: object) -> str:
        assert go_on.wait(60)
        return end()

    with monkeypatch.context() as changed:
        changed.setattr(headrace_receiver._Group, "receive", stuck)
        with pytest.raises(NeedsFull):
            line.carrier.carry(sent, 1)
    (late,) = (thread for thread in threading.enumerate() if thread.name == "receive weights")

    def goes_on() -> None:
        go_on.set()
        late.join(60)

    return goes_on


def test_failure_of_an_order_that_was_given_up_does_not_touch_the_group_of_the_next(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> str:
        raise RuntimeError("too late")

    sent = version(tmp_path, 1, weights=b"abc")
    goes_on = given_up(line, sent, monkeypatch, fails)
    there = line.carrier.carry(sent, 1)
    goes_on()
    assert held(there) == held(sent)
    later = version(tmp_path, 2, weights=b"abcd")
    assert held(line.carrier.carry(later, 2)) == held(later)


def test_order_that_was_given_up_leaves_nothing_behind_when_the_engine_has_left(
    line: Line, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = given_up(line, version(tmp_path, 1, one=b"abc", two=b"def"), monkeypatch, lambda: "its hash")
    line.carrier.close()
    goes_on()
    assert list(shared_memory.iterdir()) == []


def test_connection_that_broke_is_a_dead_server_and_the_engine_can_still_leave(line: Line, tmp_path: Path) -> None:
    async def breaks() -> None:
        raise ComponentDied("vLLM does not answer", remedy="look at its log")

    async def begun() -> None:
        line.wire.start_task(breaks())
        await asyncio.sleep(60)

    sent = version(tmp_path, 1, weights=b"abc")
    line.carrier.carry(sent, 1)
    for _ in range(2):  # while it breaks, and afterwards
        with pytest.raises(ComponentDied, match=r"the connection to the server .* has ended|vLLM does not answer"):
            line.wire.call(begun(), 30)
        line.wire._thread.join(30)
    line.carrier.close()


def test_server_that_outlives_a_killed_engine_takes_from_the_next(
    line: Line, tmp_path: Path, shared_memory: Path
) -> None:
    sent = version(tmp_path, 1, weights=b"abc")
    before = line.carrier.carry(sent, 1)
    with closing(Carrier(line.wire, call_workers, WAY)) as heir:
        with pytest.raises(EngineUnfit, match=r"weights from another run, at 127\.0\.0\.1"):
            heir.carry(sent, 1)
        assert held(before) == held(line.carrier.carry(sent, 2)) == held(sent)
        line.carrier._offer = None  # it is killed
        there = heir.carry(sent, 1)
        assert held(there) == held(sent)
        assert there != before
        assert list(shared_memory.iterdir()) == [there.parent]


def test_engine_that_takes_the_place_of_another_of_its_run_need_not_wait_for_its_end(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "_stored_token", ["of one run"])
    sent = version(tmp_path, 1, weights=b"abc")
    with (
        closing(Carrier(line.wire, call_workers, WAY)) as first,
        closing(Carrier(line.wire, call_workers, WAY)) as heir,
    ):
        first.carry(sent, 1)
        assert held(heir.carry(sent, 1)) == held(sent)


def test_rooms_of_killed_workers_are_removed_and_those_in_use_are_not(
    line: Line, tmp_path: Path, shared_memory: Path
) -> None:
    left, used = shared_memory / "headrace-1-aaaa", shared_memory / "headrace-2-bbbb"
    for room in (left, used):
        room.mkdir()
        (room / headrace_receiver.LOCK).touch()
    (shared_memory / "headrace-notes").mkdir()
    with (used / headrace_receiver.LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = line.carrier.carry(version(tmp_path, 1, weights=b"abc"), 1)
        found = {path.name for path in shared_memory.iterdir()}
        assert found == {used.name, "headrace-notes", there.parent.name}
    shutil.rmtree(used)


@pytest.mark.parametrize("removed", range(6))
def test_room_whose_removal_was_interrupted_anywhere_is_removed_by_the_next_worker(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    killed, heir = headrace_receiver._SharedDirectory(), headrace_receiver._SharedDirectory()
    for number in (1, 2):
        (killed.version("headrace-1-aaaa", number) / "weights").touch()
    with interrupted_removal(monkeypatch, removed):
        killed.close()
    os.close(killed._lock)  # as the kernel does when the process ends
    assert (shared_memory / "headrace-1-aaaa").exists()
    heir.version("headrace-2-bbbb", 1)
    assert os.listdir(shared_memory) == ["headrace-2-bbbb"]
    heir.close()


def test_weights_are_loaded_from_where_they_were_brought(model: Path, tmp_path: Path, shared_memory: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    wanted = ServeRequirements(path=str(model), dtype="float32", max_context=MAX_CONTEXT)
    with fake_server("vllm", wanted) as (url, server):
        config = ServerConfig(urls=(url,), weights_by="gloo")
        with served_rig("vllm", config, wanted, scratch) as rig:
            for _ in range(3):
                rig.publish(Interrupt.INFLIGHT)
                assert server.files.path.is_relative_to(shared_memory)
        assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"weights_by": "gloo", "weights_dir": "/x"}, "weights_dir is a folder that the server sees"),
        ({"weights_host": "10.0.0.1"}, "weights_host='10.0.0.1' is set, and weights_by='files'"),
        ({"weights_by": "gloo", "weights_host": "0.0.0.0"}, "not an address that a server could reach"),
        ({"weights_by": "gloo", "urls": ["http://10.0.0.2:8000"]}, "weights_host='127.0.0.1' is this machine alone"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(server: dict[str, str], told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        ServerConfig.model_validate(server)


def test_server_that_cannot_be_carried_to_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"weights_by='gloo' is of engine\.kind='vllm', and this is another"):
        EngineConfig.model_validate({"kind": "sglang", "device": "cpu", "server": {"weights_by": "gloo"}})


@pytest.mark.parametrize(
    ("backend", "host", "told"),
    [("nccl", "127.0.0.1", "wants a GPU"), ("gloo", "192.0.2.1", "'192.0.2.1' cannot be listened at")],
)
def test_machine_that_cannot_carry_is_told_before_anything_starts(backend: str, host: str, told: str) -> None:
    way = CarrierConfig(backend=backend, host=host, device="cpu", deadline_s=1.0)
    with pytest.raises(ConfigError, match=told):
        way.refuse_impossible()
