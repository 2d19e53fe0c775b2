"""A batch travels to the learner in parts of bounded size, and arrives as it was."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch
from headrace.base.types.messages import controller
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.learner import BatchPart, Logprobs, Message, Train
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.teacher_scores import TeacherScores
from headrace.launch.channel import ControllerChannel, PartChannel
from headrace.launch.clients import LearnerClient
from headrace.launch.clients import learner as client_module
from headrace.launch.hosts.learner import OrderStream
from headrace.learner.parallel.mesh import SingleRank

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
        kept=KeptSets.of([[int(token), 99][: rng.integers(0, 3)] for token in ids]),
        routing=Routing(known_T=known, experts_RLK=rng.integers(0, 8, (int(known.sum()), 12, 4)).astype(np.uint8)),
        teacher_scores=scores,
        agents=("", "critic"),
        agents_N=rng.integers(0, 2, total).astype(np.int32),
    )


def as_bytes(batch: Batch) -> bytes:
    return CODEC.encode(BatchPart(call=0, batch=batch))


@pytest.mark.parametrize("heavy", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_batch_are_small_and_together_the_batch(seed: int, heavy: bool) -> None:
    batch = batch_of(seed, heavy=heavy)
    for max_bytes in (1, 2000, 8000, 10**9):
        parts = batch.divide(max_bytes)
        assert as_bytes(Batch.join(parts)) == as_bytes(batch)
        frame = len(as_bytes(batch_of(0, num_samples=0, heavy=heavy))) + 200  # names and headers
        for part in parts:
            assert len(part.lengths_S) == 1 or len(as_bytes(part)) <= max_bytes + frame
            assert part.ids_N.base is not None or len(parts) == 1, "a part is a copy"
        for one, other in pairwise(parts):
            assert len(as_bytes(one)) + len(as_bytes(other.divide(1)[0])) > max_bytes, "one more sample fits"
    assert len(batch.divide(1)) == len(batch.lengths_S)
    assert len(batch.divide(8000)) >= 2
    assert len(batch.divide(10**9)) == 1


def test_a_batch_without_samples_is_one_part() -> None:
    empty = batch_of(0, num_samples=0, heavy=False)
    assert [part.num_tokens for part in empty.divide(100)] == [0]


class Ends:
    """Both ends of a learner's channel, and the sizes of what is sent."""

    def __init__(self, directory: Path) -> None:
        self.ours = ControllerChannel(directory, "learner", controller.Message)
        self.theirs = PartChannel(self.ours.addresses, Message)
        self.client = LearnerClient("learner", self.ours, token="t", on_spans=lambda _: None, deadline_s=1.0)
        self.orders = OrderStream(self.theirs, SingleRank(torch.device("cpu"))).receive()

    async def ordered(self, batch: Batch, *, train: bool) -> object:
        call = asyncio.ensure_future(self.client.train(batch) if train else self.client.logprobs(batch))
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


@pytest.mark.parametrize("train", [True, False])
def test_learner_gets_the_whole_batch_of_an_order(monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    monkeypatch.setattr(client_module, "PART_BYTES", 5000)
    sizes: list[int] = []

    async def order_three() -> None:
        async with both_ends() as ends:
            send = ends.ours.send

            def measured(message: object) -> None:
                sizes.append(len(CODEC.encode(message)))
                send(message)

            monkeypatch.setattr(ends.ours, "send", measured)
            for seed in range(3):  # one after the other over the same channel
                batch = batch_of(seed, num_samples=100)
                order = await ends.ordered(batch, train=train)
                assert isinstance(order, Train if train else Logprobs)
                assert as_bytes(order.batch) == as_bytes(batch)

    asyncio.run(order_three())
    assert len(sizes) > 30
    assert max(sizes) < 9000 < len(as_bytes(batch_of(2, num_samples=100)))


def test_a_batch_that_lacks_a_part_is_not_trained() -> None:
    *parts, last = batch_of(0).divide(3000)
    words = rf"step 0 should come in {len(parts)} parts and a rest, but {len(parts) - 1}"

    async def order() -> None:
        async with both_ends() as ends:
            for part in parts[1:]:
                ends.ours.send(BatchPart(call=7, batch=part))
            ends.ours.send(Train(call=7, batch=last, num_parts=len(parts)))
            with pytest.raises(RunError, match=words):
                await asyncio.to_thread(next, ends.orders)

    asyncio.run(order())
