"""Files of the store are removed when no group that may have columns in them can be trained again, and not before."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.base.store import ColumnStore, StoreReader
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, TokenChunk, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.recorded import Routing
from headrace.base.types.tokens import Tokens
from headrace.flow.columns import ColumnFiles, ColumnsConfig, collect_files, remove
from headrace.flow.config import FlowConfig
from headrace.flow.ledger.base import ResumedGroup

PRUNING = ColumnsConfig(keep="until_trained")


def turn(store: ColumnStore, count: int = 100) -> Turn:
    """A turn whose experts are written to ``store``."""
    tokens = Tokens(
        ids_T=np.zeros(count, np.int32),
        logprobs_T=np.zeros(count, np.float32),
        versions_T=np.zeros(count, np.int32),
        routing=Routing(known_T=np.ones(count, bool), experts_RLK=np.zeros((count, 4, 2), np.uint8)),
    )
    return Turn(author="policy", tokens=store.chunk(TokenChunk(tokens=tokens)).tokens)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def prune(files: ColumnFiles, step: int) -> list[str]:
    unneeded = files.take_unneeded(step)
    remove(unneeded)
    return [file.name for file in unneeded]


def test_a_file_is_removed_with_the_snapshot_behind_the_last_group_in_it(tmp_path: Path) -> None:
    store, files = ColumnStore(tmp_path, "e", file_bytes=1700), ColumnFiles(tmp_path, PRUNING)  # two turns a file
    for number in range(5):
        files.record_ended_episode(number, [turn(store)], list)
    assert names(tmp_path) == ["e.000000", "e.000001", "e.000002"]
    files.record_trained_groups([0, 1, 2], step=0)
    assert prune(files, 0) == []
    assert prune(files, 1) == ["e.000000"]  # group 3 keeps the second file
    files.record_dropped_group(3)
    files.record_trained_groups([4], step=1)
    assert prune(files, 1) == ["e.000001"]
    assert prune(files, 2) == []  # the engine may still write into the newest
    assert names(tmp_path) == ["e.000002"]


def test_a_file_that_a_running_group_may_have_columns_in_stays(tmp_path: Path) -> None:
    store, files = ColumnStore(tmp_path, "e", file_bytes=1700), ColumnFiles(tmp_path, PRUNING)
    early = turn(store)  # of group 7, which has not ended
    files.record_ended_episode(0, [turn(store)], lambda: [7])
    files.record_ended_episode(1, [turn(store)], lambda: [7])  # the second file: the first is closed
    files.record_trained_groups([0, 1], step=0)
    assert prune(files, 9) == []
    files.record_ended_episode(7, [early], list)
    assert prune(files, 9) == []
    files.record_trained_groups([7], step=9)
    assert prune(files, 9) == []
    assert prune(files, 10) == ["e.000000"]


def test_files_are_told_apart_by_their_engines(tmp_path: Path) -> None:
    files, none = ColumnFiles(tmp_path, PRUNING), list[int]
    one = ColumnStore(tmp_path, "engine-1", file_bytes=900)
    other = ColumnStore(tmp_path, "engine-11", file_bytes=1700)  # two turns a file
    files.record_ended_episode(0, [turn(other)], none)
    files.record_ended_episode(1, [turn(one)], none)
    files.record_ended_episode(2, [turn(one)], none)  # closes the first file of engine-1, and none of engine-11
    late = turn(other)  # of group 9, which runs
    files.record_ended_episode(3, [turn(other)], lambda: [9])
    files.record_trained_groups([0, 1, 2, 3], step=0)
    assert prune(files, 1) == ["engine-1.000000"]
    files.record_ended_episode(9, [late], none)
    files.record_dropped_group(9)
    assert prune(files, 1) == ["engine-11.000000"]


def test_all_files_are_kept_unless_the_settings_say_otherwise(tmp_path: Path) -> None:
    store, files = ColumnStore(tmp_path, "e", file_bytes=900), ColumnFiles(tmp_path, ColumnsConfig())
    for number in range(3):
        files.record_ended_episode(number, [turn(store)], list)
        files.record_trained_groups([number], step=0)
    assert prune(files, 5) == []
    assert len(names(tmp_path)) == 3


def test_a_resumed_run_keeps_what_its_groups_need(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path, "e", file_bytes=900)
    turns = [turn(store) for _ in range(5)]
    (tmp_path / "notes").write_text("not of the store")
    episode = EpisodeGraph(key=EpisodeKey(3, 0), turns=[turns[1]])
    running = TokenChunk(tokens=turns[3].tokens, key=EpisodeKey(4, 0))
    ready = ResumedGroup(
        number=3, row=0, state=GroupState.READY, oldest_version=0, step=None, episodes=(episode,)
    )  # fmt: skip
    waiting = replace(ready, number=4, state=GroupState.SUBMITTED, episodes=(), partial_turns=(running,))
    files = ColumnFiles(tmp_path, PRUNING)
    files.record_resumed_groups([ready, waiting])
    assert prune(files, 2) == ["e.000000", "e.000002"]
    later = ColumnStore(tmp_path, "e", file_bytes=900)
    files.record_ended_episode(4, [turns[3], turn(later)], list)
    files.record_trained_groups([3, 4], step=2)
    assert prune(files, 3) == ["e.000001", "e.000003", "e.000004"]
    assert names(tmp_path) == ["e.000005", "notes"]


def test_a_store_that_was_synced_is_whole(tmp_path: Path) -> None:
    store, files = ColumnStore(tmp_path / "columns", "e"), ColumnFiles(tmp_path / "columns", ColumnsConfig())
    files.sync()
    one = turn(store)
    files.sync()
    files.sync()
    assert one.tokens.routing is not None
    assert len(StoreReader(tmp_path / "columns").routing(one.tokens.routing).experts_RLK) == 100
    ColumnFiles(tmp_path / "nowhere", ColumnsConfig()).sync()


def test_columns_in_memory_name_no_file(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path, "e")
    long, short = turn(store), turn(store, count=3)
    assert collect_files([short]) == set()
    mixed = Turn(author="policy", tokens=Tokens.concat([short.tokens, long.tokens, short.tokens]))
    assert collect_files([mixed]) == {"e.000000"}


@pytest.mark.parametrize("tree", [{"limit_gb": 0.5}, {"keep": "never"}, {"keeps": "always"}])
def test_settings_of_the_store_that_cannot_work_are_refused(tree: dict[str, object]) -> None:
    with pytest.raises((ConfigError, ValueError), match="columns"):
        FlowConfig.model_validate({"columns": tree})


def test_ready_groups_are_left_to_their_own_life_and_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("e.000000", "e.000001", "ready.000000", "learned.000000", "learned.000001"):
        (tmp_path / name).write_bytes(b"columns")
    files = ColumnFiles(tmp_path, PRUNING)
    files.record_resumed_groups([])
    assert prune(files, 9) == ["e.000000"]
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    files.sync()
    kept = ["e.000001", "learned.000000", "learned.000001"]
    assert sorted(synced) == sorted((tmp_path / name).stat().st_ino for name in kept)
