"""Engine and learner as the controller sees them, over real sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.base.clock import run_virtual
from headrace.base.errors import ComponentDied, DeadlineError, EngineFull, NeedsFull, RunError, WeightsError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import (
    Chunks,
    Committed,
    EngineStats,
    Failure,
    Paused,
    Ready,
    ScoresReply,
    SnapshotTaken,
    Staged,
    StageOutcome,
    TokenChunk,
    Working,
)
from headrace.base.types.messages.engine import ANNOUNCED
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.base.types.weights import Interrupt, Manifest, SwapReport, WeightUpdate
from headrace.engine import PLAIN, SiblingRequest
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients import EngineClient, LearnerClient
from headrace.launch.processes import Processes
from headrace.sync.config import SyncConfig

GREETING = Ready(token="t", pid=1, facts={})


class Silent(ControllerChannel):
    """A channel to nobody, for answers that a test gives itself."""

    local_orders = "ipc:///run/part.orders"

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
        assert client.awaits_answer, "it is hashing and sending the version"
        client._route(Working(num_units=9, what="", usual_s=0.1))
        with pytest.raises(DeadlineError) as late:
            await client.wait_until_published(publication)
        assert late.value.problem == (
            "learner has not answered for 60 s: publish version 1; it reported last: waiting for orders, after 9 "
            "units of work"
        )
        assert late.value.remedy.endswith("; if the machine is only slow, raise sync.deadline_s")

    run_virtual(main())


def test_setting_of_the_deadline_is_told_of_an_order_that_it_limits_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.launch.clients.learner.COMPUTE_DEADLINE_S", 60.0)

    async def main() -> None:
        client = learner()
        with pytest.raises(DeadlineError) as late:
            await client.save(Path("checkpoint"))
        assert late.value.remedy == "look at logs/learner.log in the run directory"

    run_virtual(main())


@pytest.mark.parametrize("side", ["engine", "learner"])
def test_the_parts_of_a_run_are_waited_for_as_long_as_its_settings_say(side: str) -> None:
    engines = {"engine": SimpleNamespace(count=1), "agents": {}, "teachers": {}}
    devices = SimpleNamespace(engines=("cpu",))
    order = SimpleNamespace(  # 60 s, and one for each 50 MB
        sync=SyncConfig(), version_bytes=5 * 10**9, devices=devices, **engines
    )
    site = SimpleNamespace(token="t", on_spans=lambda _: None)
    processes = Processes(site=site, starter=None, order=order, weights=Path("weights"))  # type: ignore[arg-type]

    async def main() -> None:
        if side == "engine":
            client: EngineClient | LearnerClient = processes._make_engine_client("engine", Silent())
        else:
            client = processes._make_learner_client(Silent())
        client.ready.set_result(GREETING)
        if isinstance(client, EngineClient):
            waiting = client.stage(announced(3, "ipc:///run/part.orders"))
        else:
            taking = asyncio.ensure_future(client.snapshot(3, 0))
            await asyncio.sleep(0)
            client._route(SnapshotTaken(call=0, seconds=0.1))
            waiting = client.wait_until_published(await taking)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError):
            await waiting
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(160.0, abs=1.0)

    run_virtual(main())


def announced(version: int, *orders: str) -> WeightUpdate:
    """A version that the learner has announced to these engines itself."""
    manifest = Manifest(entries=(), total_bytes=0)
    return WeightUpdate(version=version, slot=0, path="", manifest=manifest, checksums=(), announced_to=orders)


def test_learner_is_given_the_engines_that_it_announces_a_version_to() -> None:
    async def main() -> None:
        client = learner()
        client.engines_in_step = lambda: {"ipc:///run/engine.0.orders": "http://engine"}
        taking = asyncio.ensure_future(client.snapshot(1, 0))
        await asyncio.sleep(0)
        (order,) = client._channel.sent
        assert order.announce_to == {"ipc:///run/engine.0.orders": "http://engine"}
        client._channel.local_orders = ""  # a learner on another machine does not reach those sockets
        other = asyncio.ensure_future(client.snapshot(2, 1))
        await asyncio.sleep(0)
        assert client._channel.sent[1].announce_to == {}
        taking.cancel()
        other.cancel()

    run_virtual(main())


@pytest.mark.parametrize("early", [True, False])
def test_version_that_the_learner_announced_is_awaited_and_not_ordered_again(early: bool) -> None:
    async def main() -> None:
        client, outcome = engine_client(), StageOutcome(version=3, seconds=0.5)
        client._route(StageOutcome(version=2, seconds=0.1))
        if early:
            client._route(outcome)
        staging = asyncio.ensure_future(client.stage(announced(3, "ipc:///run/part.orders")))
        await asyncio.sleep(1.0)
        assert staging.done() is early
        client._route(outcome)
        assert (await staging, client._channel.sent) == (0.5, [])

    run_virtual(main())


def test_version_that_an_engine_refused_when_the_learner_announced_it_is_refused_with_its_reason() -> None:
    async def main() -> None:
        client = engine_client()
        staging = asyncio.ensure_future(client.stage(announced(3, "ipc:///run/part.orders")))
        await asyncio.sleep(1.0)
        failure = Failure(call=None, kind="NeedsFull", problem="torn", remedy="send it whole")
        client._route(StageOutcome(version=3, seconds=0.0, failure=failure))
        with pytest.raises(NeedsFull, match="torn"):
            await staging
        assert not client.reported.is_set(), "the engine itself continues"

    run_virtual(main())


@pytest.mark.parametrize("early", [True, False])
def test_commit_that_follows_from_the_announcement_is_awaited_and_not_ordered_again(early: bool) -> None:
    async def main() -> None:
        client = engine_client()
        report = SwapReport(version=3, gap_s=0.0, carried_over=2, restarted=0)
        client._route(StageOutcome(version=3, seconds=0.5, commits=True))
        if early:
            client._route(Committed(call=ANNOUNCED, report=report))
        await client.stage(announced(3, "ipc:///run/part.orders"))
        committing = asyncio.ensure_future(client.commit(3))
        await asyncio.sleep(1.0)
        assert committing.done() is early
        client._route(Committed(call=ANNOUNCED, report=report))
        assert (await committing, client._channel.sent) == (report, [])
        later = asyncio.ensure_future(client.commit(4))
        await asyncio.sleep(1.0)
        (order,) = client._channel.sent
        assert (order.version, later.done()) == (4, False)
        later.cancel()

    run_virtual(main())


def test_engine_that_dies_or_says_nothing_of_an_announced_version_does_not_keep_the_controller_waiting() -> None:
    async def main() -> None:
        client = engine_client()
        client._route(Chunks(chunks=(), stats=EngineStats(version=2, steps=70, running=5)))
        with pytest.raises(DeadlineError) as late:
            await client.stage(announced(3, "ipc:///run/part.orders"))
        assert late.value.problem == (
            "engine has not answered for 60 s: stage version 3, which the learner has published; it reported last: "
            "version 2 in use, 70 steps made, 5 sequences running"
        )
        assert late.value.remedy.endswith("if the machine is only slow, raise sync.deadline_s")
        staging = asyncio.ensure_future(client.stage(announced(4, "ipc:///run/part.orders")))
        await asyncio.sleep(1.0)
        client.close()
        with pytest.raises(ComponentDied, match="engine has ended"):
            await staging

    run_virtual(main())


def test_engine_that_the_learner_did_not_announce_to_is_ordered_to_stage() -> None:
    async def main() -> None:
        client = engine_client()
        staging = asyncio.ensure_future(client.stage(announced(3, "ipc:///run/part-before.orders")))
        await asyncio.sleep(1.0)
        (order,) = client._channel.sent
        client._route(Staged(call=order.call, version=3, seconds=0.25))
        assert await staging == 0.25

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


def test_a_version_is_committed_once_at_a_time() -> None:
    async def main() -> None:
        client = engine_client()
        first = asyncio.ensure_future(client.commit(4))
        await asyncio.sleep(0)
        with pytest.raises(WeightsError, match="commit of version 4, which has been asked for already"):
            await client.commit(4)
        report = SwapReport(version=4, gap_s=0.0, carried_over=0, restarted=0)
        client._route(Committed(call=0, report=report))
        assert await first is report

    run_virtual(main())


def piece(count: int, **more: object) -> Chunks:
    numbers = np.arange(count, dtype=np.int32)
    chunk = TokenChunk(
        request_id=0,
        tokens=Tokens(ids_T=numbers, logprobs_T=numbers.astype(np.float32), versions_T=numbers * 0),
        **more,
    )
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
            client._route(piece(1, lost="restarted"))
            client._route(piece(1))
        client._route(piece(1, stop_reason=StopReason.LENGTH))
        rest = [chunk async for chunk in stream]
        assert [bool(chunk.lost) for chunk in rest] == [True, False, False]

    run_virtual(main())


def siblings_of(client: EngineClient, count: int, seen: list[tuple[int, TokenChunk]]) -> asyncio.Future[None]:
    """A call for ``count`` siblings, whose chunks are added to ``seen``."""

    async def take(arrived: Sequence[tuple[int, TokenChunk]]) -> None:
        seen.extend(arrived)

    requests = [SiblingRequest(Sampling(max_new_tokens=3), PLAIN)] * count
    return asyncio.ensure_future(client.generate_siblings(np.zeros(1, np.int32), requests, take))


def test_siblings_are_one_message_and_chunks_that_come_together_are_passed_on_together() -> None:
    async def main() -> None:
        client, seen = engine_client(), list[tuple[int, TokenChunk]]()
        call = siblings_of(client, 3, seen)
        await asyncio.sleep(0.1)
        (order,) = client._channel.sent
        ids = [request.request_id for request in order.requests]
        parts = [piece(1, stop_reason=StopReason.LENGTH).chunks[0], piece(2).chunks[0]]
        chunks = [replace(part, request_id=ids[2 * place]) for place, part in enumerate(parts)]
        client._route(Chunks(chunks=tuple(chunks), stats=EngineStats()))
        await asyncio.sleep(0.1)
        assert [(index, chunk.ended) for index, chunk in seen] == [(0, True), (2, False)]
        again = [replace(parts[0], request_id=ids[2], lost="restarted"), replace(parts[0], request_id=ids[1])]
        client._route(Chunks(chunks=(chunks[1], *again), stats=EngineStats()))  # the first of them is void
        await call
        assert [(index, len(chunk.tokens), chunk.lost) for index, chunk in seen[2:]] == [
            (2, 1, "restarted"),
            (1, 1, ""),
        ]
        assert len(client._channel.sent) == 1

    run_virtual(main())


def test_siblings_that_nobody_waits_for_any_more_are_withdrawn_and_a_dead_engine_is_told_once() -> None:
    async def main() -> None:
        client, seen = engine_client(), list[tuple[int, TokenChunk]]()
        call = siblings_of(client, 2, seen)
        await asyncio.sleep(0.1)
        client._route(piece(1, stop_reason=StopReason.LENGTH))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait([call])
        assert client._channel.sent[1].request_ids == (1,)
        other = siblings_of(client, 2, seen)
        await asyncio.sleep(0.1)
        client.close()
        with pytest.raises(ComponentDied, match="engine has ended"):
            await other
        assert len(client._channel.sent) == 3

    run_virtual(main())


def test_more_siblings_than_an_engine_takes_are_refused_before_any_is_sent() -> None:
    async def main() -> None:
        client = EngineClient(
            "engine", Silent(), token="t", on_spans=lambda _: None, deadline_s=60.0, max_requests=2
        )  # fmt: skip
        client.ready.set_result(GREETING)
        with pytest.raises(EngineFull, match="as many as it takes"):
            await siblings_of(client, 3, [])
        assert client._channel.sent == []

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
            client._route(ScoresReply(call=score.call, logprobs_T=np.array([0.0, -1.0], np.float32)))
            assert not committing.done()
            report = SwapReport(version=4, gap_s=0.0, carried_over=0, restarted=0, mode=Interrupt.DRAIN)
            client._route(Committed(call=commit.call, report=report))
        assert (await committing, (await scoring).tolist()) == (report, [0.0, -1.0])
        await pausing

    run_virtual(main())
