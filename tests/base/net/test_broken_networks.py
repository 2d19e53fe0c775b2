"""Connections that are silent without being closed, machines that do not reach each other, clocks that are wrong: each
is named, takes a bounded time, and is recovered from or ends cleanly. Real sockets, and a cable that is cut."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import torch

from headrace.base.clock import RealClock
from headrace.base.errors import LedgerError, NeedsFull, WeightsError
from headrace.base.types.messages import controller
from headrace.base.types.weights import WeightUpdate
from headrace.flow.ledger.base import Note
from headrace.launch import channel
from headrace.launch.channel import ChannelAddresses, ControllerChannel
from headrace.sync.config import Route
from headrace.sync.transports import make_receiver
from headrace.testing.sync import TOKEN, Pair, are_equal, open_pair
from headrace.wings.view.run import OpenRun
from tests.base.net.cables import Cable, cable
from tests.redis_server import PROGRAM
from tests.wings.view.synthetic import write_run, write_status

torch.set_num_threads(1)
PART = """
import sys, os, msgspec
from headrace.launch import channel
channel.HEARTBEAT_S, channel.SILENCE_S = 1, 2
ends = msgspec.json.decode(sys.argv[1].encode(), type=channel.ChannelAddresses)
from headrace.base.types.messages import engine
from headrace.base.types.messages.controller import Ready
part = channel.PartChannel(ends, engine.Message)
part.send(Ready(token="t", pid=os.getpid(), facts={}))
while True:
    part.receive(60.0)
