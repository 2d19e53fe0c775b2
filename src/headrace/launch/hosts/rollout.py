"""The process of a rollout shard. It runs episodes against the engines, which send their chunks directly to it, and
sends the episodes to the controller when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.heap import gc_frozen
from headrace.base.tasks import first_error
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, TokenChunk
from headrace.base.types.messages.controller import Chunks, EpisodesEnded, Noted, TurnsGrown
from headrace.base.types.messages.rollout import (
    EndCall,
    EngineStateChange,
    EngineStateChanges,
    Message,
    StartEpisodes,
    WithdrawEpisode,
)
from headrace.base.types.task import Task
from headrace.engine.fleet import Fleet
from headrace.engine.fleet.router import EngineState
from headrace.flow.ledger.bundles import split_by_tokens
from headrace.flow.ledger.streams import RunningTurns
from headrace.launch.channel import AnswerListener, DirectOrders, PartChannel, answers_address
from headrace.launch.clients.engine import EngineClient
from headrace.launch.hosts.shard_environment import ShardWorkers, open_workers
from headrace.launch.hosts.worker import serve
from headrace.launch.rollouts import REQUESTS_BITS
from headrace.launch.starts import RolloutStart, ShardEnvironment
from headrace.rollout import EpisodeLimits, EpisodeRunner, Withdrawal
from headrace.rollout.agents import POLICY_ALONE, Agents
from headrace.rollout.environments import SingleTurn
from headrace.rollout.siblings import OnEnded, SiblingRunner

MAX_REPORTED_TOKENS = 1 << 20
"""The largest number of tokens of episodes in one report, unless a single episode has more; their message has about 16
MiB."""


def run_rollout(start: RolloutStart, channel: PartChannel) -> None:
    """Run episodes with the settings ``start``, as ordered over ``channel``, until the order to shut down. This is the
    main function of a shard's process."""
    with gc_frozen():
        asyncio.run(_serve(start, channel))


