"""Kept-sets and experts go from an engine's store to the learner; what cannot be stored or read is known by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import ComponentDied, RunError, SequenceFailed, StoreError
from headrace.base.store import COLUMNS, ColumnStore
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, StopReason, TokenChunk, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.messages.controller import Divided, EngineStats, Failure, ScoresReply, StepReport, Trained
from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.messages.learner import Logprobs, Train
from headrace.base.types.messages.parts import PartCollector
from headrace.base.types.outline import BatchOutline
from headrace.base.types.scored import TokenResults
from headrace.base.types.tokens import Tokens
from headrace.flow.layout import LaidOutBatch, inline, lay_out, make_outline
from headrace.flow.ledger import SqliteLedger
from headrace.flow.ledger.base import EndStep, Move, Submit
from headrace.flow.ledger.browse import Browser
from headrace.flow.ready import ReadyColumns
from headrace.launch.hosts import batches
from headrace.launch.hosts.batches import ResultsStore, read, read_outline
from headrace.launch.hosts.columns import EngineColumns
from headrace.launch.hosts.engine import EngineHost, EngineHostConfig
from headrace.launch.hosts.learner import LearnerHost, OrderStream
from headrace.launch.lending import OwnCores
from headrace.launch.starts import StoreStart
from headrace.learner.parallel.mesh import Ranks, SingleRank
from headrace.wings.view.columns import with_columns
from tests.base.test_store import flip
from tests.flow.outlines import groups_with, make_credit
from tests.launch.test_batch_parts import as_bytes, batch_of, both_ends
from tests.learner.builders import Setup, tiny

ALONE = SingleRank(torch.device("cpu"))


def stored(batch: Batch, directory: Path, per_part: int = 50) -> Batch:
    """The batch with its kept-sets and experts in a store, ``per_part`` tokens in a part."""
    store = ColumnStore(directory, "engine-0", file_bytes=2000)
    chunks = []
    for first in range(0, batch.num_tokens, per_part):
        span = slice(first, first + per_part)
        tokens = Tokens(
            ids_T=batch.ids_N[span],
            logprobs_T=batch.logprobs_N[span],
            versions_T=batch.versions_N[span],
            kept=batch.kept and batch.kept[span],
            routing=batch.routing and batch.routing[span],
        )
        chunks.append(store.chunk(TokenChunk(tokens=tokens)).tokens)
    tokens = Tokens.concat(chunks)
    return msgspec.structs.replace(batch, kept=tokens.kept, routing=tokens.routing)


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        metrics={},
        trained_tokens=1,
        dropped_tokens={"nonfinite_logprob": 2},
        log_pi_N=np.zeros(1, np.float32),
        seconds=0.0,
    )


def test_the_learner_reads_the_batch_that_the_engines_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.base.types.messages.parts.PART_BYTES", 4000)

    async def order() -> None:
        async with both_ends() as ends:
            for seed in range(3):
                batch = batch_of(seed, num_samples=100)
                sent = stored(batch, tmp_path)
                found = await ends.ordered(sent)
                assert isinstance(found, Logprobs)
                got = read(found.batch, StoreStart(directory=str(tmp_path)), ALONE)
                assert as_bytes(got.batch) == as_bytes(batch)
                assert not got.complete_report(report(seed)).problems

    asyncio.run(order())


def test_tokens_of_a_lost_part_are_counted_and_the_user_is_told(tmp_path: Path) -> None:
    batch = stored(batch_of(0, num_samples=60), tmp_path)
    (tmp_path / "engine-0.000001").unlink()
    got = read(batch, StoreStart(directory=str(tmp_path)), ALONE)
    assert 0 < got.lost_tokens < batch.num_loss_tokens
    assert got.batch.num_loss_tokens == batch.num_loss_tokens - got.lost_tokens
    told = got.complete_report(report(0))
    assert told.dropped_tokens == {"nonfinite_logprob": 2, "columns_lost": got.lost_tokens}
    (problem,) = told.problems
    assert "engine-0.000001" in problem
    assert "carried no loss" in problem


def test_a_learner_on_another_machine_than_the_store_counts_what_lies_in_it_as_lost(tmp_path: Path) -> None:
    batch = stored(batch_of(3), tmp_path)
    found = read(batch, None, ALONE)
    assert found.lost_tokens == batch.num_loss_tokens
    assert "is on another machine" in found.lost[0].why
    plain = batch_of(3)
    assert read(plain, None, ALONE).batch is plain


class OneOfTwo(Ranks):
    """Rank 0 or rank 1 of two, whose leader has sent ``leaders``."""

    def __init__(self, rank: int, leaders: dict[int, str]) -> None:
        self.rank = rank
        self.leaders = leaders

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, message: bytes | None) -> bytes:
        assert (message is not None) == self.is_leader
        return msgspec.msgpack.encode(self.leaders) if message is None else message


def test_all_ranks_leave_out_what_the_first_could_not_read(tmp_path: Path) -> None:
    batch, store = stored(batch_of(0, num_samples=60), tmp_path), StoreStart(directory=str(tmp_path))
    whole = (tmp_path / "engine-0.000001").read_bytes()
    (tmp_path / "engine-0.000001").unlink()
    leader = read(batch, store, OneOfTwo(0, {}))
    groups = np.unique(batch.groups_S[np.isin(batch.groups_S, leader.batch.groups_S)])
    owners_N = np.repeat(batch.groups_S, batch.lengths_S)
    lost = [group for group in groups.tolist() if not leader.batch.mask_N[owners_N == group].any()]
    leaders = {group: leader.lost[0].why for group in lost if batch.mask_N[owners_N == group].any()}
    for present in (False, True):  # whether the other rank can read the file
        if present:
            (tmp_path / "engine-0.000001").write_bytes(whole)
        other = read(batch, store, OneOfTwo(1, leaders))
        assert as_bytes(other.batch) == as_bytes(leader.batch)
        assert other.lost_tokens == leader.lost_tokens


def test_a_rank_that_cannot_read_what_the_first_could_ends(tmp_path: Path) -> None:
    batch = stored(batch_of(0, num_samples=60), tmp_path)
    (tmp_path / "engine-0.000001").unlink()
    with pytest.raises(ComponentDied, match=r"engine-0\.000001"):
        read(batch, StoreStart(directory=str(tmp_path)), OneOfTwo(1, {}))


def chunk_of(request_id: int, seed: int, *, ended: bool = False) -> TokenChunk:
    batch = batch_of(seed)
    tokens = Tokens(ids_T=batch.ids_N, logprobs_T=batch.logprobs_N, versions_T=batch.versions_N, routing=batch.routing)
    return TokenChunk(request_id=request_id, tokens=tokens, stop_reason=StopReason.STOP if ended else None)


def test_a_sequence_for_which_the_store_has_no_room_fails_and_others_go_on(tmp_path: Path) -> None:
    columns = EngineColumns(StoreStart(directory=str(tmp_path), writer="engine-0"))
    assert isinstance(columns._store, ColumnStore)
    put: Callable[..., object] = columns._store.put
    aborted: list[int] = []

    def full(rows: object) -> object:
        if len(aborted) == 0 and calls.append(rows) is None and len(calls) in (2, 4):
            raise StoreError("the store is full", remedy="make room")
        return put(rows)

    calls: list[object] = []
    columns._store.put = full  # type: ignore[method-assign, assignment]

    def abort(request_ids: Sequence[int]) -> list[TokenChunk]:
        aborted.extend(request_ids)  # an abort returns whatever is due, also of others
        return [chunk_of(9, 4), chunk_of(request_ids[0], 5, ended=True)]

    sent = columns.store([chunk_of(1, 0), chunk_of(2, 1), chunk_of(3, 2), chunk_of(2, 3)], abort)
    assert aborted == [2]
    assert [(chunk.request_id, bool(chunk.error)) for chunk in sent] == [(1, False), (2, True), (3, False), (9, False)]
    assert not len(sent[1].tokens)
    with pytest.raises(SequenceFailed, match="the store is full") as failed:
        sent[1].raise_error()
    assert failed.value.remedy == "make room"
    for chunk in (sent[0], sent[2], sent[3]):
        assert chunk.tokens.routing is not None
        assert chunk.tokens.routing.stored


def test_an_engine_without_a_store_sends_everything(tmp_path: Path) -> None:
    chunks = [chunk_of(1, 0)]
    for columns in (EngineColumns(), EngineColumns(StoreStart(directory=str(tmp_path)))):
        assert columns.store(chunks, lambda _: []) is chunks


def test_a_teacher_reads_the_kept_sets_that_the_policys_engine_stored(tmp_path: Path) -> None:
    batch = batch_of(1)
    columns = EngineColumns(StoreStart(directory=str(tmp_path)))
    lying = stored(batch, tmp_path)
    order = ScoreTokens(call=0, ids_T=batch.ids_N, kept=lying.kept, routing=lying.routing)
    found = columns.read(order)
    assert found.kept is not None
    assert batch.kept is not None
    np.testing.assert_array_equal(found.kept.ids_E, batch.kept.ids_E)
    assert found.routing is not None
    assert batch.routing is not None
    np.testing.assert_array_equal(found.routing.experts_RLK, batch.routing.experts_RLK)
    plain = ScoreTokens(call=0, ids_T=batch.ids_N, kept=batch.kept)
    assert columns.read(plain) is plain
    (tmp_path / "engine-0.000000").unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        columns.read(order)


class Sent:
    """A channel that remembers what a host sends, and the core behind the host, which remembers what it computes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.computed: list[Any] = []

    def send(self, message: object) -> None:
        self.messages.append(message)

    def score(self, message: ScoreTokens) -> np.ndarray:
        self.computed.append(message)
        return np.zeros(len(message.ids_T), np.float32)

    def train(self, batch: Batch) -> StepReport:
        self.computed.append(batch)
        return msgspec.structs.replace(report(batch.step), log_pi_N=np.zeros(batch.num_tokens, np.float32))

    def logprobs(self, batch: Batch) -> np.ndarray:
        self.computed.append(batch)
        return batch.logprobs_N

    def take_spans(self) -> tuple[()]:
        return ()

    def stats(self) -> EngineStats:
        return EngineStats()

    def abort(self, requests: Sequence[int]) -> list[TokenChunk]:
        return []


