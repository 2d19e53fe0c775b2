"""A learner's process writes a checkpoint beside its other orders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.clock import RealClock, run_virtual
from headrace.base.errors import CheckpointError
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Failure, LogprobsReply, Saved, SnapshotTaken
from headrace.base.types.messages.learner import Logprobs, Save
from headrace.launch.hosts.batches import ReadBatch
from headrace.launch.hosts.learner import LearnerHost
from headrace.launch.lending import OwnCores
from headrace.learner.parallel.mesh import SingleRank
from headrace.learner.progress import Progress
from tests.launch.test_batch_parts import batch_of
from tests.launch.test_clients import learner


class SlowDisk:
    """A core whose checkpoints are written as soon as it has computed log-probabilities, or at once."""

    def __init__(self, error: CheckpointError | None = None) -> None:
        self.computed = threading.Event()
        self.error = error
        self.writing = 0
        self.most_writing = 0

    def begin_save(self, directory: Path) -> Callable[[], None]:
        self.writing += 1
        self.most_writing = max(self.most_writing, self.writing)

        def rest() -> None:
            assert self.computed.wait(30)
            self.writing -= 1
            if self.error is not None:
                raise self.error

        return rest

    def logprobs(self, batch: Any) -> np.ndarray:
        self.computed.set()
        return np.zeros(1, np.float32)

    def take_spans(self) -> tuple[()]:
        return ()


class Orders:
    """The orders of a controller, and the answers to them."""

    def __init__(self, *orders: Any) -> None:
        self.ranks = SingleRank(torch.device("cpu"))
        self.answers: list[Any] = []
        self._orders = orders

    def receive(self) -> Iterator[Any]:
        yield from self._orders

    def read(self, batch: Any) -> ReadBatch:
        return ReadBatch(batch=batch)

    def answer(self, message: Any) -> None:
        self.answers.append(message)

    answer_divided = answer


def carried_out(core: SlowDisk, *orders: Any) -> list[Any]:
    stream = Orders(*orders, Shutdown())
    with ThreadPoolExecutor(max_workers=1) as announcer:
        host = LearnerHost(core, None, stream, announcer, OwnCores())  # type: ignore[arg-type]
        host.serve(Progress(RealClock()))
    return stream.answers


def test_orders_are_carried_out_while_a_checkpoint_is_written_but_one_copy_is_held_at_a_time():
    core = SlowDisk()
    batch = batch_of(0)
    save, again = (Save(call=call, directory=f"step-{call}") for call in (1, 3))
    answers = carried_out(core, save, Logprobs(call=2, batch=batch), again)
    kinds = [(type(each), each.call) for each in answers]
    assert kinds[0] == (SnapshotTaken, 1)
    assert {*kinds[1:3]} == {(LogprobsReply, 2), (Saved, 1)}  # the second waits for the first to be computed
    assert kinds[3:] == [(SnapshotTaken, 3), (Saved, 3)]  # and the end of the process waits for the last
    assert core.most_writing == 1


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_learner_goes_on():
    core = SlowDisk(CheckpointError("no space", remedy="make room"))
    answers = carried_out(core, Save(call=1, directory="step-1"), Logprobs(call=2, batch=batch_of(0)))
    (failure,) = (each for each in answers if isinstance(each, Failure))
    assert (failure.call, failure.kind, failure.problem) == (1, "CheckpointError", "no space")
    assert any(isinstance(each, LogprobsReply) for each in answers)


def test_the_controller_goes_on_when_the_state_is_copied_and_hears_of_the_files_later():
    async def main() -> None:
        client = learner()
        copying = asyncio.ensure_future(client.save(Path("step-1")))
        await asyncio.sleep(0)
        client._route(SnapshotTaken(call=0, seconds=0.1))
        await copying
        writing = asyncio.ensure_future(client.wait_until_saved(Path("step-1")))
        await asyncio.sleep(3600.0)
        assert not writing.done()
        client._route(Failure(call=0, kind="CheckpointError", problem="no space", remedy="make room"))
        with pytest.raises(CheckpointError, match="no space"):
            await writing

    run_virtual(main())
