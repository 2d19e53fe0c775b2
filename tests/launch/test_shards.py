"""Rollout shards whose processes and engines are killed at random: every episode ends once, with the tokens that its
seed determines."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, TokenChunk
from headrace.base.types.messages import controller, engine
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Chunks, EngineStats, Noted, Ready
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.messages.rollout import EngineStateChanges, StartEpisodes, WithdrawEpisode
from headrace.base.types.observation import Recovery
from headrace.base.types.sampling import Sampling
from headrace.base.types.task import Task
from headrace.base.types.tokens import Tokens
from headrace.engine.fleet import Fleet
from headrace.launch import channel as channels
from headrace.launch.channel import AnswerListener, ChannelAddresses, ControllerChannel, PartChannel
from headrace.launch.child import Child, ProcessSpec, Rendezvous
from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.hosts import rollout as shard_host
from headrace.launch.hosts import worker
from headrace.launch.hosts.answers import AnswerRoutes
from headrace.launch.hosts.engine import EngineHost, EngineHostConfig
from headrace.launch.hosts.rollout import RolloutShard
from headrace.launch.local_process import LocalStarter
from headrace.launch.rollouts import RolloutShards, shard_names
from headrace.launch.starts import RolloutStart, ShardEnvironment
from headrace.launch.supervision import SupervisionConfig
from headrace.rollout import Withdrawal
from headrace.rollout.environments.base import AttemptOutcome
from headrace.rollout.runner import episode_seed

TOKEN = "secret of the test"
LENGTH, SIZE = 60, 4
SAMPLING = Sampling(max_new_tokens=LENGTH)
DEADLINE_S = 200.0


def token_of(seed: int, place: int) -> int:
    """The only right token at that place of the answer with that seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=4).digest(), "big") % 1000


def answer_of(key: EpisodeKey) -> list[int]:
    """The only right answer of an episode."""
    return [token_of(episode_seed(0, key), place) for place in range(LENGTH)]


class SeededCore:
    """An engine core whose tokens follow from seed and place; it gives up to three a step, at random."""

    def __init__(self, pace: random.Random) -> None:
        self.pace = pace
        self.aborted: list[int] = []
        self._running: dict[int, tuple[GenerateRequest, int]] = {}

    def add(self, request: GenerateRequest) -> None:
        begun = [] if request.answer_ids_T is None else request.answer_ids_T.tolist()
        assert begun == [token_of(request.sampling.seed or 0, place) for place in range(len(begun))]
        self._running[request.request_id] = (request, len(begun))

    def abort(self, request_ids: Sequence[int]) -> list[TokenChunk]:
        found = [number for number in request_ids if self._running.pop(number, None)]
        self.aborted += found
        # like every core, it may return what is due of other requests, too
        return self.step() + [
            TokenChunk(request_id=number, tokens=Tokens.observed([]), stop_reason=StopReason.ABORTED)
            for number in found
        ]  # fmt: skip

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[TokenChunk]:
        threading.Event().wait(0.002)
        return [self._grow(number) for number in list(self._running)]

    def _grow(self, number: int) -> TokenChunk:
        request, first = self._running[number]
        last = min(LENGTH, first + self.pace.randint(1, 3))
        ids = [token_of(request.sampling.seed or 0, place) for place in range(first, last)]
        self._running[number] = (request, last)
        if last == LENGTH:
            del self._running[number]
        tokens = Tokens(
            ids_T=np.array(ids, np.int32),
            logprobs_T=np.full(len(ids), -1.0, np.float32),
            versions_T=np.zeros(len(ids), np.int32),
        )
        return TokenChunk(
            request_id=number, tokens=tokens, stop_reason=StopReason.LENGTH if last == LENGTH else None
        )  # fmt: skip

    def take_swaps(self) -> list[Any]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(version=0, running=len(self._running))


def serve_engine(core: SeededCore, channel: PartChannel) -> None:
    """The thread of one engine, with its step loop over real sockets."""
    channel.send(Ready(token=TOKEN, pid=0, facts={}))
    with ThreadPoolExecutor(1) as stager:
        host = EngineHost(core, channel, stager, EngineHostConfig(answers=AnswerRoutes(channel)))  # type: ignore[arg-type]
        host.serve()
    channel.close()


