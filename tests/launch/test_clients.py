"""Engine and learner as the controller sees them, over real sockets."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import ComponentDied, DeadlineError, RunError, WeightsError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import (
    Chunk,
    Chunks,
    Committed,
    EngineStats,
    Failure,
    Paused,
    Ready,
    ScoresAre,
    SnapshotTaken,
)
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients import EngineClient, LearnerClient

GREETING = Ready(token="t", pid=1, facts={})


class Silent(ControllerChannel):
    """A channel to nobody, for answers that a test gives itself."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


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


def engine_client() -> EngineClient:
    made = EngineClient("engine", Silent(), token="t", on_spans=lambda _: None, deadline_s=60.0)
    made.ready.set_result(GREETING)
    return made


def piece(count: int, **more: object) -> Chunks:
    numbers = np.arange(count, dtype=np.int32)
    chunk = Chunk(
        request_id=0, ids_T=numbers, logprobs_T=numbers.astype(np.float32), versions_T=numbers * 0, **more
    )  # fmt: skip
    return Chunks(chunks=(chunk,), stats=EngineStats())


def test_chunks_of_a_sequence_that_begins_again_need_not_be_read_first() -> None:
    async def main() -> None:
        client = engine_client()
        stream = client.generate(np.zeros(1, np.int32), Sampling(max_new_tokens=3))
        async with asyncio.TaskGroup() as group:
            first = group.create_task(anext(stream))
            await asyncio.sleep(0)
            client._route(piece(1))
        assert (await first).request_id == 0
        for _ in range(40):
            client._route(piece(1, restarted=True))
            client._route(piece(1))
        client._route(piece(1, stop_reason=StopReason.LENGTH))
        rest = [chunk async for chunk in stream]
        assert [chunk.restarted for chunk in rest] == [True, False, False]

    run_virtual(main())


def test_who_reads_a_stream_hears_that_the_engine_is_closed() -> None:
    async def main() -> None:
        client, ids = engine_client(), np.zeros(1, np.int32)
        streams = [client.generate(ids, Sampling(max_new_tokens=3)) for _ in range(2)]
        reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(1.0)
        num_sent = len(client._channel.sent)
        client.close()
        for read in (*reading, anext(client.generate(ids, Sampling(max_new_tokens=3)))):
            async with asyncio.timeout(60.0):
                with pytest.raises(ComponentDied, match="engine has ended"):
                    await read
        assert len(client._channel.sent) == num_sent  # a closed channel is not written to

    run_virtual(main())


def test_a_commit_is_answered_when_its_mode_lets_it_happen() -> None:
    async def main() -> None:
        client = engine_client()
        async with asyncio.TaskGroup() as group:
            committing = group.create_task(client.commit(4, Interrupt.DRAIN))
            pausing = group.create_task(client.pause(release=True))
            scoring = group.create_task(client.score(Tokens.observed([3, 4]), temperature=0.5))
            await asyncio.sleep(1.0)
            commit, pause, score = client._channel.sent
            assert (commit.version, commit.mode, pause.release, score.temperature) == (4, Interrupt.DRAIN, True, 0.5)
            client._route(Paused(call=pause.call))
            client._route(ScoresAre(call=score.call, logprobs_T=np.array([0.0, -1.0], np.float32)))
            assert not committing.done()
            report = SwapReport(version=4, gap_s=0.0, carried_over=0, restarted=0, mode=Interrupt.DRAIN)
            client._route(Committed(call=commit.call, report=report))
        assert (await committing, (await scoring).tolist()) == (report, [0.0, -1.0])
        await pausing

    run_virtual(main())
