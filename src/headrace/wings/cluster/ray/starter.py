"""Starts the processes of a run on the nodes of a Ray cluster.

room for all standing parts at once ─▶ an actor in the part's bundle ─▶ a look at its node ─▶ the process
workers come and go: an actor each, where there is room
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headrace import __version__
from headrace.base.clock import RealClock
from headrace.base.config.addresses import LOOPBACK
from headrace.base.errors import ConfigError, DeadlineError, RunError
from headrace.base.types.messages import controller
from headrace.base.types.observation import Event
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Process, ProcessSpec, Rendezvous, Starter
from headrace.launch.clients.peer import Peer
from headrace.launch.config import RayConfig, ResourceShare
from headrace.launch.engines import engine_names
from headrace.launch.order import LaunchOrder
from headrace.launch.processes import teacher_role
from headrace.launch.starts import Briefing, EngineStart, EnvironmentStart, LearnerStart, ScorerStart, Start
from headrace.wings.cluster.far.keeper import Begin, NodeQuery, NodeReply
from headrace.wings.cluster.far.paths import paths_of
from headrace.wings.cluster.far.process import FarProcess, KeeperLost, KeeperUnusable, in_time
from headrace.wings.cluster.ray.cluster import Actor, RayCluster, RayReservation, own_address, refuse_absent

SAY_S = 20.0
"""A part that waits for its place so long is told of."""
AGAIN_S = 0.5
"""After which time a part whose node has just been lost is tried elsewhere."""


@asynccontextmanager
async def starting_on_ray(order: LaunchOrder) -> AsyncIterator[Starter]:
    """Room for the standing parts of ``order``, held during the body.

    Raises :class:`~headrace.base.errors.ConfigError` without Ray or a cluster,
    :class:`~headrace.base.errors.DeadlineError` where there is no room.
    """
    refuse_absent()
    launch = order.launch
    cluster = await RayCluster.joined(launch.ray.address)
    mark = order.run_dir / f".seen-{secrets.token_hex(8)}"
    try:
        mark.touch()
        parts = standing_parts(order)
        room = await cluster.room(parts, launch.ray.placement, launch.start_timeout_s)
        starter = RayStarter(order, cluster, room, mark.name)
        starter.call(name for name, _ in parts)
        yield starter
    finally:
        mark.unlink(missing_ok=True)
        await cluster.leave()


def standing_parts(order: LaunchOrder) -> list[tuple[str, ResourceShare]]:
    """The parts that are always there, and what each needs: ranks of the learner, engines, agents, teachers."""
    ranks = ["learner", *(f"learner-{rank}" for rank in range(1, len(order.devices.learner)))]
    engines = [
        *engine_names(order.engine.count),
        *(f"agent-{name}" for name in order.agents),
        *map(teacher_role, order.teachers),
    ]
    return [(name, share_of(name, order.launch.ray)) for name in [*ranks[: len(order.devices.learner)], *engines]]


def share_of(name: str, config: RayConfig) -> ResourceShare:
    """What a part of that name asks the cluster for."""
    role = name.partition("-")[0]
    shares = {"learner": config.learner, "scorer": config.scorer, "environment": config.environment}
    return shares.get(role, config.engine)


class RayStarter:
    """See :class:`~headrace.launch.child.Starter`."""

    def __init__(self, order: LaunchOrder, cluster: RayCluster, room: RayReservation, mark: str) -> None:
        self._order, self._cluster, self._room, self._mark = order, cluster, room, mark
        self.home = own_address()
        self._clock = RealClock()
        self._rendezvous = ""
        self._called: dict[str, Actor] = {}

    def call(self, names: Iterable[str]) -> None:
        """Have the actors of these parts started side by side, before the parts are."""
        self._called |= {name: self._actor(name) for name in names}

    def _actor(self, name: str) -> Actor:
        return self._cluster.keeper(name, share_of(name, self._order.launch.ray), self._room)

    async def start(self, site: Rendezvous, errand: ProcessSpec) -> tuple[Peer, Process]:
        """Wherever there is room; tried again elsewhere where a node is lost meanwhile."""
        timeout_s = self._order.launch.start_timeout_s
        share = share_of(errand.name, self._order.launch.ray)
        deadline_s = self._clock.now() + timeout_s
        while True:
            actor = self._called.pop(errand.name, None) or self._actor(errand.name)
            try:
                return await self._started(actor, site, errand, deadline_s)
            except BaseException as error:
                actor.kill()
                if isinstance(error, KeeperUnusable):
                    raise _unstarted(errand.name, error) from None
                late = self._clock.now() > deadline_s
                if isinstance(error, TimeoutError) or (isinstance(error, KeeperLost) and late):
                    raise DeadlineError(
                        f"{errand.name} needs {share}, and has found no place for {timeout_s:g} s; "
                        f"{await self._cluster.words()}",
                        remedy="add nodes, ask for less in [launch.ray], or raise launch.start_timeout_s",
                    ) from None
                if not isinstance(error, KeeperLost):
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _started(
        self, actor: Actor, site: Rendezvous, errand: ProcessSpec, deadline_s: float
    ) -> tuple[Peer, Process]:
        found = await self._look(actor, errand, deadline_s)
        _refuse_node(found, errand, self._order)
        host = LOOPBACK if found.address == self.home else self.home
        channel = ControllerChannel(site.directory, errand.name, controller.Message, host=host)
        peer = errand.make_peer(channel)
        try:
            peer.clock_ahead_s = 0.0 if host == LOOPBACK else await self._ahead_s(actor, deadline_s)
            order = Begin(
                name=errand.name,
                briefing=Briefing(start=await self._fitted(errand.start, found), ends=channel.ends),
                token=site.token,
                num_threads=errand.num_threads,
                log=str(site.logs / f"{errand.name}.log") if found.shared else "",
            )
            left_s = max(0.0, deadline_s - self._clock.now())
            pid = await in_time(actor.call("begin", msgspec.json.encode(order)), left_s)
        except BaseException:
            peer.close()
            raise
        kept = isinstance(errand.start, ScorerStart | EnvironmentStart) and errand.start.keep is not None
        return peer, FarProcess(actor, pid, found.address, kept=kept)

    async def _look(self, actor: Actor, errand: ProcessSpec, deadline_s: float) -> NodeReply:
        """What its node has of what it needs, once it has one."""
        asked = NodeQuery(paths=paths_of(errand.start), run_dir=str(self._order.run_dir), mark=self._mark)
        looking = actor.call("look", msgspec.json.encode(asked))
        await asyncio.wait([looking], timeout=min(SAY_S, max(0.0, deadline_s - self._clock.now())))
        if not looking.done() and self._clock.now() < deadline_s:
            share = share_of(errand.name, self._order.launch.ray)
            words = (
                f"{errand.name} ({share}) has waited {SAY_S:g} s for a node, or for its node to start its actor; "
                f"{await self._cluster.words()}"
            )
            self._order.on_event(Event(wall_s=0.0, text=words, level="warning"))
        left_s = max(0.0, deadline_s - self._clock.now())
        return msgspec.json.decode(await in_time(looking, left_s), type=NodeReply)

    async def _ahead_s(self, actor: Actor, deadline_s: float) -> float:
        """By how much the monotonic clock of the node is ahead of ours."""
        asked_s = self._clock.now()
        theirs_s = float(await in_time(actor.call("clock_s"), max(0.0, deadline_s - asked_s)))
        return theirs_s - (asked_s + self._clock.now()) / 2

    async def _fitted(self, start: Start, found: NodeReply) -> Start:
        """With the addresses of the node that it is started on."""
        if isinstance(start, EngineStart):
            alone = {node.address for node in await self._cluster.nodes()} == {found.address}
            route = msgspec.structs.replace(start.route, host=LOOPBACK if alone else found.address)
            interleaving = start.interleaving if found.shared else ""
            return msgspec.structs.replace(start, route=route, interleaving=interleaving)
        if isinstance(start, LearnerStart) and start.world > 1:
            if start.rank == 0:
                self._rendezvous = f"tcp://{found.address}:{found.port}"
            return msgspec.structs.replace(start, rendezvous=self._rendezvous, interface=found.interface)
        return start


def _refuse_node(found: NodeReply, errand: ProcessSpec, order: LaunchOrder) -> None:
    """What the process needs must be on its node, under the same path."""
    shared = "put it into a folder that every node sees under the same path, or submit the run with ray job submit "
    for setting, path in found.missing.items():
        raise ConfigError(
            f"{setting}={path!r} is not on node {found.address}, where {errand.name} is to run",
            remedy=f"{shared}--working-dir",
        )
    if not found.shared and _needs_run_dir(errand.start, order):
        raise ConfigError(
            f"run.dir={str(order.run_dir)!r} of node {found.address}, where {errand.name} is to run, is not the one of "
            "this machine",
            remedy="choose a run.dir in a folder that every node sees under the same path: snapshots are written there",
        )
    if found.headrace != __version__:
        raise ConfigError(
            f"node {found.address} has headrace {found.headrace}, and this machine has {__version__}",
            remedy="install the same version everywhere",
        )
    if isinstance(errand.start, LearnerStart) and errand.start.world > 1 and not found.interface:
        raise ConfigError(
            f"no network interface of node {found.address} has that address: the learner's ranks could not meet",
            remedy="start the node with ray start --node-ip-address=ADDRESS, one of its own",
        )


def _needs_run_dir(start: Start, order: LaunchOrder) -> bool:
    if isinstance(start, EngineStart):
        return start.route.transport == "files" and not (order.sync.directory or start.own_weights)
    return isinstance(start, LearnerStart)


def _unstarted(name: str, error: Any) -> RunError:
    return RunError(
        f"{name} cannot be started on its node: {error}",
        remedy="is headrace installed there, in the Python of the cluster, and is there room in its /tmp?",
    )
