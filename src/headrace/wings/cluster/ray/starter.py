"""The starter of a run's processes on the nodes of a Ray cluster.

permanent parts   reservation of all resources ─▶ actor in the part's bundle ─▶ query to its node ─▶ process
workers                                           actor on any node with free resources ─▶ query ─▶ process

A permanent part (an engine or a rank of the learner) runs as long as the run. Workers are started and replaced during
the run. An actor is the supervisor of one process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.base import __version__
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
from headrace.launch.places import teacher_role
from headrace.launch.starts import Briefing, EngineStart, EnvironmentStart, LearnerStart, ScorerStart, Start
from headrace.wings.cluster.far.process import FarProcess, SupervisorLost, SupervisorUnusable, wait_for_answer
from headrace.wings.cluster.far.supervisor import NodeQuery, NodeReply, StartOrder, list_required_paths
from headrace.wings.cluster.ray.cluster import Actor, RayCluster, RayReservation, own_address, refuse_absent

WARN_S = 20.0
"""Seconds that a part waits for a node before the user is warned."""
RETRY_S = 0.5
"""Seconds between the loss of a part's node and the part's start on another node."""


@asynccontextmanager
async def starting_on_ray(order: LaunchOrder) -> AsyncIterator[Starter]:
    """Connect to the Ray cluster, reserve resources for the permanent parts of ``order``, and yield the starter of the
    run's processes. The resources are released when the body ends.

    Raises :class:`~headrace.base.errors.ConfigError` if Ray is not installed or there is no cluster, and
    :class:`~headrace.base.errors.DeadlineError` if the cluster lacks the resources.
    """
    refuse_absent()
    launch = order.launch
    cluster = await RayCluster.connect(launch.ray.address)
    mark = order.run_dir / f".seen-{secrets.token_hex(8)}"
    try:
        mark.touch()
        parts = permanent_parts(order)
        reservation = await cluster.reserve(parts, launch.ray.placement, launch.start_timeout_s)
        starter = RayStarter(order, cluster, reservation, mark.name)
        starter.start_actors(name for name, _ in parts)
        yield starter
    finally:
        mark.unlink(missing_ok=True)
        await cluster.leave()


def permanent_parts(order: LaunchOrder) -> list[tuple[str, ResourceShare]]:
    """Return (name, resources) of each permanent part of ``order``: the ranks of the learner, and the engines of the
    policy, of agents and of teachers."""
    ranks = ["learner", *(f"learner-{rank}" for rank in range(1, len(order.devices.learner)))]
    engines = [
        *engine_names(order.engine.count),
        *(f"agent-{name}" for name in order.agents),
        *map(teacher_role, order.teachers),
    ]
    return [(name, find_share(name, order.launch.ray)) for name in [*ranks[: len(order.devices.learner)], *engines]]


def find_share(name: str, config: RayConfig) -> ResourceShare:
    """Return the resources that the part ``name`` requests from the cluster. They are set for the part's role, which is
    the word before the first dash; engines of agents and of teachers request the resources of an engine. ``config`` has
    the resources of each role."""
    role = name.partition("-")[0]
    shares = {"learner": config.learner, "scorer": config.scorer, "environment": config.environment}
    return shares.get(role, config.engine)


class RayStarter:
    """A starter of processes on a Ray cluster (:class:`~headrace.launch.child.Starter`)."""

    def __init__(self, order: LaunchOrder, cluster: RayCluster, reservation: RayReservation, mark: str) -> None:
        """Create a starter for the processes of ``order``. Permanent parts get their resources from ``reservation``.
        ``mark`` is the name of a file in the run directory; a node on which the file exists shares that directory."""
        self._order, self._cluster, self._reservation, self._mark = order, cluster, reservation, mark
        self.host_address = own_address()
        self._clock = RealClock()
        self._rendezvous = ""
        """Address at which the learner's ranks form their process group, on the node of rank 0; empty before rank 0 has
        started."""
        self._waiting_actors: dict[str, Actor] = {}
        """The actors that were started in advance, by the name of their part."""
        self._starting: set[str] = set()
        """The parts that are being started, and may still wait for a node."""

    def start_actors(self, names: Iterable[str]) -> None:
        """Start the actors of the parts with these ``names`` now, so that the actors start in parallel; :meth:`start`
        uses them later."""
        self._waiting_actors |= {name: self._actor(name) for name in names}

    async def refuse_no_room(self, names: Sequence[str]) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the cluster has no free resources for the engines
        ``names``, which have no processes yet. One that the run had at its start gets the bundle back that is still
        reserved for it."""
        if without_bundle := [name for name in names if name not in self._reservation]:
            await self._cluster.refuse_no_room(self._order.launch.ray.engine, without_bundle, self._starting)

    def _actor(self, name: str) -> Actor:
        """Start an actor for the part ``name``, with the resources of its role."""
        return self._cluster.start_supervisor(name, find_share(name, self._order.launch.ray), self._reservation)

    async def start(self, site: Rendezvous, spec: ProcessSpec) -> tuple[Peer, Process]:
        """Start the process that ``spec`` describes on a node with free resources, and on another node if that node is
        lost during the start. Return the controller's side of the process's channel, and a handle of the process.
        ``site`` has the run's token. Raises :class:`~headrace.base.errors.DeadlineError` if no node has the resources
        within ``launch.start_timeout_s``."""
        self._starting.add(spec.name)
        started = False
        try:
            begun = await self._start_on_any_node(site, spec)
            started = True
            return begun
        finally:
            self._starting.discard(spec.name)
            self._cluster.end_start(spec.name, started=started)

    async def _start_on_any_node(self, site: Rendezvous, spec: ProcessSpec) -> tuple[Peer, Process]:
        """Start the process of ``spec`` as :meth:`start` does with ``site``, with one node after the other."""
        timeout_s = self._order.launch.start_timeout_s
        share = find_share(spec.name, self._order.launch.ray)
        deadline_s = self._clock.now() + timeout_s
        while True:
            actor = self._waiting_actors.pop(spec.name, None) or self._actor(spec.name)
            try:
                return await self._start_through(actor, site, spec, deadline_s)
            except BaseException as error:
                actor.kill()
                if isinstance(error, SupervisorUnusable):
                    raise _make_start_error(spec.name, error) from None
                late = self._clock.now() > deadline_s
                if isinstance(error, TimeoutError) or (isinstance(error, SupervisorLost) and late):
                    raise DeadlineError(
                        f"{spec.name} needs {share}, and found no free resources within {timeout_s:g} s; "
                        f"{await self._cluster.describe_resources()}",
                        remedy="add nodes, ask for less in [launch.ray], or raise launch.start_timeout_s",
                    ) from None
                if not isinstance(error, SupervisorLost):
                    raise
            await asyncio.sleep(RETRY_S)

    async def _start_through(
        self, actor: Actor, site: Rendezvous, spec: ProcessSpec, deadline_s: float
    ) -> tuple[Peer, Process]:
        """Start the process that ``spec`` describes through ``actor`` on the actor's node, and return the controller's
        side of the process's channel and a handle of the process. ``site`` has the run's token, and ``deadline_s`` is
        the time until which the actor may wait for its resources."""
        found = await self._query_node(actor, spec, deadline_s)
        _refuse_node(found, spec, self._order)
        host = LOOPBACK if found.address == self.host_address else self.host_address
        channel = ControllerChannel(site.directory, spec.name, controller.Message, host=host)
        peer = spec.make_peer(channel)
        try:
            peer.clock_ahead_s = 0.0 if host == LOOPBACK else await self._clock_ahead_s(actor, deadline_s)
            order = StartOrder(
                name=spec.name,
                briefing=Briefing(start=await self._with_node_address(spec.start, found), addresses=channel.addresses),
                token=site.token,
                num_threads=spec.num_threads,
                log=str(site.logs / f"{spec.name}.log") if found.shared else "",
            )
            left_s = max(0.0, deadline_s - self._clock.now())
            pid = await wait_for_answer(actor.call("start", msgspec.json.encode(order)), left_s)
        except BaseException:
            peer.close()
            raise
        kept = isinstance(spec.start, ScorerStart | EnvironmentStart) and spec.start.keep is not None
        return peer, FarProcess(actor, pid, found.address, kept=kept)

    async def _query_node(self, actor: Actor, spec: ProcessSpec, deadline_s: float) -> NodeReply:
        """Return the node's reply to the query about the paths of the process and the run directory. Wait for the actor
        until ``deadline_s``, and warn the user once if the wait is longer than :data:`WARN_S` seconds."""
        query = NodeQuery(paths=list_required_paths(spec.start), run_dir=str(self._order.run_dir), mark=self._mark)
        reply = actor.call("describe_node", msgspec.json.encode(query))
        await asyncio.wait([reply], timeout=min(WARN_S, max(0.0, deadline_s - self._clock.now())))
        if not reply.done() and self._clock.now() < deadline_s:
            share = find_share(spec.name, self._order.launch.ray)
            words = (
                f"{spec.name} ({share}) has waited {WARN_S:g} s for a node, or for its node to start its actor; "
                f"{await self._cluster.describe_resources()}"
            )
            self._order.on_event(Event(wall_s=0.0, text=words, level="warning"))
        left_s = max(0.0, deadline_s - self._clock.now())
        return msgspec.json.decode(await wait_for_answer(reply, left_s), type=NodeReply)

    async def _clock_ahead_s(self, actor: Actor, deadline_s: float) -> float:
        """Return the seconds by which the node's monotonic clock is ahead of this machine's clock. The error is at most
        half a round trip."""
        sent_s = self._clock.now()
        node_s = float(await wait_for_answer(actor.call("clock_s"), max(0.0, deadline_s - sent_s)))
        return node_s - (sent_s + self._clock.now()) / 2

    async def _with_node_address(self, start: Start, reply: NodeReply) -> Start:
        """Return the settings ``start`` of a process with the addresses of its node, which are in ``reply``: the
        address at which an engine receives weights, or the addresses at which the learner's ranks connect to each other
        and to the engines."""
        if not isinstance(start, EngineStart | LearnerStart):
            return start
        alone = {node.address for node in await self._cluster.nodes()} == {reply.address}
        route = msgspec.structs.replace(start.route, host=LOOPBACK if alone else reply.address)
        if isinstance(start, EngineStart):
            if not reply.shared:  # the node does not share the run directory, so it cannot write these files there
                start = msgspec.structs.replace(start, interleaving="", history="")
            return msgspec.structs.replace(start, route=route)
        if start.world > 1:
            if start.rank == 0:
                self._rendezvous = f"tcp://{reply.address}:{reply.port}"
            start = msgspec.structs.replace(start, rendezvous=self._rendezvous, interface=reply.interface)
        return msgspec.structs.replace(start, route=route)


