"""The rollout shards of a run: processes that run episodes, so that their chunks do not pass through the controller.

    controller ──episodes to run──▶ rollout-n ──requests──▶ engines
        ▲  ▲                          │    ▲                   │ chunks
        │  └── episodes that ended ───┘    └───────────────────┘
        └──────── counters, commits ───────────────────────────┘

The flow of the controller alone admits groups. All episodes of a group run in one shard, each with the seed that it
would have in the controller, so that the tokens do not depend on the number of shards. Every shard may ask every
engine. If a shard dies, its engines forget its requests, its episodes continue in another shard from the tokens that
it had streamed (``flow.record_tokens``), and it is started again as engines are.
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
from headrace.base.types.messages.rollout import EngineSeen, EnginesSeen, StartEpisodes, WithdrawEpisode
from headrace.base.types.task import Task
from headrace.engine.fleet import Fleet
from headrace.launch.child import Child
from headrace.launch.clients.engine import EngineClient
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.supervision import Outage, SupervisionConfig, Supervisor
from headrace.rollout import Withdrawal
from headrace.rollout.siblings import OnEnded

REQUESTS_BITS = 32
"""A shard's requests to one process of an engine have numbers of their own, of this many bits."""


def shard_names(count: int) -> tuple[str, ...]:
    """Return the names of a run's ``count`` rollout shards.

    >>> shard_names(2)
    ('rollout-0', 'rollout-1')
    """
    return tuple(f"rollout-{place}" for place in range(count))


