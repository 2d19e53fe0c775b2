"""Older ledgers are brought forward; damaged ones are repaired from their log, or refused with what is known."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import LedgerError
from headrace.base.types.group import GroupState
from headrace.flow.ledger import SqliteLedger, UnitCounts, sqlite
from headrace.flow.ledger.base import EndEpisode
from headrace.flow.ledger.opening import open_ledger
from headrace.testing.ledgers import commit_version, record_parts, sampled_tokens, start_group, train_group, turn_part
from headrace.testing.ledgers import ended_episode as made
from tests.redis_server import started

VERSION_1 = Path(__file__).with_name("ledger_v1.sqlite")
"""Written by the program of format 1: two groups trained, one ready, one running, one dropped."""
VERSION_5 = Path(__file__).with_name("ledger_v5.sqlite")
"""Written by the program of format 5, in which every episode had a row of turns: a group trained, one ready, and
one that runs, with an episode whose turn has more than tokens, and a part of another."""


def opened(path: Path, **more: bool) -> SqliteLedger:
    return SqliteLedger(path, group_size=2, groups_per_step=1, **more)


def test_ledger_of_format_1_is_brought_forward_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    shutil.copy(VERSION_1, path)
    ledger = opened(path, checked=True)
    books = ledger.conservation()
    assert books.groups == UnitCounts(submitted=5, trained=2, dropped={"reward_error": 1}, in_flight=2)
    assert books.tokens == UnitCounts(submitted=36, trained=16, dropped={"reward_error": 8}, in_flight=12)
    assert [len(each.turns[1].tokens) for each in ledger.episodes(2)] == [4, 4]
    ledger.apply(record_parts(turn_part(3, 1, sampled_tokens(5))))
    ledger.close()
    resumed = SqliteLedger.open(path).roll_back(1)
    assert [(g.number, g.state, len(g.episodes), len(g.partial_turns)) for g in resumed.groups] == [
        (1, GroupState.READY, 2, 0),
        (2, GroupState.READY, 2, 0),
        (3, GroupState.SUBMITTED, 1, 1),
    ]


def test_ledger_of_format_5_is_brought_forward_with_all_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    shutil.copy(VERSION_5, path)
    ledger = opened(path, checked=True)
    assert ledger.conservation().holds
    assert ledger.conservation().tokens == UnitCounts(submitted=25, trained=8, in_flight=17)
    (_, answer), (episode,) = ledger.episodes(1)[1].turns, ledger.episodes(2)
    assert answer.tokens.logprobs_T.tolist() == [0.0, -1.0, -2.0, -3.0]
    assert (episode.parts, episode.turns[1].reward, episode.turns[1].untrained) == ({"a": 0.5}, 0.25, "not_chosen")
    assert episode.turns[1].tokens.entropies_T is not None
    assert episode.turns[1].tokens.entropies_T.tolist() == [0.0, 0.5, 1.0, 1.5]
    ended = [EndEpisode(episode=made(2, place), at_s=5.0) for place in range(2)]
    ledger.apply(*ended)  # old rows and new ones beside each other
    assert [each.num_sampled for number in (0, 1, 2) for each in ledger.episodes(number)] == [4] * 6
    assert ledger.conservation().tokens.dropped == {"discarded": 1}
    ledger.close()


def test_migration_that_fails_leaves_the_older_format_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    shutil.copy(VERSION_1, path)
    scripts = sqlite.steps()
    monkeypatch.setattr(sqlite, "steps", lambda: [scripts[0], scripts[1] + "INSERT INTO nowhere VALUES (1);"])
    with pytest.raises(LedgerError, match="nowhere"):
        opened(path)
    monkeypatch.undo()
    with sqlite3.connect(path) as db:
        assert sqlite.schema_version(db) == 1
        assert db.execute("SELECT count(turns) FROM episodes").fetchone() == (9,)
    assert opened(path).conservation().holds


def filled(path: Path) -> SqliteLedger:
    """A ledger of some pages, all of them copied into the file, with two steps."""
    ledger = opened(path)
    for operation in (*train_group(0), commit_version(1, 0), *train_group(1)):
        ledger.apply(operation)
    for operation in (*start_group(2), record_parts(turn_part(2, 0, sampled_tokens(50_000)))):
        ledger.apply(operation)
    ledger.persist()
    return ledger


def overwrite(path: Path, start: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * (path.stat().st_size - start))


def test_pages_that_the_log_still_holds_mend_a_damaged_file(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.sqlite")
    books = ledger.conservation()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):  # as a killed process leaves it
        shutil.copy(tmp_path / name, copy / name)
    ledger.close()
    overwrite(copy / "ledger.sqlite", 4096)
    fixed = opened(copy / "ledger.sqlite", checked=True)
    assert fixed.conservation() == books
    fixed.close()


WORDS = r"is damaged .*(last step that can be read is 1|steps can be read)"


@pytest.mark.parametrize("start", [4096, 100])
def test_damaged_file_is_refused_with_the_last_step_that_can_be_read(tmp_path: Path, start: int) -> None:
    path = tmp_path / "ledger.sqlite"
    filled(path).close()
    overwrite(path, path.stat().st_size - 3 * 4096 if start == 4096 else start)
    with pytest.raises(
        LedgerError, match=r"is damaged .*(last step that can be read is 1|steps can be read)"
    ) as refused:
        opened(path, checked=True)
    assert "newest checkpoint" in refused.value.remedy


WRITES_FOR_EVER = """
import itertools, sys
from pathlib import Path
from headrace.flow import FlowConfig
from headrace.flow.ledger.opening import make_ledger
from headrace.testing.ledgers import *
from headrace.flow.ledger.base import EndEpisode