class World:
    """Engines in threads, and shards in processes."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.pace = random.Random(seed)
        self.fleet = Fleet(RealClock(), size=2)
        self.clients: dict[str, EngineClient] = {}
        self.cores: list[SeededCore] = []
        self.threads: list[threading.Thread] = []
        self.every: list[EngineClient] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.recoveries: list[Recovery] = []
        self.parts: list[TokenChunk] = []
        self.shards = RolloutShards(
            self._start_shard,
            shard_names(2),
            SupervisionConfig(restarts=50, start_timeout_s=60.0, silence_s=60.0),
            RealClock(),
            fleet=self.fleet,
            client=lambda name: self.clients[name],
        )
        self.shards.send_recoveries_to(self.recoveries.append)
        self.shards.connect(self.parts.extend, pytest.fail)

    async def start_engine(self, name: str, listening: asyncio.TaskGroup) -> None:
        """Start an engine that joins the fleet."""
        channel = ControllerChannel(self.directory, name, controller.Message)
        client = EngineClient(name, channel, token=TOKEN, on_spans=lambda _: None, deadline_s=60.0)
        core = SeededCore(self.pace)
        part = PartChannel(channel.addresses, engine.Message)
        thread = threading.Thread(target=serve_engine, args=(core, part), daemon=True)
        thread.start()
        self.threads.append(thread)
        self.cores.append(core)
        self.every.append(client)
        self.tasks.append(listening.create_task(client.listen()))
        await client.ready
        self.clients[name] = client
        self.fleet.add(name, client, version=0)

    async def _start_shard(self, name: str) -> Child:
        start = RolloutStart(
            sampling=SAMPLING,
            run_seed=0,
            limits={},
            timeout_s=None,
            retries=0,
            record_tokens=8,
            deadline_s=60.0,
        )
        site = Rendezvous(directory=self.directory, logs=self.directory, token=TOKEN, on_spans=lambda _: None)
        spec = ProcessSpec(
            name=name,
            start=start,
            num_threads=1,
            make_peer=lambda channel: RolloutClient(name, channel, token=TOKEN),
        )
        return await Child.start(site, spec, LocalStarter())


@asynccontextmanager
async def world(directory: Path, seed: int) -> AsyncIterator[tuple[World, asyncio.TaskGroup]]:
    """Two engines and two shards, ready."""
    made = World(directory, seed)
    async with asyncio.TaskGroup() as group:
        await made.shards.start()
        made.tasks.append(group.create_task(made.shards.run()))
        for place in range(2):
            await made.start_engine(f"engine-{place}", group)
        await made.shards.wait_until_complete()
        try:
            yield made, group
        finally:
            for client in made.every:
                client.send(Shutdown())
            for task in made.tasks:
                task.cancel()
            for child in made.shards.children.values():
                await child.kill()
                child.close()
    # an engine that has just started may not be connected yet: its order to end is lost if the socket is closed first
    await asyncio.gather(*[asyncio.to_thread(thread.join) for thread in made.threads])
    for client in made.every:
        client.close()


def task_of(number: int) -> Task:
    return Task(row_index=number, row={"n": number}, prompt="", prompt_ids_T=np.arange(3, dtype=np.int32))


def refuse_wrong(episode: EpisodeGraph) -> None:
    """Fail unless the answer is the right one, whole or, if it was withdrawn, from its beginning on."""
    ids = [token for turn in episode.turns if turn.author != "task" for token in turn.tokens.ids_T.tolist()]
    right = answer_of(episode.key)
    assert ids == right[: len(ids)], episode.key
    if episode.status is EpisodeStatus.FINISHED:
        assert ids == right
    else:
        assert (episode.status, episode.cause) == (EpisodeStatus.LEFT_OUT, "enough")


async def kill_shards(made: World, rng: random.Random) -> None:
    """Kill a shard that runs episodes, again and again."""
    while True:
        await asyncio.sleep(rng.random() * 0.2)
        busy = [child for child in made.shards.children.values() if child.peer.awaits_answer]
        if busy and len(made.recoveries) < 12:
            with suppress(ProcessLookupError):  # its death is not known yet
                os.kill(rng.choice(busy).pid, signal.SIGKILL)


async def replace_engine(made: World, group: asyncio.TaskGroup) -> None:
    """Let an engine die in the eyes of the controller, though its last answers still come, and start another."""
    made.fleet.remove("engine-0")
    made.clients.pop("engine-0").end(ComponentDied("dead", remedy="none"))
    await made.start_engine("engine-0", group)


async def resize(made: World, group: asyncio.TaskGroup) -> None:
    """Add an engine, and remove another when it has ended its requests."""
    await asyncio.sleep(0.05)
    await made.start_engine("engine-2", group)
    made.fleet.retire("engine-1")
    for _ in range(200):  # what is left then continues on others
        if made.fleet.load("engine-1"):
            await asyncio.sleep(0.02)
    made.fleet.remove("engine-1")
    made.clients.pop("engine-1").end(ComponentDied("removed", remedy="none"))


async def run_alone(made: World, number: int, rng: random.Random) -> list[EpisodeGraph]:
    """Run the episodes of a group one by one, of which one is withdrawn at some time."""
    handles = [Withdrawal() for _ in range(SIZE)]
    async with asyncio.TaskGroup() as alone:
        runs = [
            alone.create_task(made.shards.run_episode(EpisodeKey(number, place), task_of(number), handle))
            for place, handle in enumerate(handles)
        ]
        await asyncio.sleep(rng.random() * 0.1)
        handles[0].withdraw("enough")
    return [each.result() for each in runs]


@pytest.mark.timeout(300)
def test_episodes_end_once_with_their_own_tokens_while_shards_and_engines_are_killed(tmp_path: Path) -> None:
    rng = random.Random(7)
    ended: list[EpisodeGraph] = []

    async def run_group(made: World, number: int) -> None:
        """All episodes of a group, together or one by one."""

        async def take(episodes: Sequence[EpisodeGraph]) -> None:
            ended.extend(episodes)

        if number % 3:
            await made.shards.run_group(number, SIZE, task_of(number), take)
        else:
            ended.extend(await run_alone(made, number, rng))

    async def run_groups(made: World, numbers: range) -> None:
        async with asyncio.TaskGroup() as groups:
            for number in numbers:
                groups.create_task(run_group(made, number))

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), world(tmp_path, 1) as (made, group):
            killing = group.create_task(kill_shards(made, rng))
            await run_groups(made, range(24))
            await replace_engine(made, group)
            await asyncio.gather(run_groups(made, range(24, 48)), resize(made, group))
            await run_groups(made, range(48, 54))
            killing.cancel()
            assert len(made.recoveries) >= 2
            assert all("SIGKILL" in each.cause for each in made.recoveries)
            assert any(core.aborted for core in made.cores), "nothing ran when a shard was killed"

    asyncio.run(run())
    keys = sorted(episode.key for episode in ended)
    assert keys == [EpisodeKey(number, place) for number in range(54) for place in range(SIZE)]
    for episode in ended:
        refuse_wrong(episode)


class Sent:
    """The sockets of an engine that remember what was sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Chunks]] = []
        self.forgotten: list[str] = []

    def answer(self, reader: str, message: Chunks) -> None:
        self.messages.append((reader, message))

    def forget_reader(self, reader: str) -> None:
        self.forgotten.append(reader)


