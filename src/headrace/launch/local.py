"""Local processes: one engine, one learner, scoring workers, all watched. The death of any reaches the user as a cause.

controller ──orders──▶ engine     steps                      ◀─┐
    │      ──orders──▶ learner    trains, fills the buffers  ──┘ two weight buffers in shared memory
    │                  learner-n  its other ranks, which hear the orders of it
    │      ──orders──▶ scorer-n   calls the reward function
    └── holds a pipe to each: when the controller dies, they die
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.clock import RealClock
from headrace.control import Parts, Serving
from headrace.control.credit import credit
from headrace.env import SingleTurn
from headrace.environ import num_cores, shared_memory_root
from headrace.errors import ComponentDied, DeadlineError, RunError
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import LAST_WORDS_S, Child, Site
from headrace.launch.clients import EngineClient, LearnerClient, ScorerPool, Terms
from headrace.launch.clients.peer import Peer
from headrace.launch.config import threads
from headrace.launch.interleaving import interleaving_file
from headrace.launch.leases import Lease, sweep
from headrace.launch.order import Component, Facts, Order, World
from headrace.launch.starts import EngineStart, LearnerStart, ScorerStart
from headrace.models.load import read_config
from headrace.sync.config import Route
from headrace.types.messages import engine, learner, scorer
from headrace.types.observation import Event


@dataclass(slots=True, kw_only=True)
class _Processes:
    """Every process of one run."""

    site: Site
    order: Order
    weights: Path
    """The shared-memory file."""
    children: list[Child] = field(default_factory=list)
    num_scorers: int = 0
    """Started so far, those that were replaced included."""

    async def start_engine(self, *, own_weights: bool) -> EngineClient:
        order = self.order
        num_threads = threads(order.launch.engine_threads, num_cores())
        start = EngineStart(
            model=order.model.model_dump(mode="json"),
            engine=order.engine.on(order.devices.engine, shared=order.devices.shared).model_dump(mode="json"),
            max_context=order.max_context,
            num_threads=num_threads,
            route=self._route(),
            serve_own_weights=str(self.weights) if own_weights else "",
            interleaving="" if own_weights else str(order.run_dir / interleaving_file("engine")),
            repeats=order.repeats,
        )
        child = await self._start("engine", start, num_threads, self._engine_client)
        assert isinstance(child.peer, EngineClient)
        return child.peer

    async def start_learner(self) -> LearnerClient:
        order = self.order
        world = order.learner.parallel.world
        num_threads = max(1, threads(order.launch.learner_threads, num_cores()) // world)
        start = LearnerStart(
            model=order.model.model_dump(mode="json"),
            learner=self._learner_on(0),
            algo=order.algo.model_dump(mode="json"),
            temperature=order.sampling.temperature,
            total_steps=order.total_steps,
            tokenizer_dir=order.tokenizer_dir,
            snapshot="" if order.snapshot is None else str(order.snapshot),
            route=self._route(),
            num_threads=num_threads,
            world=world,
            rendezvous=f"file://{self.site.directory / 'rendezvous'}",
        )
        child = await self._start("learner", start, num_threads, self._learner_client)
        for rank in range(1, world):
            name = f"{child.role}-{rank}"
            other = msgspec.structs.replace(start, rank=rank, learner=self._learner_on(rank))
            await self._start(name, other, num_threads, partial(self._peer, name))
        assert isinstance(child.peer, LearnerClient)
        return child.peer

    def _learner_on(self, rank: int) -> dict[str, Any]:
        settled = self.order.learner.model_copy(update={"device": self.order.devices.learner[rank]})
        return settled.model_dump(mode="json")

    async def start_scorer(self) -> Child:
        env = self.order.env
        start = ScorerStart(reward=env.reward, concurrency=env.reward_concurrency)
        name = f"scorer-{self.num_scorers}"
        self.num_scorers += 1
        self.children = [child for child in self.children if not child.closed]  # those that were replaced
        return await self._start(name, start, 1, partial(self._peer, name))

    def _route(self) -> Route:
        sync, run_dir = self.order.sync, self.order.run_dir
        where = hashlib.blake2b(f"{platform.node()}:{run_dir}".encode(), digest_size=4).hexdigest()
        own = f"{sync.directory.rstrip('/')}/{run_dir.name}-{where}"  # others may have directories of that name
        folder = own if sync.directory else str(run_dir / "weights")
        places = {"shm": str(self.weights), "files": folder, "collective": str(self.site.directory)}
        return Route(
            transport=sync.transport,
            codec=sync.codec,
            address=places.get(sync.transport, ""),
            host=sync.host,
            deadline_s=sync.deadline_s / 2,
        )

    def components(self) -> list[Component]:
        """Every process, the controller's own first."""
        parts = [Component(role="controller", pid=os.getpid(), state="ready", version=None)]
        for child in self.children:
            version, device = _version(child.peer), _device(child.peer)
            parts.append(Component(role=child.role, pid=child.pid, state=child.state, version=version, device=device))
        return parts

    def facts(self) -> Facts:
        """Of engine and learner, which are ready."""
        parts = [child for child in self.children if child.role in ("engine", "learner")]
        return {child.role: child.peer.ready.result().facts for child in parts}

    async def end(self) -> None:
        farewells = {"engine": engine.Shutdown(), "learner": learner.Shutdown(), "scorer": scorer.Shutdown()}
        ends = [child.end(farewells[child.role.partition("-")[0]]) for child in self.children]
        await asyncio.gather(*ends)

    async def _start(
        self,
        name: str,
        start: EngineStart | LearnerStart | ScorerStart,
        num_threads: int,
        make_peer: Callable[[ControllerChannel], Peer],
    ) -> Child:
        child = await Child.start(self.site, name, start, num_threads, make_peer)
        self.children.append(child)
        return child

    def _peer(self, name: str, channel: ControllerChannel) -> Peer:
        return Peer(name, channel, token=self.site.token, on_spans=self.site.on_spans)

    def _engine_client(self, channel: ControllerChannel) -> EngineClient:
        deadline_s = self.order.sync.deadline_s
        return EngineClient(
            "engine", channel, token=self.site.token, on_spans=self.site.on_spans, deadline_s=deadline_s
        )

    def _learner_client(self, channel: ControllerChannel) -> LearnerClient:
        deadline_s = self.order.sync.deadline_s
        return LearnerClient(
            "learner", channel, token=self.site.token, on_spans=self.site.on_spans, deadline_s=deadline_s
        )


