"""Kept-sets and experts in a store: what is read is what was written, and what cannot be read is known by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import StoreError
from headrace.base.store import (
    ColumnStore,
    StoreReader,
    directory_bytes,
    file_name,
    lies_in_store,
    read_batch,
    remove_groups,
)
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, StopReason, TokenChunk, Turn
from headrace.base.types.messages import controller, learner
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Chunks, EngineStats
from headrace.base.types.messages.learner import Logprobs
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.scored import paths
from headrace.base.types.tokens import Tokens
from headrace.flow.ledger.bundles import decode_episode, encode_bundle

CODEC, ORDERS = MessageCodec(controller.Message), MessageCodec(learner.Message)
LAYERS, EXPERTS = 6, 2


def tokens_of(rng: np.random.Generator, count: int, *, kept: bool = True, routing: bool = True) -> Tokens:
    """Sampled tokens with kept-sets of 0 to 9 ids, the sampled one first, and experts of half of them."""
    ids = rng.integers(0, 50, count)
    sets = [[int(token), *range(50, 50 + int(rng.integers(0, 9)))] if rng.random() < 0.8 else [] for token in ids]
    known = rng.random(count) < 0.5
    experts = rng.integers(0, 8, (int(known.sum()), LAYERS, EXPERTS)).astype(np.uint8)
    return Tokens(
        ids_T=ids.astype(np.int32),
        logprobs_T=rng.normal(size=count).astype(np.float32),
        versions_T=np.full(count, 3, np.int32),
        kept=KeptSets.from_spans(sets) if kept else None,
        routing=Routing(known_T=known, experts_RLK=experts) if routing else None,
    )


def same(one: Tokens, other: Tokens) -> None:
    assert msgspec.msgpack.encode(one, enc_hook=np.ndarray.tolist) == msgspec.msgpack.encode(
        other, enc_hook=np.ndarray.tolist
    )


def in_memory(tokens: Tokens, directory: Path) -> Tokens:
    reader = StoreReader(directory)
    return msgspec.structs.replace(
        tokens,
        kept=tokens.kept and reader.kept(tokens.kept),
        routing=tokens.routing and reader.routing(tokens.routing),
    )


def sent(chunk: TokenChunk) -> TokenChunk:
    """The chunk after its way from the engine to the controller."""
    message = CODEC.decode(CODEC.encode(Chunks(chunks=(chunk,), stats=EngineStats())))
    assert isinstance(message, Chunks)
    return message.chunks[0]


@pytest.mark.parametrize("seed", range(4))
def test_stored_columns_are_joined_and_cut_like_columns_in_memory(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = ColumnStore(tmp_path, "engine-0", file_bytes=4000)
    spans: list[Tokens] = []
    stored: list[Tokens] = []
    for number in range(30):  # some are so short that they stay in memory, some have one column only
        span = tokens_of(rng, int(rng.integers(1, 60)), kept=number % 7 != 0, routing=number % 5 != 0)
        spans.append(span)
        stored.append(sent(store.chunk(TokenChunk(tokens=span))).tokens)
    whole, referred = Tokens.concat(spans), Tokens.concat(stored)
    assert referred.kept is not None
    assert referred.routing is not None
    assert not len(referred.kept.ids_E)
    assert not len(referred.routing.experts_RLK)
    same(in_memory(referred, tmp_path), whole)
    for _ in range(30):  # cut twice, and join the halves again
        first, last = sorted(rng.integers(0, len(whole) + 1, 2).tolist())
        at = int(rng.integers(0, last - first + 1))
        piece = referred[first:last]
        same(in_memory(piece, tmp_path), whole[first:last])
        same(in_memory(piece[:at] + piece[at:], tmp_path), whole[first:last])
    assert len(os.listdir(tmp_path)) > 2


def test_short_columns_stay_in_the_message(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path, "engine-0")
    chunk = TokenChunk(tokens=tokens_of(np.random.default_rng(0), 3))
    assert store.chunk(chunk) is chunk
    plain = TokenChunk(tokens=tokens_of(np.random.default_rng(0), 400, kept=False, routing=False))
    assert store.chunk(plain) is plain
    assert os.listdir(tmp_path) == []


def test_experts_of_the_prompt_are_stored_too(tmp_path: Path) -> None:
    span = tokens_of(np.random.default_rng(1), 100)
    chunk = sent(ColumnStore(tmp_path, "e").chunk(TokenChunk(tokens=span[:2], prompt_routing=span.routing)))
    assert chunk.prompt_routing is not None
    assert chunk.prompt_routing.stored
    read = StoreReader(tmp_path).routing(chunk.prompt_routing)
    assert span.routing is not None
    np.testing.assert_array_equal(read.experts_RLK, span.routing.experts_RLK)


def test_the_ledger_keeps_references_and_an_episode_is_whole_again(tmp_path: Path) -> None:
    span = tokens_of(np.random.default_rng(2), 2000)
    chunk = ColumnStore(tmp_path, "e").chunk(TokenChunk(tokens=span))
    turns = [
        Turn(author="task", tokens=Tokens.observed([1, 2])),
        Turn(author="policy", tokens=chunk.tokens, parent=0, stop_reason=StopReason.STOP, context_routing=span.routing),
    ]
    data, _ = encode_bundle([EpisodeGraph(key=EpisodeKey(0, 0), turns=turns)])
    plain, _ = encode_bundle([EpisodeGraph(key=EpisodeKey(0, 0), turns=[turns[0], turns[1]])])
    assert data == plain
    whole = msgspec.structs.replace(turns[1], tokens=span)
    large, _ = encode_bundle([EpisodeGraph(key=EpisodeKey(0, 0), turns=[turns[0], whole])])
    assert len(data) < len(large) - 8 * len(span)
    same(in_memory(decode_episode(data, 0)[1].tokens, tmp_path), span)


def batch_of(tmp_path: Path, *, stored: bool) -> Batch:
    """Six samples of four groups, each of whose chunks is a file of its own, if ``stored``."""
    rng = np.random.default_rng(5)
    store = ColumnStore(tmp_path, "e", file_bytes=1)
    samples: list[TrainSample] = []
    for number in range(6):
        chunks = [TokenChunk(tokens=tokens_of(rng, 40)) for _ in range(2)]
        spans = [(store.chunk(chunk) if stored else chunk).tokens for chunk in chunks]
        turns = [Turn(author="policy", tokens=Tokens.concat(spans), stop_reason=StopReason.STOP)]
        key = EpisodeKey([7, 7, 8, 9, 9, 12][number], number)
        samples += paths(EpisodeGraph(key=key, turns=turns), 0.5)
    return Batch.collate(0, samples)


def encoded(batch: Batch) -> bytes:
    return CODEC.encode(batch)


def test_a_batch_is_read_as_it_would_be_without_a_store(tmp_path: Path) -> None:
    stored, plain = batch_of(tmp_path, stored=True), batch_of(tmp_path, stored=False)
    assert lies_in_store(stored)
    assert not lies_in_store(plain)
    order = ORDERS.decode(ORDERS.encode(Logprobs(call=0, batch=stored)))
    read, lost = read_batch(order.batch, StoreReader(tmp_path))
    assert not lost
    assert encoded(read) == encoded(plain)
    assert len(encoded(stored)) < len(encoded(plain))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "differs from what was written": flip,
    "cannot be read": lambda path: path.unlink(),
    "is not there": lambda path: os.truncate(path, 20),
    "is not there: the file ends at byte 0": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("words", DAMAGE)
@pytest.mark.parametrize("number", [0, 1, 11, 14])
def test_a_group_of_which_a_part_is_lost_carries_no_loss_and_others_are_as_they_were(
    tmp_path: Path, words: str, number: int
) -> None:
    stored, plain = batch_of(tmp_path, stored=True), batch_of(tmp_path, stored=False)
    DAMAGE[words](tmp_path / file_name("e", number))
    read, lost = read_batch(stored, StoreReader(tmp_path))
    # each sample has two chunks with two columns each: four files
    group = int(stored.groups_S[number // 4])
    assert list(lost) == [group]
    assert words in lost[group].problem
    assert file_name("e", number) in lost[group].problem
    left, count = remove_groups(read, lost)
    own_N = np.repeat(stored.groups_S == group, stored.lengths_S)
    assert count == int((plain.mask_N & own_N).sum()) > 0
    assert not left.mask_N[own_N].any()
    assert left.kept is not None
    assert left.routing is not None
    assert not left.kept.sizes_T[own_N].any()
    assert not left.routing.known_T[own_N].any()
    assert plain.kept is not None
    assert plain.routing is not None
    others = np.flatnonzero(~own_N)
    assert left.kept.problem(left.ids_N) == ""
    assert left.routing.problem(left.num_tokens) == ""
    for mine, whole in (
        (left.kept.take(others), plain.kept.take(others)),
        (left.routing.take(others), plain.routing.take(others)),
    ):
        assert CODEC.encode(mine) == CODEC.encode(whole)
    np.testing.assert_array_equal(left.mask_N[others], plain.mask_N[others])
    np.testing.assert_array_equal(left.ids_N, plain.ids_N)


@pytest.mark.parametrize("name", ["../secret.000000", "/etc/passwd", "e", "", "link.000000", "sub/e.000000"])
def test_a_reference_reads_nothing_but_files_of_the_store(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "columns"
    column = ColumnStore(directory, "e").chunk(TokenChunk(tokens=tokens_of(np.random.default_rng(3), 99))).tokens.kept
    assert column is not None
    for copy in (tmp_path / "secret.000000", directory / "sub" / "e.000000"):
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((directory / "e.000000").read_bytes())
    (directory / "link.000000").symlink_to(tmp_path / "secret.000000")
    (piece,) = column.stored
    other = msgspec.structs.replace(column, stored=(msgspec.structs.replace(piece, file=name),))
    with pytest.raises(StoreError, match="the part of the store"):
        StoreReader(directory).kept(other)


@pytest.mark.parametrize(
    "change",
    [{"start": -8}, {"num_bytes": -1}, {"num_bytes": 1 << 40}, {"start": 1 << 40}, {"first": -1}, {"first": 9999}],
)
def test_a_reference_beyond_its_part_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    column = ColumnStore(tmp_path, "e").chunk(TokenChunk(tokens=tokens_of(np.random.default_rng(3), 99))).tokens.kept
    assert column is not None
    (piece,) = column.stored
    other = msgspec.structs.replace(column, stored=(msgspec.structs.replace(piece, **change),))
    with pytest.raises(StoreError, match="the part of the store"):
        StoreReader(tmp_path).kept(other)


def test_columns_that_were_not_read_are_not_computed_with(tmp_path: Path) -> None:
    tokens = ColumnStore(tmp_path, "e").chunk(TokenChunk(tokens=tokens_of(np.random.default_rng(3), 99))).tokens
    assert tokens.kept is not None
    assert tokens.routing is not None
    places = np.array([1, 2])
    with pytest.raises(AssertionError, match="not read from their store"):
        tokens.kept.spans()
    for column in (tokens.kept, tokens.routing):
        with pytest.raises(AssertionError, match="not read from their store"):
            column.take(places)


def test_stored_experts_of_another_model_are_not_joined(tmp_path: Path) -> None:
    store, rng = ColumnStore(tmp_path, "e"), np.random.default_rng(3)
    one = store.chunk(TokenChunk(tokens=tokens_of(rng, 99))).tokens.routing
    assert one is not None
    other = Routing(known_T=np.ones(2, bool), experts_RLK=np.zeros((2, LAYERS, EXPERTS), np.uint16))
    with pytest.raises(ValueError, match="uint16"):
        Routing.concat([one, other])


def test_a_full_store_says_so_and_takes_more_when_a_file_was_removed(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path, "e", limit_bytes=2500, file_bytes=1000)
    rows = np.arange(100, dtype=np.int64)
    first = store.put(rows)
    store.put(rows)
    with pytest.raises(StoreError, match=r"1600 bytes.*flow\.columns\.limit_gb"):
        store.put(rows)
    assert directory_bytes(tmp_path) == 1600
    (tmp_path / "learned.000000").write_bytes(b"x" * 100)
    assert (directory_bytes(tmp_path), directory_bytes(tmp_path, without="learned")) == (1700, 1600)
    (tmp_path / first[0].file).unlink()
    (piece,) = store.put(rows)
    assert piece.file == "e.000002"


def test_a_disk_without_room_is_an_error_and_what_was_written_of_a_part_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rows = ColumnStore(tmp_path, "e"), np.arange(100, dtype=np.uint8)
    store.put(rows)
    whole = os.pwrite

    def half(file: int, data: memoryview, at: int) -> int:
        return whole(file, data[: len(data) // 2], at)

    def none(file: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for write in (half, none):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(StoreError, match=r"cannot be written: .*room|No space"):
                store.put(rows)
    stored = store.put(rows[::-1])
    column = KeptSets(ids_E=rows[:0], sizes_T=np.array([100], np.int32), stored=stored)
    np.testing.assert_array_equal(StoreReader(tmp_path).kept(column).ids_E, rows[::-1])


def test_a_part_that_the_system_takes_in_pieces_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rows, whole = ColumnStore(tmp_path, "e"), np.arange(100, dtype=np.uint8), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: whole(file, data[:30], at))
    (piece,) = store.put(rows)
    assert bytes(StoreReader(tmp_path).part(piece)) == rows.tobytes()


def test_a_new_process_of_the_same_name_does_not_touch_the_files_of_the_earlier_one(tmp_path: Path) -> None:
    rows = np.arange(100, dtype=np.uint8)
    (first,) = ColumnStore(tmp_path, "engine-1").put(rows)
    ColumnStore(tmp_path, "engine-10").put(rows)
    (second,) = ColumnStore(tmp_path, "engine-1").put(rows)
    assert (first.file, second.file) == ("engine-1.000000", "engine-1.000001")
    assert first.start == second.start == 0


def test_a_reader_finds_what_was_appended_after_it_has_mapped_a_file(tmp_path: Path) -> None:
    store, reader = ColumnStore(tmp_path, "e"), StoreReader(tmp_path)
    for number in range(3):
        rows = np.full(5000, number, np.uint8)
        column = KeptSets(ids_E=rows[:0], sizes_T=np.array([5000], np.int32), stored=store.put(rows))
        np.testing.assert_array_equal(reader.kept(column).ids_E, rows)
