"""Writers: the loop never waits for the disk, and what could not be kept is told."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base.errors import LedgerError
from headrace.base.types.group import GroupState
from headrace.flow.ledger import InlineWriter, SqliteLedger, ThreadedWriter
from headrace.flow.ledger import writer as ledger_writer
from headrace.flow.ledger.base import EndEpisode, Move, Note, Operation, Stream, Submit
from tests.flow.episodes import ended, sampled

NOTE = Note(kind="note", detail="", at_s=0.0)


def opened(path: Path | str) -> SqliteLedger:
    return SqliteLedger(path, group_size=2, groups_per_step=1)


def fill_up(ledger: SqliteLedger) -> None:
    """From now on the disk is full."""
    (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")


def submit_and_fill(write: Callable[[Operation], None]) -> None:
    write(Submit(numbers=(0,), rows=(0,), at_s=0.0))
    for place in range(2):
        write(EndEpisode(episode=ended(0, place, tokens=sampled(5_000)), at_s=0.0))


def test_flush_returns_when_everything_before_it_is_recorded(tmp_path: Path) -> None:
    async def main() -> list[str]:
        ledger = opened(tmp_path / "ledger.sqlite")
        writer = ThreadedWriter(ledger)
        for number in range(500):
            writer.write(Note(kind="n", detail=str(number), at_s=0.0))
        await writer.flush()
        seen = [detail for _, detail, _ in ledger.notes()]
        writer.close()
        ledger.close()
        return seen

    assert asyncio.run(main()) == [str(number) for number in range(500)]


def test_close_records_what_is_left(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.sqlite")
    writer = ThreadedWriter(ledger)
    for _ in range(100):
        writer.write(NOTE)
    writer.close()
    assert len(ledger.notes()) == 100
    ledger.close()


def test_loop_goes_on_while_the_disk_is_slow() -> None:
    disk = threading.Event()

    class SlowLedger:
        applied = 0

        def apply(self, *operations: Operation) -> None:
            assert disk.wait(30)
            self.applied += len(operations)

    async def main() -> int:
        ledger = SlowLedger()
        writer = ThreadedWriter(ledger)
        for _ in range(50):
            writer.write(NOTE)
        assert ledger.applied == 0
        disk.set()
        await writer.flush()
        writer.close()
        return ledger.applied

    assert asyncio.run(main()) == 50


def test_full_disk_is_a_ledger_error_and_what_was_kept_stays(tmp_path: Path) -> None:
    ledger = opened(tmp_path / "ledger.sqlite")
    ledger.apply(Submit(numbers=(0,), rows=(0,), at_s=0.0))
    fill_up(ledger)
    with pytest.raises(LedgerError, match="full") as refused:
        submit_and_fill(lambda op: ledger.apply(op) if isinstance(op, EndEpisode) else None)
    assert "df -h" in refused.value.remedy
    books = ledger.conservation()
    assert books.holds
    assert (books.groups.submitted, books.tokens.submitted) == (1, 0)
    ledger.close()


def test_full_disk_reaches_the_loop_at_its_next_flush_and_write(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = opened(tmp_path / "ledger.sqlite")
        fill_up(ledger)
        writer = ThreadedWriter(ledger)
        submit_and_fill(writer.write)
        with pytest.raises(LedgerError, match="full"):
            await writer.flush()
        with pytest.raises(LedgerError, match="full"):
            writer.write(NOTE)
        with pytest.raises(LedgerError, match="full"):
            await writer.flush()
        writer.close()
        assert ledger.notes() == []  # nothing is recorded after a gap
        ledger.close()

    asyncio.run(main())


def test_failure_that_nobody_expected_does_not_leave_a_flush_waiting() -> None:
    class Broken:
        def apply(self, *operations: Operation) -> None:
            raise OverflowError("an integer too large for the database")

    async def main() -> None:
        writer = ThreadedWriter(Broken())
        writer.write(NOTE)
        with pytest.raises(OverflowError):
            await asyncio.wait_for(writer.flush(), 30)
        writer.close()

    asyncio.run(main())


def test_inline_writer_records_at_once_and_raises_at_once() -> None:
    ledger = opened(":memory:")
    writer = InlineWriter(ledger)
    writer.write(NOTE)
    assert len(ledger.notes()) == 1
    writer.write(Submit(numbers=(0,), rows=(0,), at_s=0.0))
    with pytest.raises(LedgerError):
        writer.write(Submit(numbers=(0,), rows=(0,), at_s=0.0))
    ledger.close()


WRITES_FOR_EVER = """
import asyncio, itertools, sys
from headrace.flow.ledger import SqliteLedger, ThreadedWriter
from headrace.flow.ledger.base import EndEpisode, Move, Submit
from headrace.base.types.group import GroupState
from tests.flow.episodes import ended