def request(number: int) -> GenerateRequest:
    return GenerateRequest(request_id=number, prompt_ids_T=np.zeros(1, np.int32), sampling=SAMPLING)


def chunk(number: int, *, ended: bool = False) -> TokenChunk:
    stop = StopReason.STOP if ended else None
    return TokenChunk(request_id=number, tokens=Tokens.observed([number]), stop_reason=stop)


class DueCore(SeededCore):
    """A core that returns chunks of other requests when some are withdrawn."""

    def abort(self, request_ids: Sequence[int]) -> list[TokenChunk]:
        return [chunk(number, ended=True) for number in (*request_ids, 8, 9)]


class Silent:
    """A channel over which nothing comes."""

    def send(self, message: Any) -> None: ...


def test_what_others_are_due_is_sent_when_the_requests_of_a_dead_process_are_withdrawn() -> None:
    sent = Sent()
    routes = AnswerRoutes(sent)
    host = EngineHost(DueCore(random.Random(0)), Silent(), None, EngineHostConfig(answers=routes))  # type: ignore[arg-type]
    host._handle(engine.Generate(requests=(request(1),), answers_to="a"))
    host._handle(engine.Generate(requests=(request(8),), answers_to="b"))
    left = host._handle(engine.AbortAllOf(answers_to="a"))
    assert [each.request_id for each in left] == [8, 9]
    assert host._handle(engine.Generate(requests=(request(2),), answers_to="a")) == []
    assert routes.split([chunk(2)], EngineStats()) == [chunk(2)], "it was never started, so nobody reads it"


class EndsAtOnce:
    """An environment that asks for nothing."""

    async def run(self, task: Task, conversations: Any) -> AttemptOutcome:
        return AttemptOutcome()


class Reports:
    """The channel of a shard whose reports cross with the withdrawal of the same episode."""

    addresses = ChannelAddresses(orders="ipc:///nowhere/orders", reports="ipc:///nowhere/reports")

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.on_report: Callable[[], None] = lambda: None

    def send(self, message: Any) -> None:
        self.sent.append(message)
        self.on_report()