def test_an_engine_sends_references_to_what_it_has_sampled(tmp_path: Path) -> None:
    batch, sent = batch_of(1), Sent()
    columns = EngineColumns(StoreStart(directory=str(tmp_path), writer="engine-0"))
    host = EngineHost(sent, sent, None, EngineHostConfig(columns=columns))  # type: ignore[arg-type]
    tokens = Tokens(ids_T=batch.ids_N, logprobs_T=batch.logprobs_N, versions_T=batch.versions_N, kept=batch.kept)
    host._report([TokenChunk(request_id=3, tokens=tokens)])
    ((chunk,),) = (message.chunks for message in sent.messages)
    assert chunk.tokens.kept.stored
    assert not len(chunk.tokens.kept.ids_E)
    host._score(ScoreTokens(call=4, ids_T=batch.ids_N, kept=chunk.tokens.kept))
    assert batch.kept is not None
    np.testing.assert_array_equal(sent.computed[0].kept.ids_E, batch.kept.ids_E)


def test_an_engine_scores_tokens_with_the_kept_sets_of_the_store(tmp_path: Path) -> None:
    batch, sent = batch_of(1), Sent()
    lying = stored(batch, tmp_path)
    columns = EngineColumns(StoreStart(directory=str(tmp_path)))
    host = EngineHost(sent, sent, None, EngineHostConfig(columns=columns))  # type: ignore[arg-type]
    host._score(ScoreTokens(call=4, ids_T=batch.ids_N, kept=lying.kept))
    (order,) = sent.computed
    assert batch.kept is not None
    np.testing.assert_array_equal(order.kept.ids_E, batch.kept.ids_E)
    (tmp_path / "engine-0.000000").unlink()
    host._score(ScoreTokens(call=5, ids_T=batch.ids_N, kept=lying.kept))
    assert [type(message) for message in sent.messages] == [ScoresReply, Failure]
    assert sent.messages[1].call == 5
    assert len(sent.computed) == 1