async def main():
    writer = ThreadedWriter(SqliteLedger(sys.argv[1], group_size=2, groups_per_step=1))
    for number in itertools.count():
        writer.write(Submit(numbers=(number,), rows=(number,), at_s=0.0))
        writer.write(Move(numbers=(number,), state=GroupState.ADMITTED, oldest_version=0, at_s=0.0))
        writer.write(Move(numbers=(number,), state=GroupState.RUNNING, at_s=0.0))
        writer.write(EndEpisode(episode=ended(number, 0), at_s=0.0))
        if number % 20 == 0:
            await writer.flush()
            print(number, flush=True)

asyncio.run(main())
"""


def test_kill_loses_nothing_that_was_flushed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        flushed = [int(process.stdout.readline()) for _ in range(4)]
        process.send_signal(signal.SIGKILL)
        flushed += [int(line) for line in process.stdout.read().split()]
    ledger = opened(path)
    resumed = ledger.roll_back(0)
    assert len(resumed.groups) > max(flushed)
    assert all(group.state is GroupState.SUBMITTED for group in resumed.groups)
    assert all(len(group.episodes) == 1 for group in resumed.groups if group.number <= max(flushed))
    assert ledger.conservation().holds
    ledger.close()


def test_file_that_may_not_grow_is_a_ledger_error_in_another_process(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from headrace.base.errors import LedgerError
from headrace.flow.ledger import SqliteLedger
from headrace.flow.ledger.base import Note
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = SqliteLedger(sys.argv[1], group_size=2, groups_per_step=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    for _ in range(1000):
        ledger.apply(Note(kind="n", detail="x" * 5000, at_s=0.0))
except LedgerError as error:
    print(error)
print(ledger.conservation().holds, len(ledger.notes()) > 3)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ledger.sqlite")], capture_output=True, text=True, check=True
    )
    assert "cannot be written" in done.stdout
    assert done.stdout.splitlines()[-1] == "True True"


def test_move_of_a_flow_reaches_the_ledger_through_a_thread(tmp_path: Path) -> None:
    async def main() -> int:
        ledger = opened(tmp_path / "ledger.sqlite")
        writer = ThreadedWriter(ledger)
        writer.write(Submit(numbers=(0, 1), rows=(0, 1), at_s=0.0))
        writer.write(Move(numbers=(0, 1), state=GroupState.DROPPED, reason="r", at_s=0.0))
        await writer.flush()
        writer.close()
        dropped = ledger.conservation().groups.dropped["r"]
        ledger.close()
        return dropped

    assert asyncio.run(main()) == 2


def test_parts_of_running_turns_do_not_wait_for_what_comes_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_writer, "GATHER_S", 600.0)
    recorded = threading.Event()

    class Telling:
        def apply(self, *operations: Operation) -> None:
            recorded.set()

    writer = ThreadedWriter(Telling())
    writer.write(NOTE)
    writer.write(Stream(parts=(), at_s=0.0))
    assert recorded.wait(30)
    writer.close()


def test_operations_that_nobody_waits_for_are_recorded_together_and_in_order() -> None:
    calls: list[tuple[str, ...]] = []
    all_there = threading.Event()

    class Counting:
        def apply(self, *operations: Operation) -> None:
            assert all_there.wait(30)
            calls.append(tuple(operation.detail for operation in operations))

    async def main() -> None:
        writer = ThreadedWriter(Counting())
        for number in range(600):
            writer.write(Note(kind="n", detail=str(number), at_s=0.0))
        all_there.set()
        await writer.flush()
        writer.close()

    asyncio.run(main())
    assert [detail for call in calls for detail in call] == [str(number) for number in range(600)]
    assert max(map(len, calls)) == 256
    assert len(calls) <= 4  # the first holds what was there when the thread woke
