"""The columns of ready groups lie in files, and the groups that the controller keeps are the same without them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import StoreError
from headrace.base.store import StoreReader
from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.scored import ScoredGroup
from headrace.flow import ready as ready_module
from headrace.flow.layout import inline, lay_out, make_outline
from headrace.flow.ready import INLINE_TOKENS, ReadyColumns
from tests.flow.outlines import groups_with, make_credit

CODEC = MessageCodec(Batch)


def large(seed: int, count: int) -> list[ScoredGroup]:
    return groups_with(seed, num_groups=count + 1, longest=400)[:count]


def test_the_learner_reads_the_batch_that_was_put_into_files(tmp_path: Path) -> None:
    groups, store = groups_with(1, longest=400), ReadyColumns(tmp_path, file_bytes=200_000)
    put = [store.put(group) for group in groups]
    assert len(os.listdir(tmp_path)) > 1
    assert all(group.columns is not None for group in put)
    outline = make_outline(1, put, make_credit(put, 1), agents=("critic",), oldest_version=1)
    plain = make_outline(1, groups, make_credit(groups, 1), agents=("critic",), oldest_version=1)
    assert len(CODEC.encode(outline)) < len(CODEC.encode(plain)) / 50
    reader = StoreReader(tmp_path)
    laid_out = lay_out(outline, lambda group: reader.part(group.columns))  # type: ignore[arg-type]
    wanted = lay_out(plain, inline)
    assert CODEC.encode(laid_out.unmasked) == CODEC.encode(wanted.unmasked)
    assert CODEC.encode(laid_out.batch) == CODEC.encode(wanted.batch)
    assert [each.num_loss_tokens for each in outline.groups] == [each.num_loss_tokens for each in plain.groups]


def test_the_tokens_of_a_group_that_was_put_are_views_of_its_file(tmp_path: Path) -> None:
    (group,), store = large(2, 1), ReadyColumns(tmp_path)
    put = store.put(group)
    for before, after in zip(group.episodes, put.episodes, strict=True):
        assert (before.key, before.status, before.reward) == (after.key, after.status, after.reward)
        assert before.num_sampled == after.num_sampled
        for one, other in zip(before.turns, after.turns, strict=True):
            assert (one.author, one.parent, one.untrained) == (other.author, other.parent, other.untrained)
            assert one.tokens.any_sampled == other.tokens.any_sampled
            for name in ("ids_T", "logprobs_T", "versions_T"):
                np.testing.assert_array_equal(
                    getattr(one.tokens, name),
                    getattr(other.tokens, name),
                )
    assert put.versions() == group.versions()


def test_a_small_group_stays_in_memory(tmp_path: Path) -> None:
    store = ReadyColumns(tmp_path / "columns")
    small = groups_with(3, size=2, longest=8)[0]
    assert sum(len(turn.tokens) for episode in small.episodes for turn in episode.turns) <= INLINE_TOKENS
    assert store.put(small) is small
    assert not (tmp_path / "columns").exists()


def test_a_file_is_removed_when_its_groups_are_done_and_the_next_is_begun(tmp_path: Path) -> None:
    store = ReadyColumns(tmp_path, file_bytes=1)  # each group has a file of its own
    one, two, three = [store.put(group) for group in large(4, 3)]
    assert len(os.listdir(tmp_path)) == 3
    store.release(two)
    assert sorted(os.listdir(tmp_path)) == ["ready.000000", "ready.000002"]
    assert two.episodes[0].turns[0].tokens.ids_T.sum() >= 0  # what still looks at it can do so
    store.release(three)
    assert sorted(os.listdir(tmp_path)) == ["ready.000000", "ready.000002"], "the file that is written to stays"
    store.put(large(5, 1)[0])
    store.release(one)
    assert sorted(os.listdir(tmp_path)) == ["ready.000003"]
    store.clear()
    assert os.listdir(tmp_path) == []


def test_groups_share_a_file_until_it_is_full(tmp_path: Path) -> None:
    store = ReadyColumns(tmp_path)
    put = [store.put(group) for group in large(6, 3)]
    assert os.listdir(tmp_path) == ["ready.000000"]
    for group in put:
        store.release(group)
    reader = StoreReader(tmp_path)
    assert [len(reader.part(group.columns)) == group.columns.num_bytes for group in put if group.columns] == [True] * 3


def test_files_of_an_earlier_life_are_removed_and_those_of_engines_stay(tmp_path: Path) -> None:
    for name in ("ready.000000", "ready.000007", "engine-0.000000", "learned.000000"):
        (tmp_path / name).write_bytes(b"x")
    ReadyColumns(tmp_path).clear()
    assert sorted(os.listdir(tmp_path)) == ["engine-0.000000", "learned.000000"]
    ReadyColumns(tmp_path / "none").clear()


def test_a_group_for_which_there_is_no_room_is_refused_by_name(tmp_path: Path) -> None:
    store = ReadyColumns(tmp_path, limit_bytes=300_000, file_bytes=200_000)
    groups = large(7, 8)

    def put_all() -> None:
        for group in groups:
            store.put(group)

    with pytest.raises(StoreError, match=r"flow\.columns\.limit_gb"):
        put_all()


def test_a_full_store_has_room_again_when_no_group_needs_its_newest_file(tmp_path: Path) -> None:
    store, groups, put = ReadyColumns(tmp_path, limit_bytes=300_000, file_bytes=200_000), large(7, 8), []

    def put_all() -> None:
        for group in groups:
            put.append(store.put(group))

    with pytest.raises(StoreError):
        put_all()
    for group in put:
        store.release(group)
    assert store.put(groups[0]).columns is not None
    assert os.listdir(tmp_path) == ["ready.000001"]


def test_a_store_that_was_cleared_keeps_no_file_open(tmp_path: Path) -> None:
    store = ReadyColumns(tmp_path)
    store.put(large(7, 1)[0])
    store.clear()
    open_files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
                  and os.path.lexists(f"/proc/self/fd/{name}")]  # fmt: skip
    assert not [path for path in open_files if path.startswith(str(tmp_path))]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "columns").write_text("a file")
    with pytest.raises(StoreError, match="columns"):
        ReadyColumns(tmp_path / "columns").put(large(8, 1)[0])


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(ready_module.os, "truncate", refuse)
    with pytest.raises(StoreError, match=r"ready\.000000 cannot be mapped: Cannot allocate memory"):
        ReadyColumns(tmp_path).put(large(9, 1)[0])