def test_a_learner_reads_its_batch_and_answers_what_was_lost(tmp_path: Path) -> None:
    batch, sent = batch_of(0, num_samples=60), Sent()
    lying = stored(batch, tmp_path)
    orders = OrderStream(sent, ALONE, StoreStart(directory=str(tmp_path)))  # type: ignore[arg-type]
    host = LearnerHost(sent, None, orders, None, OwnCores())  # type: ignore[arg-type]
    host._handle(Logprobs(call=2, batch=lying))
    assert [as_bytes(each) for each in sent.computed] == [as_bytes(batch)]
    (tmp_path / "engine-0.000001").unlink()
    with pytest.raises(StoreError, match=r"engine-0\.000001"):
        host._handle(Logprobs(call=4, batch=lying))


def outline_in(directory: Path, seed: int = 0) -> tuple[BatchOutline, LaidOutBatch]:
    """The outline of a batch whose groups lie in files of their own, with kept-sets and experts in others; and the
    batch as it is without a store."""
    groups, engines = groups_with(seed, longest=200), ColumnStore(directory, "engine-0", file_bytes=20_000)
    credits = make_credit(groups, seed)
    plain = lay_out(make_outline(seed, groups, credits, agents=("critic",), oldest_version=1), inline)
    for turns in (episode.turns for group in groups for episode in group.episodes):
        turns[:] = [
            msgspec.structs.replace(turn, tokens=engines.chunk(TokenChunk(tokens=turn.tokens)).tokens) for turn in turns
        ]
    ready = ReadyColumns(directory, file_bytes=1)
    put = [ready.put(group) for group in groups]
    return make_outline(seed, put, credits, agents=("critic",), oldest_version=1), plain