class RolloutShards(Supervisor):
    """The supervisor of a run's rollout shards, which runs episodes in them (it implements
    :class:`~headrace.control.parts.EpisodeShards`)."""

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
        """Make the supervisor of the shards ``names``, which ask the engines of ``fleet``; none is started yet.
        ``client`` returns the controller's client of an engine. The other arguments are described at
        :class:`~headrace.launch.supervision.Supervisor`."""
        super().__init__(start, names, config, clock)
        self._fleet, self._engine = fleet, client
        self._ready: dict[str, RolloutClient] = {}
        self._changed = asyncio.Event()
        self._calls = itertools.count()
        self._clients = itertools.count(1)  # the numbers below belong to the controller
        self._recorded: dict[EpisodeKey, dict[int, list[TokenChunk]]] = {}
        """The recorded tokens of each running episode, by the number of the sampled turn."""
        self._on_parts: Callable[[Sequence[TokenChunk]], None] = lambda _: None
        self._note: Callable[[str], None] = lambda _: None
        self._unseen: dict[str, None] = {}
        """The names of the engines whose state has changed and that the shards have not been told."""
        fleet.follow(self._engine_changed)

    def connect(self, on_parts: Callable[[Sequence[TokenChunk]], None], note: Callable[[str], None]) -> None:
        """Call ``on_parts`` with the tokens of running turns that are to be recorded, and ``note`` with notes on
        unusual events, from now on."""
        self._on_parts, self._note = on_parts, note

    async def run_episode(
        self, key: EpisodeKey, task: Task, withdrawal: Withdrawal, begun: Sequence[TokenChunk] = ()
    ) -> EpisodeGraph:
        """Run one episode of ``task`` in a shard, and return it; see
        :meth:`~headrace.rollout.runner.EpisodeRunner.run`."""
        order = self._order(key.group, (key.place,), task)
        async with aclosing(self._run(order, withdrawal, begun)) as batches:
            async for episodes in batches:
                return episodes[0]
        raise AssertionError("an episode ends once")

    async def run_group(self, number: int, size: int, task: Task, on_ended: OnEnded) -> None:
        """Run all ``size`` episodes of the group ``number`` in one shard. ``on_ended`` is called with those that end
        together; see :meth:`~headrace.rollout.siblings.SiblingRunner.run`."""
        order = msgspec.structs.replace(self._order(number, tuple(range(size)), task), together=True)
        async with aclosing(self._run(order)) as batches:
            async for episodes in batches:
                await on_ended(episodes)

    async def wait_until_complete(self) -> None:
        """Wait until every shard has started."""
        while len(self._ready) < len(self.names):
            await self._changed.wait()

    async def serve(self, child: Child, outage: Outage | None) -> None:
        """Tell a new shard the engines, and let it run episodes."""
        client = self._client(child.role)
        client.on_parts, client.on_note = self._grown, self._noted
        self._tell(child.role, client, self._fleet.names)
        self._ready[child.role] = client
        if outage is not None:
            self.recovered(child.role, outage)
        self._notify()
        await asyncio.Event().wait()

    def leave(self, name: str) -> int:
        """Give the shard ``name``, which has died, no more episodes, let the engines forget its requests, and return
        the number of its orders, which other shards continue."""
        client = self._client(name)
        self._ready.pop(name, None)
        for engine in self._fleet.names:
            self._engine(engine).send(AbortAllOf(answers_to=client.answers_address))
        return client.lose()

    def _client(self, name: str) -> RolloutClient:
        """Return the client of the present process of the shard ``name``."""
        peer = self.children[name].peer
        assert isinstance(peer, RolloutClient)
        return peer

    def _engine_changed(self, name: str) -> None:
        """Tell the shards soon, with all others that change now, the state of an engine that has changed."""
        if not self._unseen:
            asyncio.get_running_loop().call_soon(self._tell_engines)
        self._unseen[name] = None

    def _tell_engines(self) -> None:
        """Tell the shards the engines that have changed. They must know them before they get more episodes."""
        names, self._unseen = self._unseen, {}
        for shard, client in self._ready.items() if names else ():
            self._tell(shard, client, tuple(names))

    def _tell(self, shard: str, client: RolloutClient, names: Sequence[str]) -> None:
        """Tell the shard ``shard`` the state of the engines ``names``, in an order of its own: of engines with the same
        load it asks the first, and shards that do the same shall not ask the same."""
        first = self.names.index(shard) * len(names) // len(self.names)
        client.send(EnginesSeen(engines=tuple(map(self._seen, (*names[first:], *names[:first])))))

    def _seen(self, name: str) -> EngineSeen:
        """Return the state of an engine for one shard."""
        seen = self._fleet.seen(name)
        if seen is None:
            return EngineSeen(name=name)
        state, version, paused = seen
        return EngineSeen(
            name=name,
            orders=self._engine(name).orders_address,
            first_request=next(self._clients) << REQUESTS_BITS,
            state=state.name,
            version=version,
            paused=paused,
        )

    def _order(self, group: int, places: tuple[int, ...], task: Task) -> StartEpisodes:
        """Return the order to run episodes of a group from their beginning."""
        return StartEpisodes(call=0, group=group, places=places, task=task)

    async def _run(
        self, order: StartEpisodes, withdrawal: Withdrawal | None = None, begun: Sequence[TokenChunk] = ()
    ) -> AsyncGenerator[Sequence[EpisodeGraph], None]:
        """Run the episodes of ``order``, and yield those that have ended together. ``begun`` are recorded tokens of
        their turns; ``withdrawal`` may end an episode that is alone."""
        keys = [EpisodeKey(order.group, place) for place in order.places]
        self._recorded.update({key: {} for key in keys})
        for part in begun:
            self._recorded[part.key][part.turn] = [part]
        try:
            async with aclosing(self._run_in_turn(order, withdrawal)) as batches:
                async for episodes in batches:
                    yield episodes
        finally:
            for key in keys:
                del self._recorded[key]

    async def _run_in_turn(
        self, order: StartEpisodes, withdrawal: Withdrawal | None
    ) -> AsyncGenerator[Sequence[EpisodeGraph], None]:
        """Run the episodes of ``order`` in one shard after the other where shards die, each from its recorded tokens,
        and yield those that have ended together."""
        left = {place: self._recorded[EpisodeKey(order.group, place)] for place in order.places}
        while left:
            begun = tuple(TokenChunk.joined(turn) for recorded in left.values() for turn in recorded.values())
            order = msgspec.structs.replace(order, call=next(self._calls), places=tuple(left), begun=begun)
            async with aclosing(self._run_in_one(order, withdrawal)) as batches:
                async for episodes in batches:
                    _remove(left, episodes)
                    yield episodes
            order = msgspec.structs.replace(order, together=False)

    async def _run_in_one(
        self, order: StartEpisodes, withdrawal: Withdrawal | None
    ) -> AsyncGenerator[Sequence[EpisodeGraph], None]:
        """Run the episodes of ``order`` in one shard, and yield those that end until all have, or the shard dies."""
        client = await self._shard(order.group)
        self._tell_engines()
        arrived, num_left = client.begin(order), len(order.places)
        if withdrawal is not None:
            key = EpisodeKey(order.group, order.places[0])
            withdrawal.attach(lambda: client.send(WithdrawEpisode(key=key, reason=withdrawal.reason)))
        try:
            while num_left and (episodes := await arrived.get()):
                num_left -= len(episodes)
                yield episodes
        finally:
            client.forget(order, ended=not num_left)

    async def _shard(self, group: int) -> RolloutClient:
        """Wait for a shard that runs, and return the one for the episodes of ``group``: always the same one, unless it
        is being started again."""
        while not self._ready:
            await self._changed.wait()
        ready = [name for name in self.names if name in self._ready]
        own = self.names[group % len(self.names)]
        return self._ready[own if own in self._ready else ready[group % len(ready)]]

    def _grown(self, parts: Sequence[TokenChunk]) -> None:
        """Keep and pass on the tokens of running turns that a shard wants to be recorded."""
        known = [part for part in parts if part.key in self._recorded]
        for part in known:
            turn = self._recorded[part.key].setdefault(part.turn, [])
            if part.lost:
                turn.clear()
            turn.append(msgspec.structs.replace(part, lost=""))
        self._on_parts(known)

    def _noted(self, text: str) -> None:
        """Pass on a note of a shard."""
        self._note(text)

    def _notify(self) -> None:
        """Wake the tasks that wait for shards."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _remove(left: dict[int, dict[int, list[TokenChunk]]], episodes: Sequence[EpisodeGraph]) -> None:
    """Remove ``episodes``, which have ended, from those that are left, by their index in the group, and drop their
    recorded tokens, which are the values."""
    for episode in episodes:
        left.pop(episode.key.place).clear()