def _refuse_node(reply: NodeReply, spec: ProcessSpec, order: LaunchOrder) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the node lacks a path that the process needs, does not share
    the run directory although the process needs it, has another version of Headrace, or has no network interface for
    the learner's ranks. ``reply`` is the node's answer, ``spec`` describes the process, and ``order`` the run."""
    shared = "put it into a folder that every node sees under the same path, or submit the run with ray job submit "
    for setting, path in reply.missing.items():
        raise ConfigError(
            f"{setting}={path!r} is not on node {reply.address}, where {spec.name} is to run",
            remedy=f"{shared}--working-dir",
        )
    if not reply.shared and _needs_run_dir(spec.start, order):
        raise ConfigError(
            f"run.dir={str(order.run_dir)!r} of node {reply.address}, where {spec.name} is to run, is not the one of "
            "this machine",
            remedy="choose a run.dir in a folder that every node sees under the same path: snapshots are written there",
        )
    if reply.headrace != __version__:
        raise ConfigError(
            f"node {reply.address} has headrace {reply.headrace}, and this machine has {__version__}",
            remedy="install the same version everywhere",
        )
    if isinstance(spec.start, LearnerStart) and spec.start.world > 1 and not reply.interface:
        raise ConfigError(
            f"no network interface of node {reply.address} has that address: the learner's ranks could not meet",
            remedy="start the node with ray start --node-ip-address=ADDRESS, one of its own",
        )


def _needs_run_dir(start: Start, order: LaunchOrder) -> bool:
    """Return whether a process needs a shared run directory: the learner does, and an engine that receives weights
    through files in that directory."""
    if isinstance(start, EngineStart):
        return not start.own_weights and Path(start.route.address).is_relative_to(order.run_dir)
    return isinstance(start, LearnerStart)


def _make_start_error(name: str, error: Any) -> RunError:
    """Return the error for a process that cannot be started on its node."""
    return RunError(
        f"{name} cannot be started on its node: {error}",
        remedy="is headrace installed there, in the Python of the cluster, and is there room in its /tmp?",
    )