@asynccontextmanager
async def local_world(order: Order) -> AsyncIterator[World]:
    """Every part of a run as a process of this machine.

    Raises :class:`~headrace.errors.ConfigError` for a model that the learner's ranks cannot share, and what a part says
    when it cannot start; within, the death of a part cancels the body and raises
    :class:`~headrace.errors.ComponentDied`.
    """
    order.learner.parallel.refuse_settings(order.model)
    if order.learner.parallel.world > 1:
        order.learner.parallel.refuse_model(order.model.path, read_config(order.model.path))
    async with _launched(order) as processes:
        pool = _scorers(processes)
        engine_client = await processes.start_engine(own_weights=False)
        learner_client = await processes.start_learner()
        async with _watched(processes, pool):
            learner_client.receivers = engine_client.weights_addresses
            parts = Parts(
                **_serving(order, engine_client, pool),
                learner=learner_client,
                tasks=order.tasks,
                advantages=partial(credit, order.algo),
                run_dir=order.run_dir,
                interrupt=order.sync.interrupt,
            )
            yield World(
                parts=parts,
                components=processes.components,
                send_warnings_to=pool.send_warnings_to,
                facts=processes.facts,
            )


@asynccontextmanager
async def local_serving(order: Order) -> AsyncIterator[Serving]:
    """An engine with the weights of its model directory, and scoring workers: enough to evaluate."""
    async with _launched(order) as processes:
        pool = _scorers(processes)
        engine_client = await processes.start_engine(own_weights=True)
        async with _watched(processes, pool):
            yield Serving(**_serving(order, engine_client, pool))


@asynccontextmanager
async def _launched(order: Order) -> AsyncIterator[_Processes]:
    """No process outlives the body; where it fails, they end at once."""
    with ExitStack() as leases:
        site, weights = _premises(order, leases)
        processes = _Processes(site=site, order=order, weights=weights)
        try:
            yield processes
        except BaseException:
            await asyncio.gather(*(child.kill() for child in processes.children))
            raise
        finally:
            await processes.end()


