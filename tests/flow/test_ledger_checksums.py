"""Bits that flip in a ledger's files are noticed before anything is read that they have changed."""

from __future__ import annotations

import fcntl
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.base.errors import LedgerError
from headrace.flow.ledger import SqliteLedger
from headrace.flow.ledger.base import EndEpisode, Note
from headrace.flow.ledger.log import refuse_damaged_log
from headrace.flow.ledger.opening import LOCK_FILE, open_ledger
from headrace.flow.ledger.rows import COLUMNS, _schema, checksum_rows, insert
from headrace.flow.ledger.sqlite import ADOPTED
from headrace.testing.ledgers import (
    commit_version,
    complete_group,
    record_parts,
    sampled_tokens,
    start_group,
    train_group,
    turn_part,
)
from headrace.testing.ledgers import ended_episode as made
from tests.flow.episodes import ended

LEDGER, LOG = "ledger.sqlite", "ledger.sqlite-wal"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The files of a ledger whose writer was killed: a part of it is in the log alone."""
    live, left = tmp_path / "live", tmp_path / "killed"
    live.mkdir()
    left.mkdir()
    ledger = SqliteLedger(live / LEDGER, group_size=2, groups_per_step=1)
    ledger.apply(*train_group(0), commit_version(1, 0), *complete_group(1))
    ledger.persist()
    for number in range(2, 8):
        ledger.apply(*complete_group(number), Note(kind="warning", detail="w" * 300, at_s=1))
    ledger.apply(
        *start_group(8), EndEpisode(episode=made(8, 0), at_s=1), record_parts(turn_part(8, 1, sampled_tokens(5)))
    )
    for name in (LEDGER, LOG):
        shutil.copy(live / name, left / name)
    ledger.close()
    return left


def told(run_dir: Path) -> tuple[object, ...]:
    """What a resume and a reader learn from the ledger in ``run_dir``."""
    with closing(open_ledger(run_dir)) as ledger:
        return (ledger.notes(), ledger.attempts(0), repr(ledger.roll_back(1)), ledger.conservation(), ledger.steps())


def test_every_row_of_every_table_has_its_checksum_whatever_was_done_to_it(killed: Path) -> None:
    told(killed)  # rolls back, too
    with closing(SqliteLedger.open(killed / LEDGER, checked=True)) as ledger:
        ledger.apply(*start_group(9), EndEpisode(episode=ended(9, 0, reward=-0.0), at_s=2))
    told(killed)
    with closing(sqlite3.connect(killed / LEDGER)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        assert tables == set(COLUMNS)
        for table, columns in COLUMNS.items():
            there = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            assert there == [*columns, "row_checksum"]


def test_flipped_bits_of_the_file_and_of_its_log_are_noticed_or_change_nothing(killed: Path, tmp_path: Path) -> None:
    rng, scratch = random.Random(0), tmp_path / "scratch"
    shutil.copytree(killed, scratch)
    whole = told(scratch)
    noticed: list[str] = []
    for name in rng.choices([LEDGER, LOG], k=120):
        shutil.rmtree(scratch)
        shutil.copytree(killed, scratch)
        data = bytearray((scratch / name).read_bytes())
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        (scratch / name).write_bytes(data)
        try:
            assert told(scratch) == whole, f"byte {bit // 8}, bit {bit % 8} of {name}"
        except LedgerError as error:
            noticed.append(error.problem)
    assert all(LEDGER in problem for problem in noticed)
    assert len(noticed) > 20


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("groups", "row = row + 1 WHERE number = 1"),
        ("episodes", "reward = 0.5 WHERE group_number = 1 AND position = 1"),
        ("bundles", "turns = zeroblob(length(turns)) WHERE id = 1"),
        ("steps", "ages = '{\"3\": 8}'"),
        ("versions", "checksum = 'other'"),
        ("notes", "detail = 'other' WHERE id = 1"),
        ("parts", "prompt = 'other'"),
        ("meta", "key = 'grouq_size' WHERE key = 'group_size'"),
    ],
)
def test_a_changed_row_is_named(killed: Path, table: str, change: str) -> None:
    with closing(sqlite3.connect(killed / LEDGER)) as db, db:
        db.execute(f"UPDATE {table} SET {change}")
    with pytest.raises(LedgerError, match=r"damaged|is not a ledger") as caught:
        open_ledger(killed)
    assert table in caught.value.problem or table == "meta"


def test_a_changed_schema_is_noticed(killed: Path) -> None:
    with closing(sqlite3.connect(killed / LEDGER)) as db, db:
        db.execute("CREATE TABLE more (a INTEGER)")
    with pytest.raises(LedgerError, match="its schema has changed"):
        open_ledger(killed)


def test_a_schema_that_is_no_text_is_noticed_by_a_run_that_goes_on(killed: Path) -> None:
    """SQLite's own message quotes the damaged words, and is no text either."""
    (killed / LOG).unlink()
    data = bytearray((killed / LEDGER).read_bytes())
    data[data.index(b",", data.index(b"CREATE TABLE"))] ^= 0x80
    (killed / LEDGER).write_bytes(data)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is damaged"):
        SqliteLedger(killed / LEDGER, group_size=2, groups_per_step=2, checked=True)