run_dir, url = Path(sys.argv[1]), sys.argv[2]
config = FlowConfig(group_size=2, groups_per_step=1, ledger="redis" if url else "sqlite", ledger_url=url)
ledger = make_ledger(config, run_dir)
first = ledger.conservation().groups.submitted
for number in itertools.count(first):
    for operation in start_group(number):
        ledger.apply(operation)
    for size in (3, 900, 40):
        parts = turn_part(number, 0, sampled_tokens(size)), turn_part(number, 1, sampled_tokens(1), lost="restarted")
        ledger.apply(record_parts(*parts))
    ledger.apply(EndEpisode(episode=ended_episode(number, 0), at_s=0.0))
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_writer_killed_at_random_moments_leaves_books_that_balance(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    server = started(Path("/tmp") / f"hr-{tmp_path.parent.name}-{tmp_path.name}") if kind == "redis" else None
    try:
        url = "" if server is None else server.url
        command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path), url]
        done: set[int] = set()
        for _ in range(8):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
                assert process.stdout is not None
                done.update(int(process.stdout.readline()) for _ in range(int(rng.integers(1, 60))))
                process.send_signal(signal.SIGKILL)
                done.update(map(int, process.stdout.read().split()))
            check_after_kill(tmp_path, done)
    finally:
        if server is not None:
            server.kill()
            shutil.rmtree(server.directory)


def check_after_kill(run_dir: Path, done: set[int]) -> None:
    """All that it told of is there; of each running turn every token, or the reason why not."""
    ledger = open_ledger(run_dir)
    books = ledger.conservation()
    assert books.holds
    assert max(done) + 1 <= books.groups.submitted <= max(done) + 3
    groups = {group.number: group for group in ledger.roll_back(0).groups}
    for number in done:
        assert [each.num_sampled for each in groups[number].episodes] == [4]
        assert [len(begun.tokens) for begun in groups[number].partial_turns] == [1]
    discarded = books.tokens.dropped["discarded"]
    assert len(done) * (943 - 4) <= discarded <= (len(done) + 3) * (943 - 4)
    ledger.close()