def test_a_learner_lays_out_its_batch_from_the_store(tmp_path: Path) -> None:
    (outline, plain), sent = outline_in(tmp_path), Sent()
    orders = OrderStream(sent, ALONE, StoreStart(directory=str(tmp_path)))  # type: ignore[arg-type]
    host = LearnerHost(sent, None, orders, None, OwnCores())  # type: ignore[arg-type]
    host._handle(Train(call=1, outline=outline))
    assert as_bytes(sent.computed[0]) == as_bytes(plain.batch)
    answer = PartCollector(Divided).add(sent.messages[0])
    assert isinstance(answer, Trained)
    assert answer.report.ages == plain.ages
    assert answer.report.dropped_tokens == {"nonfinite_logprob": 2, **plain.masked}
    assert not answer.report.problems


@pytest.mark.parametrize("damage", [Path.unlink, flip, lambda path: path.write_bytes(b"")])
def test_a_group_whose_tokens_are_lost_is_left_out_and_counted(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    outline, plain = outline_in(tmp_path)
    damage(tmp_path / "ready.000001")
    found = read_outline(outline, StoreStart(directory=str(tmp_path)), ALONE)
    lost = outline.groups[1]
    rest = [group for group in groups_with(0, longest=200) if group.number != lost.number]
    assert {key.group for key in found.laid_out.keys} == {group.number for group in rest if group.scored}
    assert found.lost_tokens == lost.num_loss_tokens > 0
    assert found.batch.num_loss_tokens < plain.batch.num_loss_tokens
    log_pi_N = np.zeros(found.batch.num_tokens, np.float32)
    told = found.complete_report(msgspec.structs.replace(report(0), log_pi_N=log_pi_N))
    assert told.dropped_tokens["columns_lost"] == lost.num_loss_tokens
    assert [(each.number, each.left_out) for each in told.lost] == [(lost.number, True)]
    (problem,) = told.problems
    assert "ready.000001" in problem
    assert "carried no loss" in problem


def test_a_step_whose_kept_sets_and_experts_are_all_lost_is_counted_as_an_empty_step(tmp_path: Path) -> None:
    (outline, plain), sent = outline_in(tmp_path / "store"), Sent()
    for path in (tmp_path / "store").glob("engine-0.*"):
        path.unlink()
    core = Setup(model_dir=tiny(tmp_path / "model")).learner()
    orders = OrderStream(sent, ALONE, StoreStart(directory=str(tmp_path / "store")))  # type: ignore[arg-type]
    LearnerHost(core, None, orders, None, OwnCores())._handle(Train(call=1, outline=outline))  # type: ignore[arg-type]
    answer = PartCollector(Divided).add(sent.messages[0])
    assert isinstance(answer, Trained)
    assert core.version == 1
    num_lost = plain.batch.num_loss_tokens
    assert answer.report.trained_tokens == 0
    assert answer.report.dropped_tokens == {**plain.masked, "columns_lost": num_lost}
    assert num_lost + sum(plain.masked.values()) == sum(group.num_loss_tokens for group in outline.groups)
    assert {(each.number, each.left_out) for each in answer.report.lost} == {
        (each.number, True) for each in outline.groups
    }
    assert "engine-0.000000" in answer.report.problems[0]


def test_a_step_whose_other_tokens_carry_no_loss_is_empty_without_the_lost_group(tmp_path: Path) -> None:
    outline, _ = outline_in(tmp_path)
    outline = msgspec.structs.replace(outline, oldest_version=99)
    (tmp_path / "ready.000001").unlink()
    found = read_outline(outline, StoreStart(directory=str(tmp_path)), ALONE)
    assert found.batch.num_tokens == 0
    assert found.lost_tokens == outline.groups[1].num_loss_tokens > 0
    assert {(each.number, each.left_out) for each in found.lost} == {(each.number, True) for each in outline.groups}


def test_a_step_of_which_no_group_can_be_read_is_no_step(tmp_path: Path) -> None:
    outline, _ = outline_in(tmp_path)
    for path in tmp_path.glob("ready.*"):
        path.unlink()
    with pytest.raises(StoreError, match=r"no tokens of step 0 could be read: .*ready\.00000"):
        read_outline(outline, StoreStart(directory=str(tmp_path)), ALONE)


def test_a_learner_without_a_store_refuses_an_outline_that_refers_to_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="step 0 refers to columns in a store"):
        read_outline(outline_in(tmp_path)[0], None, ALONE)


