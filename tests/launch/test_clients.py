"""Engine and learner as the controller sees them, over real sockets."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from headrace.clock import run_virtual
from headrace.errors import DeadlineError, RunError, WeightsError
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients import EngineClient, LearnerClient
from headrace.types.messages.controller import Failure, Ready, SnapshotTaken
from headrace.types.sampling import Sampling

GREETING = Ready(token="t", pid=1, facts={})


class Silent(ControllerChannel):
    """A channel to nobody, for answers that a test gives itself."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def learner() -> LearnerClient:
    made = LearnerClient("learner", Silent(), token="t", on_spans=lambda _: None, deadline_s=60.0)
    made.ready.set_result(GREETING)
    return made


def test_a_snapshot_may_wait_for_a_step_that_takes_hours_but_its_announcement_may_not() -> None:
    async def main() -> None:
        client = learner()
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(client.snapshot(1, 0))
            await asyncio.sleep(2 * 3600.0)
            client._route(SnapshotTaken(call=0, seconds=0.1))
            publication = await taking
        with pytest.raises(DeadlineError, match="publish version 1"):
            await client.published(publication)

    run_virtual(main())


def test_a_snapshot_that_fails_leaves_no_error_that_nobody_hears() -> None:
    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        client = learner()
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(failed(client))
            await asyncio.sleep(0)
            client._route(Failure(call=0, kind="WeightsError", problem="torn", remedy="again"))
            await taking
        del client
        gc.collect()

    async def failed(client: LearnerClient) -> None:
        with pytest.raises(WeightsError, match="torn"):
            await client.snapshot(1, 0)

    asyncio.run(main())
    assert complaints == []


class Full(Silent):
    """A channel whose reader has stopped reading."""

    def send(self, message: object) -> None:
        raise RunError("engine has not read", remedy="look")


def test_a_request_that_cannot_be_sent_fails_and_does_not_wait() -> None:
    async def main() -> None:
        client = EngineClient("engine", Full(), token="t", on_spans=lambda _: None, deadline_s=60.0)
        sampling = Sampling(max_new_tokens=4, temperature=1.0, stop_ids=())
        with pytest.raises(RunError, match="has not read"):
            await anext(client.generate(np.zeros(1, np.int32), sampling))

    run_virtual(main())
