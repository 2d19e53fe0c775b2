"""The rollout shards of a run: processes that run episodes, so that the chunks of the episodes do not pass through the
controller.

    controller ──episodes to run──▶ rollout-n ──requests──▶ engines
        ▲  ▲                          │    ▲                   │ chunks
        │  └── episodes that ended ───┘    └───────────────────┘
        └──────── counters, commits ───────────────────────────┘

Only the flow in the controller admits groups. All episodes of a group run in one shard, with the same seeds as in the
controller, so that the tokens do not depend on the number of shards. Every shard may send requests to every engine. If
a shard dies, the engines abort its requests, and its episodes continue in another shard from the tokens that were
recorded (``flow.record_tokens``). The shard is then started again, like an engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import msgspec

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, TokenChunk
from headrace.base.types.messages.engine import AbortAllOf
from headrace.base.types.messages.rollout import EngineStateChange, EngineStateChanges, StartEpisodes, WithdrawEpisode
from headrace.base.types.task import Task
from headrace.engine.fleet import Fleet
from headrace.launch.child import Child
from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.supervision import Outage, SupervisionConfig, Supervisor
from headrace.rollout import Withdrawal
from headrace.rollout.siblings import OnEnded

REQUESTS_BITS = 32
"""The number of bits for the request numbers of one shard at one engine process."""


def shard_names(count: int) -> tuple[str, ...]:
    """Return the names of a run's ``count`` rollout shards.

    >>> shard_names(2)
    ('rollout-0', 'rollout-1')
    """
    return tuple(f"rollout-{index}" for index in range(count))


class RolloutShards(Supervisor):
    """The supervisor of a run's rollout shards. It also runs episodes in them, and so implements
    :class:`~headrace.control.parts.EpisodeShards`."""

    def __init__(
        self,
        start: Callable[[str], Awaitable[Child]],
        names: Sequence[str],
        config: SupervisionConfig,
        clock: Clock,
        *,
        fleet: Fleet,
        client: Callable[[str], EngineClient],
    ) -> None:
        """Create the supervisor of the shards ``names``, which send requests to the engines of ``fleet``. No shard is
        started yet. ``client`` returns the controller's client of an engine.
        :class:`~headrace.launch.supervision.Supervisor` describes the other arguments."""
        super().__init__(start, names, config, clock)
        self._fleet, self._get_engine_client = fleet, client
        self._ready: dict[str, RolloutClient] = {}
        """The clients of the shards that are ready, by name."""
        self._changed = asyncio.Event()
        """Set, and then replaced by a new event, when a shard becomes ready."""
        self._calls = itertools.count()
        """The numbers of the orders that will be sent."""
        self._request_ranges = itertools.count(1)
        """The ranges of request numbers that are still free; range 0 belongs to the controller."""
        self._recorded: dict[EpisodeKey, dict[int, list[TokenChunk]]] = {}
        """The recorded tokens of each running episode, by the number of the sampled turn."""
        self._on_parts: Callable[[Sequence[TokenChunk]], None] = lambda _: None
        """The callback for tokens of running turns; see :meth:`connect`."""
        self._note: Callable[[str], None] = lambda _: None
        """The callback for unusual events; see :meth:`connect`."""
        self._changed_engines: dict[str, None] = {}
        """The names of the engines whose new state was not sent to the shards yet."""
        fleet.follow(self._engine_changed)

    def connect(self, on_parts: Callable[[Sequence[TokenChunk]], None], note: Callable[[str], None]) -> None:
        """Set the callbacks: ``on_parts`` receives the tokens of running turns that have to be recorded, and ``note``
        receives short texts about unusual events."""
        self._on_parts, self._note = on_parts, note

    async def run_episode(
        self, key: EpisodeKey, task: Task, withdrawal: Withdrawal, partial_turns: Sequence[TokenChunk] = ()
    ) -> EpisodeGraph:
        """Run one episode of ``task`` in a shard, and return it; see
        :meth:`~headrace.rollout.runner.EpisodeRunner.run`."""
        order = StartEpisodes(call=0, group=key.group, places=(key.place,), task=task)
        async with aclosing(self._run(order, withdrawal, partial_turns)) as batches:
            async for episodes in batches:
                return episodes[0]
        raise AssertionError("an episode ends once")

    async def run_group(self, number: int, size: int, task: Task, on_ended: OnEnded) -> None:
        """Run all ``size`` episodes of the group ``number`` in one shard. ``on_ended`` receives the episodes that end
        together; see :meth:`~headrace.rollout.siblings.SiblingRunner.run`."""
        order = StartEpisodes(call=0, group=number, places=tuple(range(size)), task=task, together=True)
        async with aclosing(self._run(order)) as batches:
            async for episodes in batches:
                await on_ended(episodes)

    async def wait_until_complete(self) -> None:
        """Wait until every shard has started."""
        while len(self._ready) < len(self.names):
            await self._changed.wait()

    async def serve(self, child: Child, outage: Outage | None) -> None:
        """Send the states of all engines to a new shard, and make the shard available for episodes. This ends only by
        cancellation."""
        client = self._get_client(child.role)
        client.on_parts, client.on_note = self._record_parts, self._forward_note
        self._send_states(child.role, client, self._fleet.names)
        self._ready[child.role] = client
        if outage is not None:
            self.report_recovery(child.role, outage)
        self._wake_waiting()
        await asyncio.Event().wait()

    def stop_using(self, name: str) -> int:
        """Stop using the shard ``name``, which has died: assign it no more episodes, and make the engines abort its
        requests. Return the number of its orders, which other shards will continue."""
        client = self._get_client(name)
        self._ready.pop(name, None)
        for engine in self._fleet.names:
            self._get_engine_client(engine).send(AbortAllOf(answers_to=client.answers_address))
        return client.lose()

    def _get_client(self, name: str) -> RolloutClient:
        """Return the client of the current process of the shard ``name``."""
        peer = self.children[name].peer
        assert isinstance(peer, RolloutClient)
        return peer

    def _engine_changed(self, name: str) -> None:
        """Record that the state of the engine ``name`` has changed. Soon afterwards the states of all changed engines
        are sent to the shards together."""
        if not self._changed_engines:
            asyncio.get_running_loop().call_soon(self._send_changed_engines)
        self._changed_engines[name] = None

    def _send_changed_engines(self) -> None:
        """Send the states of the changed engines to all shards. This must happen before the shards receive more
        episodes."""
        names, self._changed_engines = self._changed_engines, {}
        for shard, client in self._ready.items() if names else ():
            self._send_states(shard, client, tuple(names))

    def _send_states(self, shard: str, client: RolloutClient, names: Sequence[str]) -> None:
        """Send the states of the engines ``names`` to the shard ``shard``. Their order differs between shards: among
        engines with the same load a shard chooses the first, and different shards must not choose the same engine."""
        first = self.names.index(shard) * len(names) // len(self.names)
        client.send(EngineStateChanges(engines=tuple(map(self._make_engine_state, (*names[first:], *names[:first])))))

    def _make_engine_state(self, name: str) -> EngineStateChange:
        """Return the state of the engine ``name``, as it is sent to one shard."""
        current = self._fleet.get_state(name)
        if current is None:
            return EngineStateChange(name=name)
        state, version, paused = current
        return EngineStateChange(
            name=name,
            orders=self._get_engine_client(name).orders_address,
            first_request=next(self._request_ranges) << REQUESTS_BITS,
            state=state.name,
            version=version,
            paused=paused,
        )

    async def _run(
        self, order: StartEpisodes, withdrawal: Withdrawal | None = None, partial_turns: Sequence[TokenChunk] = ()
    ) -> AsyncGenerator[Sequence[EpisodeGraph], None]:
        """Run the episodes of ``order``, and yield lists of episodes that have ended together. ``partial_turns``
        are recorded tokens of their turns. ``withdrawal`` can end an episode that runs alone."""
        keys = [EpisodeKey(order.group, place) for place in order.places]
        self._recorded.update({key: {} for key in keys})
        for part in partial_turns:
            self._recorded[part.key][part.turn] = [part]
        try:
            async with aclosing(self._run_across_shards(order, withdrawal)) as batches:
                async for episodes in batches:
                    yield episodes
        finally:
            for key in keys:
                del self._recorded[key]

    async def _run_across_shards(
        self, order: StartEpisodes, withdrawal: Withdrawal | None
    ) -> AsyncGenerator[Sequence[EpisodeGraph], None]:
        """Run the episodes of ``order``, and yield lists of episodes that have ended together. If a shard dies, its
        episodes continue in another shard from their recorded tokens. ``withdrawal`` can end an episode that runs
        alone."""
        pending = {place: self._recorded[EpisodeKey(order.group, place)] for place in order.places}
        while pending:
            recorded_turns = [turn for recorded in pending.values() for turn in recorded.values()]
            partial_turns = tuple(TokenChunk.concat(turn) for turn in recorded_turns)
            order = msgspec.structs.replace(
                order, call=next(self._calls), places=tuple(pending), partial_turns=partial_turns
            )
            async with aclosing(self._run_in_shard(order, withdrawal)) as batches:
                async for episodes in batches:
                    _remove(pending, episodes)
                    yield episodes
            # the shard has died: only episodes that run one by one can continue from recorded tokens
            order = msgspec.structs.replace(order, together=False)

    async def _run_in_shard(
        self, order: StartEpisodes, withdrawal: Withdrawal | None
    ) -> AsyncGenerator[Sequence[EpisodeGraph], None]:
        """Run the episodes of ``order`` in one shard. Yield lists of episodes that have ended together, until all have
        ended or the shard dies. ``withdrawal`` can end an episode that runs alone."""
        client = await self._wait_for_shard(order.group)
        self._send_changed_engines()
        arrived, num_pending = client.begin(order), len(order.places)
        if withdrawal is not None:
            key = EpisodeKey(order.group, order.places[0])
            withdrawal.attach(lambda: client.send(WithdrawEpisode(key=key, reason=withdrawal.reason)))
        try:
            while num_pending and (episodes := await arrived.get()):
                num_pending -= len(episodes)
                yield episodes
        finally:
            client.forget(order, ended=not num_pending)

    async def _wait_for_shard(self, group: int) -> RolloutClient:
        """Return the shard that runs the episodes of ``group``, and wait if no shard is ready. A group always has the
        same shard, unless that shard is being restarted."""
        while not self._ready:
            await self._changed.wait()
        ready = [name for name in self.names if name in self._ready]
        own = self.names[group % len(self.names)]
        return self._ready[own if own in self._ready else ready[group % len(ready)]]

    def _record_parts(self, parts: Sequence[TokenChunk]) -> None:
        """Store the tokens of running turns that a shard sends for recording, and pass them to ``on_parts``."""
        running_parts = [part for part in parts if part.key in self._recorded]
        for part in running_parts:
            turn = self._recorded[part.key].setdefault(part.turn, [])
            if part.lost:
                turn.clear()
            turn.append(msgspec.structs.replace(part, lost=""))
        self._on_parts(running_parts)

    def _forward_note(self, text: str) -> None:
        """Pass a note of a shard to the callback ``note``."""
        self._note(text)

    def _wake_waiting(self) -> None:
        """Wake the tasks that wait for a shard."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _remove(pending: dict[int, dict[int, list[TokenChunk]]], episodes: Sequence[EpisodeGraph]) -> None:
    """Remove the ended ``episodes`` from ``pending``. Keys of ``pending`` are the indices of the episodes in the group;
    its values are their recorded tokens, which are deleted."""
    for episode in episodes:
        pending.pop(episode.key.place).clear()