def test_all_ranks_leave_out_the_groups_that_the_first_could_not_read(tmp_path: Path) -> None:
    (outline, _), store = outline_in(tmp_path), StoreStart(directory=str(tmp_path))
    (tmp_path / "ready.000001").rename(tmp_path / "away")
    leader = read_outline(outline, store, OneOfTwo(0, {}))
    with pytest.raises(ComponentDied, match=r"ready\.000001"):
        read_outline(outline, store, OneOfTwo(1, {}))
    (tmp_path / "away").rename(tmp_path / "ready.000001")
    other = read_outline(outline, store, RankWithLeader(1, [{outline.groups[1].number: leader.lost[0].why}, {}]))
    assert as_bytes(other.batch) == as_bytes(leader.batch)
    assert (other.lost_tokens, other.lost) == (leader.lost_tokens, leader.lost)


class RankWithLeader(OneOfTwo):
    """Rank 1 of two, whose leader has sent one message after the other."""

    def __init__(self, rank: int, messages: list[dict[int, str]]) -> None:
        super().__init__(rank, {})
        self._messages = messages

    def broadcast(self, message: bytes | None) -> bytes:
        self.leaders = self._messages.pop(0)
        return super().broadcast(message)


def test_the_results_of_a_large_step_are_stored_and_the_ledger_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "INLINE_RESULTS", 3)
    results = TokenResults(
        groups_E=np.array([0], np.int32),
        places_E=np.array([0], np.int32),
        sizes_E=np.array([5], np.int32),
        log_pi_L=np.arange(5, dtype=np.float32),
    )
    whole = msgspec.structs.replace(report(0), learned=results)
    assert ResultsStore(None).store(whole) is whole
    few = msgspec.structs.replace(results, sizes_E=np.array([3], np.int32), log_pi_L=results.log_pi_L[:3])
    start = StoreStart(directory=str(tmp_path / COLUMNS))
    assert ResultsStore(start).store(msgspec.structs.replace(whole, learned=few)).learned is few
    stored_report = ResultsStore(start).store(whole)
    assert isinstance(stored_report.learned, tuple)
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", group_size=1, groups_per_step=1)
    ledger.apply(Submit(numbers=(0,), rows=(0,), at_s=0.0))
    for state in (GroupState.ADMITTED, GroupState.RUNNING, GroupState.SCORED, GroupState.READY, GroupState.TAKEN):
        ledger.apply(Move(numbers=(0,), state=state, at_s=0.0, step=0 if state is GroupState.TAKEN else None))
    ledger.apply(
        EndStep(
            step=0, numbers=(0,), trained_tokens=5, dropped_tokens={}, ages={}, at_s=0.0, learned=stored_report.learned
        )
    )
    ledger.close()
    browser = Browser.open_run(tmp_path)
    found = browser.token_results(0)
    assert isinstance(found, TokenResults)
    assert found.log_pi_L.tolist() == results.log_pi_L.tolist()
    (tmp_path / COLUMNS / "learned.000000").unlink()
    assert browser.token_results(0) is None