@asynccontextmanager
async def _watched(processes: _Processes, pool: ScorerPool) -> AsyncIterator[None]:
    """The body runs when every process is ready, and while all of them live."""
    watched = list(processes.children)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child.peer.listen()) for child in watched]
        ranks = [child for child in watched if child.role.startswith("learner")]
        others = [[child] for child in watched if child not in ranks]
        tasks += [group.create_task(_watch(part)) for part in (*others, ranks) if part]
        tasks.append(group.create_task(pool.run()))
        await _all_ready(watched, pool, processes.order.launch.start_timeout_s)
        yield
        for task in tasks:
            task.cancel()


def _scorers(processes: _Processes) -> ScorerPool:
    order = processes.order
    return ScorerPool(
        processes.start_scorer,
        Terms(
            num_workers=order.env.reward_workers,
            concurrency=order.env.reward_concurrency,
            timeout_s=order.env.reward_timeout_s,
            start_timeout_s=order.launch.start_timeout_s,
        ),
        warn=lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning")),
    )


def _serving(order: Order, engine_client: EngineClient, pool: ScorerPool) -> dict[str, Any]:
    return {
        "engine": engine_client,
        "scorer": pool,
        "env": SingleTurn(),
        "clock": RealClock(),
        "eval_tasks": order.eval_tasks,
        "sampling": order.sampling,
        "max_context": order.max_context,
        "decode": order.decode,
        "episode_timeout_s": order.env.timeout_s,
    }


def _version(peer: Peer) -> int | None:
    match peer:
        case EngineClient():
            return peer.stats().version
        case LearnerClient():
            return peer.version
    return None


def _device(peer: Peer) -> str:
    ready = peer.ready
    told = ready.done() and not ready.cancelled() and ready.exception() is None
    return str(ready.result().facts.get("device", "")) if told else ""


async def _watch(part: Sequence[Child]) -> None:
    """Raise when one of the processes of a part dies. The others follow it: told is what became of the first."""
    async with asyncio.TaskGroup() as group:
        deaths = {group.create_task(child.died()): child for child in part}
        await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await _cause_known(deaths)
        ended = [death for death in deaths if death.done()]
        for death in deaths:
            death.cancel()
    first = min(ended, key=lambda death: deaths[death].lost)
    if words := deaths[first].peer.last_words:
        raise words
    raise ComponentDied(first.result(), remedy="mend the cause, then --resume: nothing that was finished is lost")


async def _cause_known(deaths: Mapping[asyncio.Task[str], Child]) -> None:
    """Until one has ended by itself, or all have."""
    while (alive := [death for death in deaths if not death.done()]) and all(
        child.lost for death, child in deaths.items() if death.done()
    ):
        await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)


async def _all_ready(children: list[Child], pool: ScorerPool, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait([child.peer.ready for child in children])  # unlike gather, it cancels none of them
            await pool.started()
    except TimeoutError:
        late = [child.role for child in children if not child.peer.ready.done()] or ["scorer"]
        raise DeadlineError(
            f"{', '.join(late)} did not start within {timeout_s:g} s",
            remedy="look at its log in the run directory; raise launch.start_timeout_s for a large model",
        ) from None


def _premises(order: Order, leases: ExitStack) -> tuple[Site, Path]:
    """Where the processes meet, and the weights' file in shared memory; what killed runs left there is removed."""
    logs = order.run_dir / "logs"
    places = Path(tempfile.gettempdir()), shared_memory_root()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for root in places:
            sweep(root)
        directory = Lease.directory(places[0])
        leases.callback(directory.end)
        weights = Lease.file(places[1])
        leases.callback(weights.end)
    except OSError as error:
        raise RunError(
            f"the files of the run's processes cannot be made: {error}",
            remedy=f"make room in {logs}, {places[0]} and {places[1]}, and let this user write there",
        ) from None
    return Site(directory=directory.path, logs=logs, token=secrets.token_hex(32), on_spans=order.on_spans), weights.path