async def _serve(start: RolloutStart, channel: PartChannel) -> None:
    """Start the environment of the shard, if it has one, and run the shard. This ends with the process."""
    try:
        if start.environment is None:
            await _run_shard(start, channel, None)
            return
        directory = Path(channel.addresses.orders.removeprefix("ipc://")).parent
        notes = _Notes(channel)
        async with open_workers(start.environment, start.sampling, directory, notes.add) as workers:
            await _run_shard(start, channel, workers, notes.send)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def _run_shard(
    start: RolloutStart, channel: PartChannel, workers: ShardWorkers | None, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Run the episodes of a shard, in the environment of ``workers`` if there is one. ``on_ready`` is called when the
    shard has reported that it is ready."""
    with closing(AnswerListener(answers_address(channel.addresses), Chunks)) as answers:
        shard = RolloutShard(start, channel, answers, workers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shard.listen())

            def ready() -> None:
                """Begin to report the workers, after the report that the shard is ready."""
                on_ready()
                if workers is not None:
                    tasks.create_task(workers.report(channel.send))

            await serve(channel, shard.handle, on_ready=ready)


def _make_agents(environment: ShardEnvironment | None) -> Agents:
    """Return the agents that may answer in an episode of ``environment``. None of them has its own engine."""
    if environment is None:
        return POLICY_ALONE
    return Agents(known=frozenset(environment.agents), adapters=environment.adapters)


class _Notes:
    """The warnings of a shard's workers, which are sent to the controller. Warnings from the time before the shard is
    ready, such as that a worker has died and is started again, are delayed until it is ready, because no message may
    precede that report."""

    def __init__(self, channel: PartChannel) -> None:
        """Create the object without warnings. ``channel`` leads to the controller."""
        self._channel = channel
        self._early: list[str] | None = []
        """The delayed warnings; ``None`` when the shard is ready."""

    def add(self, text: str) -> None:
        """Send the warning ``text``, or store it until :meth:`send` if the shard is not ready."""
        if self._early is None:
            self._channel.send(Noted(text=text))
        else:
            self._early.append(text)

    def send(self) -> None:
        """Send the delayed warnings. From now on every warning is sent at once."""
        early, self._early = self._early or [], None
        for text in early:
            self.add(text)


class RolloutShard:
    """The running episodes of one shard, and the engines to which they send requests."""

    def __init__(
        self, start: RolloutStart, channel: PartChannel, answers: AnswerListener, workers: ShardWorkers | None
    ) -> None:
        """Create a shard with the settings ``start``. It receives orders and reports episodes over ``channel``, and
        receives the chunks of engines through ``answers``. ``workers`` are the workers of the environment; ``None``
        means that the environment needs no workers, because each episode is one answer to its prompt."""
        self._channel, self._answers = channel, answers
        self._answers_address = answers_address(channel.addresses)
        """The address to which engines send the chunks of this shard's requests."""
        self._deadline_s = start.deadline_s
        """The longest time to wait for an engine's answer, in seconds."""
        clock = RealClock()
        self.fleet = Fleet(clock)
        """The engines, with the states that the controller has sent."""
        self._clients: dict[str, EngineClient] = {}
        """The client of each connected engine, by the engine's name."""
        self._addresses: dict[str, str] = {}
        """The address at which each engine receives orders. A restarted engine has a new address."""
        self._by_number: dict[int, EngineClient] = {}
        """The clients of engines, by the upper bits of their request numbers."""
        self._turns = RunningTurns(
            lambda stream: channel.send(TurnsGrown(parts=stream.parts)), clock, max_unrecorded=start.record_tokens
        )
        """The running turns, whose new tokens are sent to the controller, which records them."""
        self._runner = EpisodeRunner(
            engine=self.fleet,
            env=SingleTurn() if workers is None else workers.pool,
            sampling=start.sampling,
            run_seed=start.run_seed,
            on_tokens=lambda _: None,
            on_part=self._turns.add,
            note=lambda text: channel.send(Noted(text=text)),
            agents=_make_agents(start.environment),
            chat=None if workers is None else workers.chat,
            limits=EpisodeLimits(**start.limits),
            timeout_s=start.timeout_s,
            retries=start.retries,
        )
        self._siblings = SiblingRunner.from_runner(self._runner)
        """The runner of whole groups; ``None`` if each episode has to run alone."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        """The task that executes each order to run episodes, by the number of the order."""
        self._running: dict[EpisodeKey, Withdrawal] = {}
        """The handle that ends each running episode early."""

    async def listen(self) -> None:
        """Pass the chunks of engines to the requests that wait for them. This ends only by cancellation."""
        while True:
            for message in await self._answers.receive():
                client = self._by_number.get(message.chunks[0].request_id >> REQUESTS_BITS)
                if client is not None:  # otherwise the engine is lost, and the request continues elsewhere
                    client.handle(message)

    def handle(self, order: Message, calls: asyncio.TaskGroup) -> None:
        """Execute an order of the controller. Episodes run as tasks of ``calls``."""
        match order:
            case EngineStateChanges(engines=engines):
                for update in engines:
                    self._update_engine(update)
            case StartEpisodes():
                for place in order.places:
                    self._running[EpisodeKey(order.group, place)] = Withdrawal()
                task = self._calls[order.call] = calls.create_task(self._run(order))
                task.add_done_callback(lambda _: self._forget_order(order))
            case WithdrawEpisode(key=key, reason=reason):
                if key in self._running:  # otherwise it has ended in the meantime
                    self._running[key].withdraw(reason)
            case EndCall(call=call):
                if call in self._calls:
                    self._calls[call].cancel()

    def _forget_order(self, order: StartEpisodes) -> None:
        """Remove the records of an order whose episodes have ended or were cancelled."""
        del self._calls[order.call]
        for place in order.places:
            self._running.pop(EpisodeKey(order.group, place), None)
            self._turns.forget(EpisodeKey(order.group, place))

    def _update_engine(self, update: EngineStateChange) -> None:
        """Set the state of an engine to ``update``, the state that the controller has sent: connect to a new engine,
        and disconnect from an engine that has left."""
        known_address = self._addresses.get(update.name)
        if known_address is not None and known_address != update.orders:  # the engine has left, or was started again
            self._remove_engine(update.name)
        if not update.state:
            return
        if update.name not in self._clients:
            self._addresses[update.name] = update.orders
            client = EngineClient(
                update.name,
                DirectOrders(update.orders),
                token="",
                on_spans=lambda _: None,
                deadline_s=self._deadline_s,
                first_request=update.first_request,
                answers_to=self._answers_address,
            )
            self._clients[update.name] = self._by_number[update.first_request >> REQUESTS_BITS] = client
            self.fleet.add(update.name, client)
        self.fleet.mirror(update.name, EngineState[update.state], update.version, paused=update.paused)

    def _remove_engine(self, name: str) -> None:
        """Remove an engine that has died. Its requests continue on other engines."""
        client = self._clients.pop(name)
        del self._addresses[name]
        self._by_number = {number: known for number, known in self._by_number.items() if known is not client}
        self.fleet.remove(name)
        client.close()

    async def _run(self, order: StartEpisodes) -> None:
        """Run the episodes of ``order``, and report each episode when it has ended."""

        async def report(ended: Sequence[EpisodeGraph]) -> None:
            """Report episodes that have ended together."""
            for episode in ended:
                self._turns.forget(episode.key)
            for episodes in split_by_tokens(ended, MAX_REPORTED_TOKENS):
                self._channel.send(EpisodesEnded(call=order.call, episodes=tuple(episodes)))

        if order.together and self._siblings is not None:
            await self._siblings.run(order.group, len(order.places), order.task, report)
            return
        async with asyncio.TaskGroup() as group:
            for key in [EpisodeKey(order.group, place) for place in order.places]:
                partial_turns = [part for part in order.partial_turns if part.key == key]
                group.create_task(self._run_one(key, order.task, partial_turns, report))

    async def _run_one(self, key: EpisodeKey, task: Task, partial_turns: Sequence[TokenChunk], report: OnEnded) -> None:
        """Run the episode ``key`` of ``task``, continuing from its recorded tokens ``partial_turns``, and call
        ``report`` with it."""
        episode = await self._runner.run(key, task, self._running[key], partial_turns)
        del self._running[key]  # an ended episode cannot be withdrawn any more
        await report([episode])