def test_a_damaged_log_names_the_way_on_without_it(killed: Path) -> None:
    data = bytearray((killed / LOG).read_bytes())
    data[len(data) // 2] ^= 4
    (killed / LOG).write_bytes(data)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite-wal is damaged at frame \d+ of \d+") as caught:
        open_ledger(killed)
    words = caught.value.remedy.split("mv ")[1].split(",")[0].split()
    Path(words[0]).rename(words[1])
    with closing(open_ledger(killed)) as ledger:
        assert ledger.conservation().groups.submitted == 2, "what was in the file before the log"


def test_a_log_that_was_cut_by_a_kill_is_no_damage(killed: Path) -> None:
    data = (killed / LOG).read_bytes()
    for cut in (len(data) - 1, len(data) - 4119, len(data) - 4120, 33, 32, 0):
        (killed / LOG).write_bytes(data[:cut])
        refuse_damaged_log(killed / LEDGER)


def test_a_ledger_of_an_older_program_is_read_and_says_once_that_it_had_no_checksums(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    shutil.copy(Path(__file__).with_name("ledger_v5.sqlite"), path)
    for _ in range(2):
        with closing(open_ledger(tmp_path)) as ledger:
            assert ledger.conservation().holds
            assert sum(ADOPTED in detail for _, detail, _ in ledger.notes()) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_damage_is_found_before_a_migration_gives_the_rows_new_checksums(killed: Path, damaged: bool) -> None:
    with closing(sqlite3.connect(killed / LEDGER)) as db, db:  # as the version before wrote it
        checksum_rows(db)
        db.execute("ALTER TABLE steps DROP COLUMN lost")
        db.execute(f"UPDATE steps SET row_checksum = row_checksum({', '.join(COLUMNS['steps'][:-1])})")
        db.execute(insert("meta", otherwise="OR REPLACE"), ("schema", _schema(db)))
        db.execute("PRAGMA user_version = 8")
        if damaged:
            db.execute("UPDATE steps SET ages = '{}'")
    if damaged:
        with pytest.raises(LedgerError, match=r"damaged \(1 row of its table steps has changed"):
            SqliteLedger.open(killed / LEDGER)
        return
    with closing(SqliteLedger.open(killed / LEDGER, checked=True)) as ledger:
        assert not any(ADOPTED in detail for _, detail, _ in ledger.notes()), "they had checksums"


def test_a_ledger_that_an_older_program_still_writes_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / LEDGER
    shutil.copy(Path(__file__).with_name("ledger_v5.sqlite"), path)
    before = path.read_bytes()
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match=r"has ledger format 5, .* is in progress"):
            open_ledger(tmp_path)
    assert path.read_bytes() == before
    open_ledger(tmp_path).close()