def test_results_for_which_the_store_has_no_room_are_left_out_and_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "INLINE_RESULTS", 0)
    results = TokenResults(
        groups_E=np.zeros(1, np.int32),
        places_E=np.zeros(1, np.int32),
        sizes_E=np.ones(1, np.int32),
        log_pi_L=np.zeros(1, np.float32),
    )
    whole = msgspec.structs.replace(report(0), learned=results)
    limited = StoreStart(directory=str(tmp_path / "limited"), limit_bytes=10)
    assert ResultsStore(limited).store(whole).learned, "they belong to the ledger, and the limit is not theirs"
    (tmp_path / "file").write_text("no directory")
    told = ResultsStore(StoreStart(directory=str(tmp_path / "file"))).store(whole)
    assert told.learned is None
    (problem,) = told.problems
    assert "were not recorded" in problem
    assert str(tmp_path / "file") in problem


def test_a_part_that_has_lost_its_columns_is_shown_without_them(tmp_path: Path) -> None:
    batch = batch_of(2)
    lying = stored(batch, tmp_path / COLUMNS)
    tokens = Tokens(
        ids_T=batch.ids_N,
        logprobs_T=batch.logprobs_N,
        versions_T=batch.versions_N,
        kept=lying.kept,
        routing=lying.routing,
    )
    turn = Turn(author="policy", tokens=tokens, context_routing=lying.routing)
    episode = EpisodeGraph(key=EpisodeKey(0, 0), turns=[turn])
    (read_turn,) = with_columns(episode, tmp_path).turns
    assert read_turn.tokens.kept is not None
    assert batch.kept is not None
    np.testing.assert_array_equal(read_turn.tokens.kept.ids_E, batch.kept.ids_E)
    assert read_turn.context_routing is not None
    assert batch.routing is not None
    np.testing.assert_array_equal(read_turn.context_routing.experts_RLK, batch.routing.experts_RLK)
    for file in (tmp_path / COLUMNS).iterdir():
        file.unlink()
    (lost,) = with_columns(episode, tmp_path).turns
    assert lost.tokens.kept is None
    assert lost.tokens.routing is None
    assert lost.context_routing is None
