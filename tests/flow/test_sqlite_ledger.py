"""The SQLite ledger: what it keeps, what it recalls, what it refuses."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import LedgerError
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.group import GroupState
from headrace.base.types.scored import TokenResults
from headrace.flow.ledger import SqliteLedger, UnitCounts
from headrace.flow.ledger.base import CommitVersion, DropEpisodes, EndEpisode, EndStep, Move, Note, Operation, Submit
from headrace.flow.ledger.browse import Browser
from headrace.flow.ledger.sqlite import IN_MEMORY
from tests.flow.episodes import as_told, ended, sampled

SIZE = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[SqliteLedger]:
    opened = SqliteLedger(path, group_size=SIZE, groups_per_step=1)
    yield opened
    opened.close()


def submit(*numbers: int) -> Submit:
    return Submit(numbers=numbers, rows=tuple(10 * number for number in numbers), at_s=1.0)


def move(number: int, state: GroupState, **details: int | str) -> Move:
    return Move(numbers=(number,), state=state, at_s=2.0, **details)


def train(step: int, number: int, learned: TokenResults | None = None) -> EndStep:
    return EndStep(
        step=step, numbers=(number,), trained_tokens=8, dropped_tokens={}, ages={0: 5, 1: 3}, at_s=3.0, learned=learned
    )


def learned(number: int) -> TokenResults:
    two = np.arange(2, dtype=np.int32)
    return TokenResults(
        groups_E=two * 0 + number, places_E=two, sizes_E=two + 3, log_pi_L=np.full(7, -number - 0.5, np.float32)
    )


def commit(version: int, number: int) -> CommitVersion:
    return CommitVersion(version=version, numbers=(number,), checksum=f"hash {version}", at_s=4.0)


def ready(number: int, *, version: int = 0) -> list[Operation]:
    return [
        submit(number),
        move(number, GroupState.ADMITTED, oldest_version=version),
        move(number, GroupState.RUNNING),
        *(EndEpisode(episode=ended(number, place), at_s=2.0) for place in range(SIZE)),
        move(number, GroupState.SCORED),
        move(number, GroupState.READY, oldest_version=version),
    ]


def trained(number: int) -> list[Operation]:
    return [*ready(number), move(number, GroupState.TAKEN, step=number), train(number, number)]


def apply(ledger: SqliteLedger, *operations: Operation) -> None:
    for operation in operations:
        ledger.apply(operation)


def reopened(ledger: SqliteLedger, path: Path) -> SqliteLedger:
    ledger.close()
    return SqliteLedger(path, group_size=SIZE, groups_per_step=1)


def test_everything_is_there_after_reopening(ledger: SqliteLedger, path: Path) -> None:
    apply(ledger, *trained(0), commit(1, 0), *ready(1, version=1), Note(kind="start", detail="step 0", at_s=9.0))
    again = reopened(ledger, path)
    assert again.conservation().groups == UnitCounts(submitted=2, trained=1, in_flight=1)
    assert again.conservation().tokens == UnitCounts(submitted=16, trained=8, in_flight=8)
    assert again.ages() == {0: 5, 1: 3}
    assert again.notes() == [("start", "step 0", 9.0)]
    resumed = again.roll_back(1)
    assert (resumed.num_submitted, resumed.num_released, resumed.checksums) == (2, 1, {1: "hash 1"})
    (group,) = resumed.groups
    assert (group.number, group.row, group.state, group.oldest_version, group.step) == (
        1,
        10,
        GroupState.READY,
        1,
        None,
    )
    assert [as_told(episode) for episode in group.episodes] == [as_told(ended(1, place)) for place in range(SIZE)]
    again.close()


@pytest.mark.parametrize("reached", ["taken", "trained", "released"])
def test_groups_of_later_steps_are_ready_again_and_remember_their_step(ledger: SqliteLedger, reached: str) -> None:
    apply(ledger, *ready(0), move(0, GroupState.TAKEN, step=0))
    if reached != "taken":
        apply(ledger, train(0, 0))
    if reached == "released":
        apply(ledger, commit(1, 0))
    (group,) = ledger.roll_back(0).groups
    assert (group.state, group.step, len(group.episodes)) == (GroupState.READY, 0, SIZE)
    assert ledger.conservation().tokens == UnitCounts(submitted=8, in_flight=8)
    assert ledger.ages() == {}


@pytest.mark.parametrize("ends_with_commit", [True, False])
def test_groups_of_the_checkpoint_stay_trained(ledger: SqliteLedger, ends_with_commit: bool) -> None:
    apply(ledger, *trained(0), *([commit(1, 0)] if ends_with_commit else []))
    resumed = ledger.roll_back(1)
    assert (resumed.num_released, resumed.groups) == (1, ())
    assert ledger.conservation().groups == UnitCounts(submitted=1, trained=1)


@pytest.mark.parametrize("reached", [1, 2, 3, 4, 5, 6])
def test_what_was_running_is_submitted_again_and_keeps_its_ended_episodes(ledger: SqliteLedger, reached: int) -> None:
    apply(ledger, *ready(0)[:reached])
    (group,) = ledger.roll_back(0).groups
    assert (group.state, group.row) == (GroupState.SUBMITTED, 0)
    assert len(group.episodes) == max(0, min(SIZE, reached - 3))


def test_second_crash_before_the_replay_recalls_the_same(ledger: SqliteLedger, path: Path) -> None:
    apply(ledger, *trained(0), commit(1, 0), *trained(1), *ready(2)[:4])
    first = ledger.roll_back(0)
    again = reopened(ledger, path)
    second = again.roll_back(0)
    assert [(g.number, g.state, g.step) for g in second.groups] == [
        (0, GroupState.READY, 0),
        (1, GroupState.READY, 1),
        (2, GroupState.SUBMITTED, None),
    ]
    assert [(g.number, g.state, g.step) for g in first.groups] == [(g.number, g.state, g.step) for g in second.groups]
    again.close()


def test_second_crash_after_a_newer_checkpoint_keeps_what_that_contains(ledger: SqliteLedger) -> None:
    apply(ledger, *trained(0), commit(1, 0), *trained(1), commit(2, 1))
    ledger.roll_back(0)
    apply(ledger, move(0, GroupState.TAKEN, step=0), train(0, 0), commit(1, 0), move(1, GroupState.TAKEN, step=1))
    resumed = ledger.roll_back(1)
    assert resumed.num_released == 1
    assert [(group.number, group.state, group.step) for group in resumed.groups] == [(1, GroupState.READY, 1)]
    assert ledger.conservation().holds


def test_what_a_step_made_of_its_tokens_is_kept_until_the_step_is_made_again(ledger: SqliteLedger, path: Path) -> None:
    for number in range(2):
        taken = move(number, GroupState.TAKEN, step=number)
        apply(ledger, *ready(number), taken, train(number, number, learned(number)), commit(number + 1, number))
    browser = Browser(path)
    for number in range(2):
        found = browser.token_results(number)
        assert found is not None
        assert found.log_pi_L.tolist() == learned(number).log_pi_L.tolist()
    ledger.roll_back(1)
    assert browser.token_results(0) is not None
    assert browser.token_results(1) is None
    browser.close()


def test_dropped_group_stays_dropped_with_its_reason(ledger: SqliteLedger) -> None:
    failed = EndEpisode(episode=ended(0, 0, cause="reward_error: line 3"), at_s=2.0)
    apply(ledger, *ready(0)[:3], failed, *ready(0)[4:5], move(0, GroupState.DROPPED, reason="too_few_episodes"))
    assert ledger.roll_back(0).dropped == {"too_few_episodes": 1}
    books = ledger.conservation()
    assert books.groups == UnitCounts(submitted=1, dropped={"too_few_episodes": 1})
    assert books.episodes == UnitCounts(submitted=2, dropped={"reward_error": 1, "too_few_episodes": 1})
    assert books.tokens == UnitCounts(submitted=8, dropped={"reward_error": 4, "too_few_episodes": 4})


def test_episode_that_ends_again_after_a_crash_is_counted_once(ledger: SqliteLedger) -> None:
    apply(ledger, *ready(0)[:4])
    ledger.roll_back(0)
    apply(ledger, EndEpisode(episode=ended(0, 0), at_s=5.0))
    assert ledger.conservation().tokens == UnitCounts(submitted=4, in_flight=4)


def test_refused_operation_leaves_no_trace(ledger: SqliteLedger) -> None:
    apply(ledger, submit(0))
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.apply(submit(1, 0))
    assert ledger.conservation().groups == UnitCounts(submitted=1, in_flight=1)
    apply(ledger, submit(1))
    assert ledger.conservation().groups.submitted == 2


def test_operations_in_one_transaction_come_to_the_same_as_one_after_the_other(ledger: SqliteLedger) -> None:
    out = DropEpisodes(number=2, places=(0,), status=EpisodeStatus.MASKED, reason="too_long", at_s=2.0)
    lives = [*trained(0), commit(1, 0), *ready(1, version=1), *ready(2), out, *ready(3)[:5]]
    lives += [move(3, GroupState.DROPPED, reason="r"), move(1, GroupState.TAKEN, step=1)]
    other = SqliteLedger(IN_MEMORY, group_size=SIZE, groups_per_step=1)
    apply(other, *lives)
    ledger.apply(*lives)
    assert (ledger.conservation(), ledger.steps()) == (other.conservation(), other.steps())
    assert ledger.updates() == other.updates() == {0: 1}
    assert ledger.attempts(0) == other.attempts(0)
    told = [
        [(g.number, g.state, g.step, g.oldest_version) for g in each.roll_back(1).groups] for each in (ledger, other)
    ]
    assert told[0] == told[1]
    assert (1, GroupState.READY, 1, 1) in told[0]
    for number in range(4):
        assert [as_told(each) for each in ledger.episodes(number)] == [as_told(e) for e in other.episodes(number)]
    other.close()


def test_books_are_of_one_moment_while_another_process_writes(ledger: SqliteLedger, path: Path) -> None:
    apply(ledger, *ready(0))
    reader = SqliteLedger.open(path)
    later = iter([move(0, GroupState.TAKEN, step=0), train(0, 0), commit(1, 0), *ready(1)])

    def meanwhile(statement: str) -> None:
        if statement.startswith("SELECT"):
            ledger.apply(next(later, Note(kind="more", detail="", at_s=0.0)))

    reader._db.set_trace_callback(meanwhile)
    books = reader.conservation()
    assert books.holds
    assert books.groups == UnitCounts(submitted=1, in_flight=1)
    reader._db.set_trace_callback(None)
    assert reader.conservation().groups == UnitCounts(submitted=2, trained=1, in_flight=1)
    reader.close()


@pytest.mark.parametrize(
    ("changed", "words"), [({"group_size": 3}, "flow.group_size=3"), ({"groups_per_step": 4}, "4")]
)
def test_ledger_that_was_begun_with_other_sizes_is_refused(
    ledger: SqliteLedger, path: Path, changed: dict[str, int], words: str
) -> None:
    with pytest.raises(LedgerError, match=words) as refused:
        SqliteLedger(path, **{"group_size": SIZE, "groups_per_step": 1, **changed})
    assert "set flow." in refused.value.remedy


def test_ledger_of_a_newer_version_is_refused(ledger: SqliteLedger, path: Path) -> None:
    ledger._db.execute("PRAGMA user_version = 99")
    for opening in (lambda: reopened(ledger, path), lambda: SqliteLedger.open(path)):
        with pytest.raises(LedgerError, match=r"ledger format 99, this program writes \d"):
            opening()


@pytest.mark.parametrize("content", [b"not a database at all" * 300, b"SQLite format 3\0" + b"\xff" * 5000])
def test_file_that_is_no_database_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="cannot be opened"):
        SqliteLedger(path, group_size=SIZE, groups_per_step=1)
    with pytest.raises(LedgerError, match="is not a ledger"):
        SqliteLedger.open(path)
    assert path.read_bytes() == content


def test_empty_or_missing_ledger_is_refused_for_reading(path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger at"):
        SqliteLedger.open(path)
    assert not path.exists()
    sqlite3.connect(path).close()
    path.touch()
    with pytest.raises(LedgerError, match="is not a ledger"):
        SqliteLedger.open(path)


def test_episode_whose_bytes_rotted_is_refused_in_words(ledger: SqliteLedger) -> None:
    apply(ledger, *ready(0))
    ledger._db.execute("UPDATE bundles SET turns = x'c1'")
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger.roll_back(0)


def test_killed_run_is_recovered_from_its_write_ahead_log(ledger: SqliteLedger, path: Path, tmp_path: Path) -> None:
    apply(ledger, *trained(0))
    copy = tmp_path / "copy"
    copy.mkdir()
    for part in path.parent.glob("ledger.sqlite*"):  # as a killed process leaves it: nothing was closed
        shutil.copy(part, copy / part.name)
    assert (copy / "ledger.sqlite-wal").stat().st_size > 0
    recovered = SqliteLedger.open(copy / "ledger.sqlite")
    assert recovered.conservation().groups == UnitCounts(submitted=1, trained=1)
    recovered.close()


def test_ledger_in_memory_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = SqliteLedger(":memory:", group_size=SIZE, groups_per_step=1)
    apply(ledger, *trained(0))
    assert ledger.conservation().holds
    ledger.close()
    assert not list(tmp_path.iterdir())


def test_long_episode_comes_back_token_for_token(ledger: SqliteLedger) -> None:
    long = ended(0, 0, tokens=sampled(20_000, (0, 7)))
    apply(ledger, submit(0), EndEpisode(episode=long, at_s=1.0))
    (back,) = ledger.episodes(0)
    assert as_told(back) == as_told(long)