"""


def place(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def test_a_part_that_hears_nothing_from_its_controller_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HEARTBEAT_S", 1)
    monkeypatch.setattr(channel, "SILENCE_S", 2)

    async def main(log: object) -> None:
        ours = ControllerChannel(Path("/nowhere"), "engine", controller.Message, host="127.0.0.1")
        with cable(*place(ours.addresses.orders)) as orders, cable(*place(ours.addresses.reports)) as reports:
            ends = ChannelAddresses(orders=url(orders), reports=url(reports), key=ours.addresses.key)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", PART, msgspec.json.encode(ends).decode(),
                stdout=log, stderr=log, start_new_session=True,
            )  # type: ignore[arg-type]  # fmt: skip
            async with asyncio.timeout(60):
                (ready,) = await ours.receive()
                assert ready.pid == process.pid
                orders.cut()
                reports.cut()
                assert await process.wait() == -signal.SIGKILL
        ours.close()

    with tempfile.TemporaryFile() as log:
        asyncio.run(main(log))
        log.seek(0)
        assert b"the connection to the controller is broken" in log.read()


def url(end: Cable) -> str:
    return f"tcp://{end.address[0]}:{end.address[1]}"


def through(pair: Pair, wire: Cable) -> None:
    """From now on the learner reaches the engine over ``wire`` alone."""
    real = pair.receiver.address
    outbox = pair.publisher._outbox
    send = outbox._upload  # type: ignore[attr-defined]

    def upload(address: str, key: str, request: object) -> None:
        assert address == real
        send(f"http://{wire.address[0]}:{wire.address[1]}", key, request)

    outbox._upload = upload  # type: ignore[attr-defined]


def test_a_learner_and_an_engine_that_are_parted_both_say_so_in_time_and_go_on_when_they_are_joined() -> None:
    clock = RealClock()
    with (
        open_pair(Route(transport="http", deadline_s=1.0), seed=3) as pair,
        cable(*place(pair.receiver.address)) as wire,
    ):
        through(pair, wire)
        pair.transfer()
        held = {name: tensor.clone() for name, tensor in pair.engine.items()}
        wire.cut()
        expected, began_s = pair.learn(), clock.now()
        with pytest.raises(WeightsError, match=r"could not be uploaded to http.*silent for at most 1 s: TimeoutError"):
            pair.publish()
        assert clock.now() - began_s < 5
        assert are_equal(pair.engine, held)
        wire.fix()
        try:
            pair.receiver.stage(pair.resend())
        except NeedsFull:  # what was on its way when the line was cut came behind it; the controller has it sent again
            pair.receiver.stage(pair.resend())
        pair.receiver.commit(pair.version)
        assert are_equal(pair.engine, expected)


def test_an_engine_that_only_the_learner_cannot_reach_is_left_out_until_it_answers() -> None:
    with (
        open_pair(Route(transport="http", deadline_s=1.0), seed=3) as pair,
        cable(*place(pair.receiver.address)) as wire,
    ):
        far = f"http://{wire.address[0]}:{wire.address[1]}"
        near = make_receiver(pair.route, {name: tensor.clone() for name, tensor in pair.engine.items()}, TOKEN)
        tried = counted(pair)

        def publish() -> WeightUpdate:
            """Whoever it has reached uses it."""
            pair.version, pair.slot = pair.version + 1, 1 - pair.slot
            pair.learn()
            pair.publisher.copy(pair.slot)
            update = pair.publisher.announce(pair.version, pair.slot, [near.address, far])
            near.stage(update)
            near.commit(pair.version)
            if far in update.to:
                pair.receiver.stage(msgspec.structs.replace(update, to=(pair.receiver.address,)))
                pair.receiver.commit(pair.version)
            return update

        assert publish().to == (near.address, far)
        wire.cut()
        first = publish()
        assert first.to == (near.address,)
        assert re.fullmatch(
            r"version 1 could not be uploaded to http.*silent for at most 1 s: TimeoutError.*", first.missed_by[far]
        )
        tried.clear()
        assert [publish().missed_by for _ in range(4)] == [first.missed_by] * 4
        assert far not in tried, "nobody waits for it again"
        wire.fix()
        knocks = pair.publisher._outbox._probes  # type: ignore[attr-defined]
        while far not in publish().to:
            knocks[far].result(10)
        assert (near.committed, pair.receiver.committed) == (pair.version, pair.version)
        assert are_equal(pair.engine, pair.expected_weights())
        near.close()


def counted(pair: Pair) -> list[str]:
    """The addresses that it begins to upload to."""
    outbox, tried = pair.publisher._outbox, []
    upload = outbox._upload  # type: ignore[attr-defined]

    def noted(address: str, key: str, request: object) -> None:
        tried.append(address)
        upload(address, key, request)

    outbox._upload = noted  # type: ignore[attr-defined]
    return tried


def test_an_engine_that_is_parted_in_the_middle_of_an_upload_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sync.http.BUCKET_BYTES", 2048)
    with (
        open_pair(Route(transport="http", deadline_s=1.0), seed=3) as pair,
        cable(*place(pair.receiver.address)) as wire,
    ):
        through(pair, wire)
        pair.transfer()
        inbox, buckets = pair.inbox._inbox, 0
        begin = inbox.begin_bucket  # type: ignore[attr-defined]

        def cutting(*bucket: object) -> object:
            nonlocal buckets
            buckets += 1
            if buckets == 2:
                wire.cut()
            return begin(*bucket)

        monkeypatch.setattr(inbox, "begin_bucket", cutting)
        pair.learn()
        pair.version, pair.slot = pair.version + 1, 1 - pair.slot
        pair.publisher.copy(pair.slot)
        with pytest.raises(WeightsError, match="TimeoutError"):
            pair.publisher.announce(pair.version, pair.slot, [pair.receiver.address])
        wire.fix()
        update = pair.resend()
        lost = msgspec.structs.replace(update, path="9-0123456789abcdef")
        with pytest.raises(NeedsFull, match=r"after 1 s here are \d+ bytes of upload"):
            pair.receiver.stage(lost)
        pair.receiver.stage(pair.resend())
        pair.receiver.commit(pair.version)
        assert are_equal(pair.engine, pair.expected_weights())


@pytest.mark.skipif(PROGRAM is None, reason="redis-server is not installed")
def test_a_ledger_whose_server_is_silent_ends_the_run_in_words_and_goes_on_where_it_speaks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    from headrace.flow.ledger import redis as ledgers

    monkeypatch.setattr(ledgers, "ANSWER_S", 0.5)
    command = [str(PROGRAM), "--port", "0", "--appendonly", "yes", "--dir", str(tmp_path), "--save", ""]
    socket_path = tmp_path / "r.sock"
    port = free_port()
    command[2] = str(port)
    with subprocess.Popen([*command, "--unixsocket", str(socket_path)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        next(words for words in server.stdout if b"ready to accept" in words.lower())
        with cable("127.0.0.1", port) as wire:
            address = f"redis://127.0.0.1:{wire.address[1]}/0"
            ledger = ledgers.RedisLedger(address, "r", group_size=2, groups_per_step=1, outage_s=0.2)
            ledger.apply(Note(kind="start", detail="", at_s=0.0))
            wire.cut()
            with pytest.raises(LedgerError, match="cannot be reached for"):
                ledger.apply(Note(kind="lost", detail="", at_s=1.0))
            ledger.close()
            wire.fix()
            again = ledgers.RedisLedger(address, "r", group_size=2, groups_per_step=1)
            assert next(kind for kind, _, _ in again.notes()) == "start"
            again.apply(Note(kind="resume", detail="", at_s=2.0))
            again.close()
        server.kill()


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Elsewhere(RealClock):
    """The clock of another machine, which is that far behind."""

    def __init__(self, behind_s: float) -> None:
        super().__init__()
        self.behind_s, self.later_s = behind_s, 0.0

    def wall(self) -> float:
        return super().wall() - self.behind_s

    def now(self) -> float:
        return super().now() + self.later_s


@pytest.mark.parametrize("behind_s", [3600.0, -3600.0])
def test_a_run_whose_machine_has_another_time_lives_as_long_as_it_writes(tmp_path: Path, behind_s: float) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    (directory / "summary.json").unlink()
    write_status(directory, living=True, steps=2)
    clock = Elsewhere(behind_s)
    run = OpenRun(directory, clock)
    assert run.state()["state"] == "killed"  # as far as anybody can see
    status = json.loads((directory / "status.json").read_text())
    (directory / "status.json").write_text(json.dumps({**status, "written_s": status["written_s"] + 1.0}))
    assert run.state()["state"] == "running"
    (told,) = [note for note in run.notes() if "the clock of the machine" in note]
    assert ("ahead of" if behind_s > 0 else "behind") in told
    clock.later_s = 60.0
    assert run.state()["state"] == "killed"
    assert not [note for note in run.notes() if "clock" in note]
    run.close()
