"""Orders and answers of any size travel in parts of bounded size, and arrive as they were."""

from __future__ import annotations

import asyncio
import tempfile
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import RunError
from headrace.base.types import recorded
from headrace.base.types.batch import Batch
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.messages import controller
from headrace.base.types.messages import parts as parts_module
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import LogprobsReply, StepReport, Trained
from headrace.base.types.messages.learner import Logprobs, Message, Train
from headrace.base.types.messages.parts import MessagePart, PartCollector, split_message
from headrace.base.types.outline import BatchOutline
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import Tokens
from headrace.flow.layout import inline, lay_out, make_outline
from headrace.launch.channel import ControllerChannel, PartChannel
from headrace.launch.clients import LearnerClient
from headrace.launch.hosts.learner import OrderStream
from headrace.learner.parallel.mesh import SingleRank
from tests.flow.outlines import outline_with

CODEC = MessageCodec(Message)


def batch_of(seed: int, *, num_samples: int = 40, heavy: bool = True) -> Batch:
    """A batch of samples of 1 to 30 tokens; with all columns that a batch may have, if ``heavy``."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 31, num_samples).astype(np.int32)
    total = int(lengths.sum())
    ids = rng.integers(0, 99, total).astype(np.int32)
    batch = Batch(
        step=seed,
        lengths_S=lengths,
        groups_S=np.sort(rng.integers(0, 9, num_samples)).astype(np.int32),
        episodes_S=np.arange(num_samples, dtype=np.int32),
        ids_N=ids,
        mask_N=rng.random(total) < 0.5,
        logprobs_N=rng.normal(size=total).astype(np.float32),
        versions_N=rng.integers(-1, 4, total).astype(np.int32),
        advantages_N=rng.normal(size=total).astype(np.float32),
    )
    if not heavy:
        return batch
    known = rng.random(total) < 0.8
    scores = TeacherScores(
        logprobs_T=rng.normal(size=total).astype(np.float32),
        versions_T=np.zeros(total, np.int32),
        ids_TK=rng.integers(0, 99, (total, 3)).astype(np.int32),
        logs_TK=rng.normal(size=(total, 3)).astype(np.float32),
    )
    return msgspec.structs.replace(
        batch,
        kept=KeptSets.from_spans([[int(token), 99][: rng.integers(0, 3)] for token in ids]),
        routing=Routing(known_T=known, experts_RLK=rng.integers(0, 8, (int(known.sum()), 12, 4)).astype(np.uint8)),
        teacher_scores=scores,
        agents=("", "critic"),
        agents_N=rng.integers(0, 2, total).astype(np.int32),
    )


def as_bytes(message: Any) -> bytes:
    return CODEC.encode(message)


@pytest.mark.parametrize("part_bytes", [1000, 7919, 10**9])
def test_a_message_is_put_together_from_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", part_bytes)
    collector = PartCollector(Train | Logprobs)
    for call, order in enumerate((Logprobs(call=0, batch=batch_of(1)), Train(call=1, outline=outline_with(2)))):
        *parts, last = [CODEC.decode(CODEC.encode(part)) for part in split_message(order, call)]
        assert [collector.add(part) for part in parts] == [None] * len(parts)
        assert as_bytes(collector.add(last)) == as_bytes(order)
        assert max(len(CODEC.encode(part)) for part in [*parts, last]) < part_bytes + 100
        assert len(parts) == (len(as_bytes(order)) - 1) // part_bytes


class Ends:
    """Both ends of a learner's channel."""

    def __init__(self, directory: Path) -> None:
        self.ours = ControllerChannel(directory, "learner", controller.Message)
        self.theirs = PartChannel(self.ours.addresses, Message)
        self.client = LearnerClient("learner", self.ours, token="t", on_spans=lambda _: None, deadline_s=1.0)
        self.stream = OrderStream(self.theirs, SingleRank(torch.device("cpu")))
        self.orders = self.stream.receive()

    async def ordered(self, of: Batch | BatchOutline) -> object:
        """The order that the learner gets."""
        call = asyncio.ensure_future(self.client.logprobs(of) if isinstance(of, Batch) else self.client.step(of))
        await asyncio.sleep(0)
        order = await asyncio.to_thread(next, self.orders)
        call.cancel()
        return order


@asynccontextmanager
async def both_ends() -> AsyncIterator[Ends]:
    with tempfile.TemporaryDirectory(prefix="hr-test-") as directory:  # short: it is part of a socket's address
        ends = Ends(Path(directory))
        try:
            async with asyncio.timeout(60):
                yield ends
        finally:
            ends.theirs.close()
            ends.client.close()


def test_learner_gets_whole_orders_and_no_message_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 5000)
    sizes: list[int] = []

    async def order_three() -> None:
        async with both_ends() as ends:
            send = ends.ours.send

            def measured(message: object) -> None:
                sizes.append(len(CODEC.encode(message)))
                send(message)

            monkeypatch.setattr(ends.ours, "send", measured)
            for seed in range(3):  # one after the other over the same channel
                batch, outline = batch_of(seed, num_samples=100), outline_with(seed)
                for of in (batch, outline):
                    order = await ends.ordered(of)
                    assert isinstance(order, Train | Logprobs)
                    assert as_bytes(order.batch if isinstance(order, Logprobs) else order.outline) == as_bytes(of)

    asyncio.run(order_three())
    assert len(sizes) > 30
    assert max(sizes) < 5100 < len(as_bytes(batch_of(2, num_samples=100)))


