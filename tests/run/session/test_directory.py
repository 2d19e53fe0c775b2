from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.config import merge
from headrace.base.errors import ConfigError, DataError, RunError
from headrace.control.saving import CHECKPOINTS
from headrace.flow.ledger.opening import SQLITE_FILE, is_locked
from headrace.learner import checkpoint
from headrace.learner.disk import Damaged
from headrace.run.observe.rundata import load_run
from headrace.run.session.config import load_config
from headrace.run.session.directory import (
    CONFIG_FILE,
    LOCK_S,
    choose_directory,
    find_changed_settings,
    find_run_file,
    lock_directory,
    read_settings,
    read_status,
    read_summary,
    write_json,
    write_sealed,
)


def test_a_reader_that_asks_whether_a_directory_is_held_keeps_no_run_from_it(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    reader = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)  # as the question does, for a moment
    threading.Timer(LOCK_S / 4, os.close, [reader]).start()
    with lock_directory(tmp_path, resume=False):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_directory_is_held_by_one_process_alone(tmp_path: Path) -> None:
    with lock_directory(tmp_path / "run", resume=False):
        refused = pytest.raises(ConfigError, match="is in use by another process")
        with refused, lock_directory(tmp_path / "run", resume=False):
            pass
        (tmp_path / "run" / SQLITE_FILE).touch()
    with lock_directory(tmp_path / "run", resume=True):
        pass


def test_a_run_is_resumed_only_when_asked_and_only_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume"), lock_directory(tmp_path / "run", resume=True):
        pass
    assert not (tmp_path / "run").exists()
    (tmp_path / SQLITE_FILE).touch()
    refused = pytest.raises(ConfigError, match=r"holds a run already(.|\n)*--resume")
    with refused, lock_directory(tmp_path, resume=False):
        pass


@pytest.mark.parametrize("resume", [True, False])
def test_checkpoints_without_their_ledger_are_told_in_one_way_whatever_is_asked(tmp_path: Path, resume: bool) -> None:
    unfinished = checkpoint.begin(tmp_path / CHECKPOINTS, 3)
    (unfinished / "weights").touch()
    checkpoint.commit(unfinished, checkpoint.SnapshotState(step=3, version=3, config_fingerprint="", controller={}))
    words = r"newest of step 3, and no ledger \(ledger\.sqlite is missing(.|\n)*model\.path = '.*step-000003'"
    with pytest.raises(ConfigError, match=words) as error, lock_directory(tmp_path, resume=resume):
        pass
    assert "--resume" not in error.value.remedy


def test_a_log_that_sqlite_removes_and_makes_anew_is_no_loss_and_a_ledger_that_goes_is_one(tmp_path: Path) -> None:
    ledger, log = tmp_path / "run" / SQLITE_FILE, tmp_path / "run" / f"{SQLITE_FILE}-wal"
    with lock_directory(tmp_path / "run", resume=False) as directory:
        directory.refuse_lost()  # there is no ledger yet
        files = []
        for step in range(2):  # the lives of a run, or a reader that is the last to leave
            with closing(sqlite3.connect(ledger, isolation_level=None)) as db:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(f"CREATE TABLE step_{step} (number)")
                files.append(log.stat().st_ctime_ns)
                directory.refuse_lost()
            assert not log.exists()
            directory.refuse_lost()
        assert files[0] != files[1]
        ledger.rename(tmp_path / "elsewhere")
        with pytest.raises(RunError, match=r"ledger\.sqlite was removed or replaced"):
            directory.refuse_lost()
        ledger.touch()
        with pytest.raises(RunError, match=r"ledger\.sqlite was removed or replaced"):
            directory.refuse_lost()
        (tmp_path / "elsewhere").replace(ledger)
        directory.refuse_lost()


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="cannot be used"), lock_directory(tmp_path / "run", resume=False):
        pass


def test_a_run_without_a_directory_gets_one_named_after_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def choose(asked: str) -> Path:
        return choose_directory(asked, VirtualClock())

    chosen = run_virtual(choose(""))
    assert chosen.parent == tmp_path / "runs"
    assert chosen.name.startswith("19")
    assert run_virtual(choose("out")) == tmp_path / "out"


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}'
    assert os.listdir(tmp_path) == ["a.json"]
    with pytest.raises(RunError, match="cannot be written"):
        write_json(tmp_path / "missing" / "a.json", {})


def test_files_that_are_missing_or_damaged_are_told_apart(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    assert read_summary(tmp_path) is None
    for name, read in (("status.json", read_status), ("summary.json", read_summary)):
        (tmp_path / name).write_bytes(b'{"phase": \xff')
        with pytest.raises(DataError, match=f"{name} is damaged"):
            read(tmp_path)


def test_a_directory_without_a_run_cannot_be_evaluated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        find_run_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is damaged"):
        find_run_file(tmp_path)


def test_evaluating_a_directory_leaves_the_snapshot_that_is_being_written_alone(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model": {"path": "m"}})
    unfinished = tmp_path / "checkpoints" / "step-000003.tmp-1"
    unfinished.mkdir(parents=True)
    tree = find_run_file(tmp_path)
    assert isinstance(tree, dict)
    assert merge(tree) == {"model": {"path": "m"}}
    assert unfinished.exists()


def test_settings_that_no_longer_exist_are_passed_over_in_the_record_of_an_older_run(tmp_path: Path) -> None:
    launch = {"join": "", "join_password_env": ""}
    write_json(tmp_path / CONFIG_FILE, {"model": {"path": str(tmp_path)}, "launch": launch})
    assert read_settings(tmp_path)["launch"] == {"join": ""}
    with pytest.raises(ConfigError, match=r"launch\.join_password_env is not a setting"):
        load_config({"launch": launch})


def test_settings_of_a_run_that_have_changed_are_neither_resumed_with_nor_reported(tmp_path: Path) -> None:
    write_sealed(tmp_path / CONFIG_FILE, {"learner": {"lr": 3e-4}})
    (tmp_path / "ledger.sqlite").touch()
    with lock_directory(tmp_path, resume=True):
        pass
    assert load_run(tmp_path).config == {"learner": {"lr": 3e-4}}
    text = (tmp_path / CONFIG_FILE).read_text()
    (tmp_path / CONFIG_FILE).write_text(text.replace("0.0003", "0.5"))
    with pytest.raises(Damaged, match=f"{CONFIG_FILE} has changed since"), lock_directory(tmp_path, resume=True):
        pass
    found = load_run(tmp_path)
    assert found.config == {}
    assert any(f"{CONFIG_FILE} has changed since" in note for note in found.notes)


def test_settings_that_decide_what_is_learned_and_changed_are_named_with_both_values(tmp_path: Path) -> None:
    before = {"learner": {"lr": 1e-3, "beta": 1}, "run": {"steps": 3, "seed": 1}, "flow": {"gone": 1}}
    assert find_changed_settings(tmp_path, before) == []
    write_sealed(tmp_path / "config.json", before)
    now = {"learner": {"lr": 2e-3, "beta": 1, "new": 5}, "run": {"steps": 9, "seed": 2}, "launch": {"threads": 2}}
    assert find_changed_settings(tmp_path, now) == [
        "learner.lr = 0.002 (before: 0.001)",
        "run.seed = 2 (before: 1)",
    ]
