"""The ledger on a Redis server that dies, comes back, forgets, or serves two runs at once."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import LedgerError
from headrace.flow.config import FlowConfig
from headrace.flow.ledger import UnitCounts
from headrace.flow.ledger.base import Note
from headrace.flow.ledger.opening import make_ledger
from headrace.flow.ledger.redis import RedisLedger
from headrace.testing.ledgers import commit_version, complete_group, start_group, train_group
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def opened(redis: RedisServer, *, outage_s: float = 30.0, **sizes: int) -> RedisLedger:
    given = {"group_size": 2, "groups_per_step": 1, **sizes}
    return RedisLedger(redis.url, "/runs/a", outage_s=outage_s, **given)


def test_server_that_is_killed_and_comes_back_has_lost_nothing(redis: RedisServer) -> None:
    ledger = opened(redis)
    for operation in train_group(0):
        ledger.apply(operation)
    redis.kill()
    back = threading.Timer(0.5, redis.start)
    back.start()
    for operation in [commit_version(1, 0), *complete_group(1)]:  # the first of them waits for it
        ledger.apply(operation)
    back.join()
    ledger.close()
    again = RedisLedger.open(redis.url, "/runs/a")
    assert again.conservation().holds
    assert again.conservation().groups == UnitCounts(submitted=2, trained=1, in_flight=1)
    again.close()


def test_server_that_stays_away_ends_the_run_in_words(redis: RedisServer) -> None:
    ledger = opened(redis, outage_s=0.2)
    redis.kill()
    with pytest.raises(LedgerError, match="cannot be reached") as ended:
        ledger.apply(start_group(0)[0])
    assert "--resume" in ended.value.remedy
    ledger.close()


def test_server_that_came_back_without_its_file_is_found_out(redis: RedisServer) -> None:
    ledger = opened(redis)
    for operation in complete_group(0):
        ledger.apply(operation)
    redis.kill()
    shutil.rmtree(redis.directory / "appendonlydir", ignore_errors=True)
    (redis.directory / "appendonly.aof").unlink(missing_ok=True)
    redis.start()
    with pytest.raises(LedgerError, match="has lost operations"):
        ledger.apply(Note(kind="n", detail="", at_s=0.0))
    ledger.close()


def test_server_that_keeps_no_file_is_refused(redis: RedisServer) -> None:
    redis.kill()
    redis.start(appendonly="no")
    with pytest.raises(LedgerError, match="would not outlive the server") as refused:
        opened(redis)
    assert "appendonly yes" in refused.value.remedy


def test_second_run_on_the_same_ledger_is_found_out_by_its_first_operation(redis: RedisServer) -> None:
    one, other = opened(redis), opened(redis)
    one.apply(start_group(0)[0])
    with pytest.raises(LedgerError, match="another run writes the ledger"):
        other.apply(start_group(5)[0])
    one.apply(start_group(0)[1])
    one.close()
    other.close()
    again = opened(redis)
    assert again.conservation().groups == UnitCounts(submitted=1, in_flight=1)
    again.close()


def test_operation_whose_answer_was_lost_is_recorded_once(redis: RedisServer) -> None:
    ledger = opened(redis)
    append, errors = ledger._append, ledger._redis.exceptions
    lost = iter([True])

    def loses_the_first_answer(**given: object) -> bytes:
        said: bytes = append(**given)
        if next(lost, False):
            raise errors.ConnectionError("the connection broke")
        return said

    ledger._append = loses_the_first_answer
    ledger.apply(Note(kind="n", detail="once", at_s=0.0))
    ledger.apply(Note(kind="n", detail="more", at_s=0.0))
    ledger.close()
    again = opened(redis)
    assert [detail for _, detail, _ in again.notes()] == ["once", "more"]
    again.close()


def test_ledger_of_other_sizes_or_none_at_all_is_refused(redis: RedisServer) -> None:
    with pytest.raises(LedgerError, match="no ledger /runs/a"):
        RedisLedger.open(redis.url, "/runs/a")
    opened(redis).close()
    with pytest.raises(LedgerError, match="begun with 2"):
        opened(redis, group_size=3)


def test_new_run_in_an_emptied_directory_takes_nothing_from_the_one_before(redis: RedisServer, tmp_path: Path) -> None:
    config = FlowConfig(ledger="redis", ledger_url=redis.url)
    for _ in range(2):
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        ledger = make_ledger(config, run_dir)
        assert ledger.conservation().groups == UnitCounts()
        for operation in complete_group(0):
            ledger.apply(operation)
        ledger.close()
        shutil.rmtree(run_dir)


def test_run_that_was_moved_finds_its_ledger_and_begins_no_other(redis: RedisServer, tmp_path: Path) -> None:
    config = FlowConfig(ledger="redis", ledger_url=redis.url)
    (tmp_path / "run").mkdir()
    ledger = make_ledger(config, tmp_path / "run")
    for operation in complete_group(0):
        ledger.apply(operation)
    ledger.close()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    ledger = make_ledger(config, moved)
    assert ledger.conservation().groups == UnitCounts(submitted=1, in_flight=1)
    ledger.close()
    elsewhere = config.model_copy(update={"ledger_url": f"{redis.url}?db=1"})
    with pytest.raises(LedgerError, match="no ledger"):
        make_ledger(elsewhere, moved)


def test_server_that_hangs_is_waited_for_no_longer_than_one_that_is_away(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.flow.ledger.redis.ANSWER_S", 0.3)
    ledger = opened(redis, outage_s=0.5)
    assert redis.process is not None
    redis.process.send_signal(signal.SIGSTOP)
    began_s = RealClock().now()
    with pytest.raises(LedgerError, match="cannot be reached"):
        ledger.apply(start_group(0)[0])
    assert RealClock().now() - began_s < 1.2  # two questions; its waits alone add up to 0.5 s after four
    ledger.close()


def test_entry_that_cannot_be_read_is_named(redis: RedisServer) -> None:
    ledger = opened(redis)
    ledger.apply(start_group(0)[0])
    ledger._server.xadd(ledger._stream, {"writer": "w", "kind": "Move", "data": b"\xc1"}, id="2-0")
    ledger.close()
    with pytest.raises(LedgerError, match="damaged at operation 2"):
        opened(redis)


def test_password_of_a_url_is_never_shown(redis: RedisServer) -> None:
    with pytest.raises(LedgerError) as refused:
        RedisLedger("redis://user:hush@127.0.0.1:1/0", "r", group_size=2, groups_per_step=1, outage_s=0.0)
    assert "hush" not in str(refused.value)


def test_operation_that_has_changed_on_the_server_is_named(redis: RedisServer) -> None:
    ledger = opened(redis)
    for operation in train_group(0):
        ledger.apply(operation)
    ledger.close()
    server = redis.client()
    (stream,) = [key for key in server.keys("*") if key.endswith(b":operations")]
    entry, fields = server.xrange(stream)[0]
    rest = server.xrange(stream)[1:]
    server.delete(stream)
    changed = {**fields, b"data": fields[b"data"][:-1] + bytes([fields[b"data"][-1] ^ 1])}
    for at, each in [(entry, changed), *rest]:
        server.xadd(stream, each, id=at)
    with pytest.raises(LedgerError, match="damaged at operation 1: it has changed since it was written"):
        RedisLedger.open(redis.url, "/runs/a")