def test_controller_gets_whole_answers_and_no_message_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 5000)
    column = np.arange(20_000, dtype=np.float32)
    report = StepReport(
        step=0, metrics={}, trained_tokens=1, dropped_tokens={}, log_pi_N=column, seconds=0.0, ages={1: 2}
    )

    async def answer() -> None:
        async with both_ends() as ends:
            ends.client.ready.set_result(controller.Ready(token="t", pid=1, facts={}))
            listening = asyncio.ensure_future(ends.client.listen())
            stepping = asyncio.ensure_future(ends.client.step(outline_with(0)))
            computing = asyncio.ensure_future(ends.client.logprobs(batch_of(0)))
            await asyncio.sleep(0)
            first, second = [await asyncio.to_thread(next, ends.orders) for _ in range(2)]
            assert isinstance(first, Train)
            assert isinstance(second, Logprobs)
            ends.stream.answer_divided(Trained(call=first.call, report=report))
            ends.stream.answer_divided(LogprobsReply(call=second.call, logprobs_N=column))
            assert as_bytes(await stepping) == as_bytes(report)
            np.testing.assert_array_equal(await computing, column)
            listening.cancel()

    asyncio.run(answer())


@pytest.mark.parametrize("missing", [0, 1])
def test_an_order_that_lacks_a_part_is_not_carried_out(monkeypatch: pytest.MonkeyPatch, missing: int) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 3000)
    parts = list(split_message(Logprobs(call=7, batch=batch_of(0)), 7))
    number = missing + 1
    words = rf"part {number + 1} of {len(parts)} of order 7 came after {missing} parts"

    async def order() -> None:
        async with both_ends() as ends:
            for part in parts[:missing] + parts[number:]:
                ends.ours.send(part)
            with pytest.raises(RunError, match=words):
                await asyncio.to_thread(next, ends.orders)

    asyncio.run(order())


def test_parts_that_are_no_message_are_named() -> None:
    part = MessagePart(of=3, number=0, num_parts=1, data=memoryview(b"\xc1"))
    with pytest.raises(RunError, match="the parts of order 3 are not a message"):
        PartCollector(Train | Logprobs).add(part)


def heavy_groups(rng: np.random.Generator) -> list[ScoredGroup]:
    """Groups of answers with the experts of 24 layers and kept-sets of 20 entries."""
    groups = []
    for number in range(4):
        episodes = []
        for place in range(4):
            ids_T = rng.integers(0, 20, 600).astype(np.int32)
            answer = Tokens(
                ids_T=ids_T,
                logprobs_T=np.zeros(600, np.float32),
                versions_T=np.ones(600, np.int32),
                kept=KeptSets(ids_E=np.tile(np.arange(20, dtype=np.int32), 600), sizes_T=np.full(600, 20, np.int32)),
                routing=Routing(known_T=np.ones(600, bool), experts_RLK=np.zeros((600, 24, 8), np.uint8)),
            )
            turns = [
                Turn(author="task", tokens=Tokens.observed(ids_T[:9])),
                Turn(author="policy", tokens=answer, parent=0),
            ]
            status = EpisodeStatus.SCORED
            episodes.append(EpisodeGraph(key=EpisodeKey(number, place), turns=turns, status=status, reward=1.0))
        groups.append(ScoredGroup(number=number, episodes=tuple(episodes)))
    return groups


class Arrived:
    """A channel from which all parts of one order have arrived, each a message of its own. The peak of the memory is
    counted from then on."""

    def __init__(self, order: Train) -> None:
        self._order = order

    def receive(self, _timeout_s: float) -> list[Any]:
        parts = [CODEC.decode(CODEC.encode(part)) for part in split_message(self._order, 0)]
        tracemalloc.reset_peak()
        return parts


def test_a_batch_that_arrives_is_never_more_than_twice_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", 100_000)
    monkeypatch.setattr(recorded, "CHECKED_TOKENS", 100)
    groups = heavy_groups(np.random.default_rng(0))
    outline = make_outline(1, groups, [0.5] * 16, oldest_version=0)
    stream = OrderStream(Arrived(Train(call=0, outline=outline)), SingleRank(torch.device("cpu")))  # type: ignore[arg-type]
    orders = stream.receive()
    tracemalloc.start()
    try:
        order = next(orders)
        assert isinstance(order, Train)
        batch = stream.read_outline(order.outline).batch
        _, peak_bytes = tracemalloc.get_traced_memory()
        order.outline.release()
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = len(as_bytes(batch))
    assert size > 2_500_000
    assert peak_bytes < 2.2 * size, "a growing buffer has room for an eighth more than it holds"
    assert left_bytes < 1.1 * size
    assert as_bytes(batch) == as_bytes(lay_out(outline, inline).batch)