def test_an_episode_that_has_ended_cannot_be_withdrawn_any_more() -> None:
    start = RolloutStart(
        sampling=SAMPLING, run_seed=0, limits={}, timeout_s=60.0, retries=0, record_tokens=0, deadline_s=60.0
    )
    reports = Reports()
    shard = RolloutShard(start, reports, None, None)  # type: ignore[arg-type]
    shard._runner = dataclasses.replace(shard._runner, env=EndsAtOnce())  # type: ignore[arg-type]
    withdrawal = WithdrawEpisode(key=EpisodeKey(0, 0), reason="enough")

    async def body() -> None:
        async with asyncio.TaskGroup() as calls:
            reports.on_report = lambda: shard.handle(withdrawal, calls)
            shard.handle(StartEpisodes(call=0, group=0, places=(0,), task=task_of(0)), calls)

    asyncio.run(body())
    assert [each.status for each in reports.sent[0].episodes] == [EpisodeStatus.FAILED]
    assert not shard._running


def test_a_process_that_reads_nothing_holds_no_engine_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_QUEUED", 10)

    async def body() -> None:
        line = ControllerChannel(tmp_path, "engine", controller.Message)
        part = PartChannel(line.addresses, engine.Message)
        reader = f"ipc://{tmp_path}/reader"
        for number in range(100):  # nobody listens there yet
            part.answer(reader, Chunks(chunks=(chunk(number),), stats=EngineStats(), spans=()))
        listener = AnswerListener(reader, Chunks)
        read: list[int] = []
        while len(read) < 100:
            read += [message.chunks[0].request_id for message in await listener.receive()]
        assert read == list(range(100))
        listener.close()
        part.close()
        line.close()

    asyncio.run(asyncio.wait_for(body(), 60.0))


def test_shards_do_not_all_begin_with_the_same_engine() -> None:
    told: dict[str, list[str]] = {}

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def send(self, message: EngineStateChanges) -> None:
            told.setdefault(self.name, []).extend(each.name for each in message.engines)

    async def body() -> None:
        config = SupervisionConfig(restarts=0, start_timeout_s=1.0, silence_s=1.0)
        clients = dict.fromkeys("abcd", SimpleNamespace(orders_address="x"))
        fleet = Fleet(RealClock(), size=4)
        shards = RolloutShards(None, shard_names(2), config, RealClock(), fleet=fleet, client=clients.__getitem__)  # type: ignore[arg-type]
        shards._ready = {name: Told(name) for name in shards.names}  # type: ignore[misc]
        for name in "abcd":
            fleet.add(name, SimpleNamespace(stats=EngineStats), version=0)  # type: ignore[arg-type]
        await asyncio.sleep(0)

    asyncio.run(body())
    assert told == {"rollout-0": list("abcd"), "rollout-1": list("cdab")}


def test_chunks_go_to_the_process_that_asked_and_to_no_other() -> None:
    sent = Sent()
    routes = AnswerRoutes(sent)
    routes.add(engine.Generate(requests=(request(1), request(2)), answers_to="a"))
    routes.add(engine.Generate(requests=(request(3),), answers_to="b"))
    routes.add(engine.Generate(requests=(request(4),)))
    stats = EngineStats(version=3)
    own = routes.split([chunk(number, ended=number == 2) for number in (4, 3, 2, 1)], stats)
    assert [each.request_id for each in own] == [4]
    assert {reader: [each.request_id for each in message.chunks] for reader, message in sent.messages} == {
        "a": [2, 1],
        "b": [3],
    }
    assert all(message.stats is stats for _, message in sent.messages)
    assert list(routes.forget("a")) == [1], "the one that ended is not to be withdrawn"
    assert sent.forgotten == ["a"]
    sent.messages.clear()
    assert [each.request_id for each in routes.split([chunk(1), chunk(3)], stats)] == [1]
    assert [reader for reader, _ in sent.messages] == ["b"]


class Recorded:
    """A channel that keeps what is sent, and whose controller goes away after the report that the shard is ready."""

    def __init__(self, directory: Path) -> None:
        self.addresses = channels.local_addresses(directory, "rollout-0.0")
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[Any]:
        raise EOFError("the controller has gone")


def test_warnings_of_workers_that_start_follow_the_report_that_the_shard_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def open_workers(_start: Any, _sampling: Any, _directory: Path, warn: Callable[[str], None]) -> Any:
        warn("a worker has died")
        yield None
        warn("never reached")

    monkeypatch.setattr(shard_host, "open_workers", open_workers)
    monkeypatch.setattr(worker, "run_token", lambda: TOKEN)
    monkeypatch.setattr(worker, "forget_token", lambda: None)
    environment = ShardEnvironment(env={}, model="", agents=(), adapters=(), logs="", start_timeout_s=1.0)
    start = RolloutStart(
        sampling=SAMPLING, run_seed=0, limits={}, timeout_s=None, retries=0, record_tokens=8, deadline_s=1.0,
        environment=environment,
    )  # fmt: skip
    channel = Recorded(tmp_path)
    with pytest.raises(EOFError):
        shard_host.run_rollout(start, channel)  # type: ignore[arg-type]
    assert [type(message) for message in channel.sent] == [Ready, Noted]
