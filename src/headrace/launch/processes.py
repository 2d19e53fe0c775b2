"""The processes of a run: the settings (briefing) with which each of them starts, and the directories and the shared
memory that they share. A started process is a *child*. It has a *peer*, the controller's client of the process."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import RealClock
from headrace.base.environ import num_cores, shared_memory_root
from headrace.base.errors import HeadraceError, RunError
from headrace.base.store import COLUMNS
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import WorkerSeen
from headrace.base.types.observation import Event
from headrace.base.types.trace import rename_lane
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt
from headrace.launch.channel import ControllerChannel
from headrace.launch.child import Child, ProcessSpec, Rendezvous, Starter
from headrace.launch.clients import EngineClient, EnvPeer, LearnerClient, RankClient
from headrace.launch.clients.peer import ForeignPeer, Peer
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.engines import Engines
from headrace.launch.interleaving import interleaving_file
from headrace.launch.leases import Lease, sweep
from headrace.launch.lending import make_activity_file
from headrace.launch.order import ComponentStatus, Facts, LaunchOrder
from headrace.launch.places import EnginePlaces, teacher_role
from headrace.launch.rollouts import RolloutShards, shard_names
from headrace.launch.starts import (
    EngineStart,
    EnvironmentStart,
    LearnerStart,
    Lending,
    ResourceLimits,
    RolloutStart,
    ScorerStart,
    ShardEnvironment,
    Start,
    StoreStart,
)
from headrace.launch.supervision import SupervisionConfig, describe_loss
from headrace.models.config import ModelConfig
from headrace.models.devices import Devices
from headrace.rollout.scoring import AnyReward
from headrace.rollout.scoring.fit import find_reliable_columns
from headrace.sync.config import Route, RunPlaces
from headrace.sync.estimate import refuse_little_room


@dataclass(slots=True, kw_only=True)
class Processes:
    """The object that starts the processes of one run, from the settings in ``order``, and stores a list of them."""

    site: Rendezvous
    """The directories, the token and the span callback that all processes share."""
    starter: Starter
    """The starter of the processes, which chooses their machines."""
    order: LaunchOrder
    """The settings of the run, from the session."""
    weights: Path
    """The shared-memory file through which weights are transferred."""
    children: list[Child] = field(default_factory=list)
    """The processes that were started, without processes that were replaced."""
    num_scorers: int = 0
    """Number of scoring workers that were started, including workers that were replaced."""
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The columns of the dataset that a component of the reward can rely on, by the label of the component; see
    :func:`~headrace.rollout.scoring.fit.find_reliable_columns`."""
    num_environments: int = 0
    """Number of environment workers that were started, including workers that were replaced."""
    places: EnginePlaces = field(init=False)
    """The engines that the run has now, with their devices."""

    def __post_init__(self) -> None:
        """Set ``places`` to the engines of the order."""
        self.places = EnginePlaces(self.order)

    def refuse_little_room(self) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if this machine has too little space for the versions of the
        weights that the transport stores. If the learner runs on another machine, it checks this when it starts."""
        if not self.order.launch.remote:
            refuse_little_room(self.order.sync, self._make_places(), self.order.version_bytes)

    def make_engines(self, *, own_weights: bool = False) -> Engines:
        """Return the supervisor of the policy's engines. The engines are not started yet. With ``own_weights``, each
        engine uses the weights of the model directory and receives no weights from a learner."""
        return self._make_supervisor(self.places.policy, self.order.model, own_weights=own_weights)

    def make_agent_engines(self) -> dict[str, Engines]:
        """Return, for each agent with frozen weights, the supervisor of its engine, by the agent's name. The engines
        are not started yet."""
        return {
            name: self._make_supervisor((f"agent-{name}",), model, own_weights=True)
            for name, model in self.order.agents.items()
        }  # fmt: skip

    def make_teacher_engines(self) -> dict[str, Engines]:
        """Return, for each teacher that needs an engine, the supervisor of its engine, by the teacher's name. The
        engines are not started yet."""
        return {
            name: self._make_supervisor((teacher_role(name),), teacher.model, own_weights=True)
            for name, teacher in self.order.teachers.items()
        }

    def make_shards(self, engines: Engines) -> RolloutShards | None:
        """Return the supervisor of the rollout shards, which send their requests to ``engines``; ``None`` if the
        episodes run in the controller. The shards are not started yet."""
        names = shard_names(self.order.launch.rollouts)
        if not names:
            return None
        return RolloutShards(
            self._start_rollout,
            names,
            self._make_supervision_config(),
            RealClock(),
            fleet=engines.fleet,
            client=engines.client,
        )

    async def _start_rollout(self, name: str) -> Child:
        """Start the process of the rollout shard ``name``."""
        order = self.order
        start = RolloutStart(
            sampling=order.sampling,
            run_seed=order.run_seed,
            limits=asdict(order.episode_limits),
            timeout_s=order.env.timeout_s,
            retries=order.env.retries,
            record_tokens=order.record_tokens,
            deadline_s=order.sync.longest_s(order.version_bytes),
            environment=self._make_shard_environment() if order.env.remote else None,
        )
        self.forget_ended()
        return await self._start(name, start, 1, partial(RolloutClient, name, token=self.site.token))

    def _make_shard_environment(self) -> ShardEnvironment:
        """Return the settings with which a shard starts the environment of the run."""
        order = self.order
        return ShardEnvironment(
            env=order.env.model_dump(mode="json"),
            model=order.model.path,
            agents=tuple(sorted(order.agent_names)),
            adapters=order.model.adapter_agents,
            logs=str(self.site.logs),
            start_timeout_s=order.launch.start_timeout_s,
        )

    def _make_supervision_config(self, version: int = NOT_SAMPLED) -> SupervisionConfig:
        """Return the limits for the supervision of engines and rollout shards. ``version`` is the version of the
        weights that an engine has when it is ready."""
        launch = self.order.launch
        return SupervisionConfig(
            rolling=self.order.sync.rolling,
            restarts=launch.engine_restarts,
            start_timeout_s=launch.start_timeout_s,
            silence_s=launch.engine_silence_s,
            version=version,
        )

    def _make_supervisor(self, names: tuple[str, ...], model: ModelConfig, *, own_weights: bool) -> Engines:
        """Return the supervisor of the engines ``names``, which all serve ``model``. The engines are not started yet.
        With ``own_weights``, they serve the weights of the model directory as version 0, and otherwise the weights that
        the learner sends."""
        config = self._make_supervision_config(0 if own_weights else NOT_SAMPLED)
        start = partial(self._start_engine, model=model, own_weights=own_weights)
        engines = Engines(start, names, config, RealClock())
        engines.send_losses_to(self._warn_of_loss)  # an evaluation has nothing else that reports it
        return engines

    def _warn_of_loss(self, name: str, error: HeadraceError) -> None:
        """Report to the user that the engine ``name`` is lost because of ``error``."""
        self.order.on_event(Event(wall_s=0.0, text=describe_loss(name, error), level="warning"))

    async def _start_engine(self, name: str, *, model: ModelConfig, own_weights: bool) -> Child:
        """Start the process of the engine ``name``, which is an engine of the policy, of a teacher or of another agent.
        ``own_weights`` says that the engine receives no weights from the learner."""
        order = self.order
        # a run can be replayed only if one engine handles all requests
        is_only_engine = order.engine.count == 1 and not order.launch.rollouts
        teachers = {teacher_role(teacher): served for teacher, served in order.teachers.items()}
        index, num_engines, devices = self.places.index(name), len(self.places.names), self.places.devices
        if order.launch.remote:
            devices = Devices(engines=(devices.engines[index],), learner=())
        config = order.engine.for_engine(0 if order.launch.remote else index, devices)
        if name in teachers:  # a teacher samples nothing and reads one sequence at a time
            config = config.model_copy(update={"max_sequences": 1, "cache_tokens": None, "speculation": "off"})
        num_threads = order.launch.threads("engine", num_engines, num_cores())
        start = EngineStart(
            model=model.model_dump(mode="json"),
            engine=config.model_dump(mode="json"),
            max_context=teachers[name].max_context if name in teachers else order.max_context,
            num_threads=num_threads,
            lending=self._make_lending(index, num_engines),
            route=self._make_route(),
            record_kept=order.sampling.record_kept and not own_weights,
            record_routing=order.sampling.record_routing and not own_weights,
            sleeps=order.sync.interrupt is Interrupt.SLEEP and not own_weights,
            own_weights=own_weights,
            history="" if own_weights else str(order.run_dir / f"answers-{name}.bin"),
            columns=self._make_store_if_recorded("" if own_weights else name),
            interleaving=str(order.run_dir / interleaving_file(name)) if is_only_engine and not own_weights else "",
            recorded=None if own_weights else order.recorded,
        )
        self.forget_ended()
        return await self._start(name, start, num_threads, partial(self._make_engine_client, name))

    async def start_learner(self) -> LearnerClient:
        """Start all ranks of the learner, and return the client of rank 0."""
        order = self.order
        world = order.learner.parallel.world
        num_threads = order.launch.threads("learner", world, num_cores())
        num_engines = len(self.places.names)
        start = LearnerStart(
            model=order.model.model_dump(mode="json"),
            learner=self._make_learner_settings(0),
            algo=order.algo.model_dump(mode="json"),
            temperature=order.sampling.temperature,
            total_steps=order.total_steps,
            snapshot="" if order.snapshot is None else str(order.snapshot),
            route=self._make_route(),
            num_threads=num_threads,
            columns=None if order.launch.remote else self._make_store(),
            lending=self._make_lending(num_engines, num_engines),
            world=world,
            rendezvous=f"file://{self.site.directory / 'rendezvous'}",
        )
        child = await self._start("learner", start, num_threads, self._make_learner_client)
        for rank in range(1, world):
            name = f"{child.role}-{rank}"
            lending = self._make_lending(num_engines + rank, num_engines)
            rank_start = msgspec.structs.replace(
                start, rank=rank, learner=self._make_learner_settings(rank), lending=lending
            )
            await self._start(name, rank_start, num_threads, self._peer_maker(RankClient, name))
        assert isinstance(child.peer, LearnerClient)
        return child.peer

    def _make_lending(self, index: int, num_engines: int) -> Lending | None:
        """Return how the cores are divided, for the part with the index ``index``; ``None`` if no cores are lent. The
        first ``num_engines`` indices belong to engines, the last to the ranks of the learner."""
        launch, ranks = self.order.launch, self.order.learner.parallel.world
        if not launch.lend_cores:
            return None
        activity_file = self.site.directory / "cores"
        threads = (launch.threads("engine", num_engines, num_cores()), launch.threads("learner", ranks, num_cores()))
        shares = (threads[0],) * num_engines + (threads[1],) * ranks
        if not activity_file.exists():
            make_activity_file(activity_file, len(shares))
        return Lending(activity_file=str(activity_file), place=index, shares=shares)

    def _make_store_if_recorded(self, writer: str = "") -> StoreStart | None:
        """Return the settings of the store for kept-sets and experts. A part with the name ``writer`` writes into the
        store; if ``writer`` is empty, the part only reads. ``None`` if no such columns are recorded, or if parts are on
        other machines."""
        order = self.order
        records = order.sampling.record_kept or order.sampling.record_routing
        return self._make_store(writer) if records and not order.launch.remote else None

    def _make_store(self, writer: str = "") -> StoreStart:
        """Return the store of the run as a part uses it, even if no such columns are recorded. A part with the name
        ``writer`` writes into the store; if ``writer`` is empty, the part only reads."""
        directory = str(self.order.run_dir / COLUMNS)
        return StoreStart(directory=directory, limit_bytes=self.order.columns.limit_bytes, writer=writer)

    def _make_learner_settings(self, rank: int) -> dict[str, Any]:
        """Return the settings of the learner with the device of ``rank``, as JSON data."""
        config = self.order.learner.model_copy(update={"device": self.order.devices.learner[rank]})
        return config.model_dump(mode="json")

    async def start_scorer(self, reward: AnyReward) -> Child:
        """Start a worker that scores one component of the reward, with the limits ``env.reward_memory_mb`` and
        ``env.reward_processes``. The worker receives the columns of a row that the component can rely on."""
        env = self.order.env
        limits = ResourceLimits(memory_bytes=(env.reward_memory_mb or 0) << 20, processes=env.reward_processes)
        if reward.label not in self.columns:
            tasks = [*self.order.tasks, *self.order.eval_tasks]
            self.columns[reward.label] = tuple(sorted(find_reliable_columns(reward, tasks)))
        start = ScorerStart(reward=reward.model_dump(mode="json"), columns=self.columns[reward.label], keep=limits)
        name = f"scorer-{self.num_scorers}"
        self.num_scorers += 1
        self.forget_ended()
        return await self._start(name, start, num_threads=1, make_peer=self._peer_maker(ForeignPeer, name))

    async def start_environment(self, start: EnvironmentStart, starter: Starter | None = None) -> Child:
        """Start an environment worker with the settings ``start``. ``starter`` is the starter of a machine that has
        joined the run; ``None`` means the run's own starter."""
        name = f"environment-{self.num_environments}"
        self.num_environments += 1
        self.forget_ended()
        make_peer = self._peer_maker(EnvPeer, name)
        return await self._start(name, start, num_threads=1, make_peer=make_peer, starter=starter)

    def forget_ended(self) -> None:
        """Remove ended processes, which were replaced or removed, from the list of the run's processes."""
        self.children = [child for child in self.children if not child.closed]

    def _make_route(self) -> Route:
        """Return the route of the weights from the learner to the engines: the transport with its addresses and its
        deadline."""
        return self.order.sync.route(self._make_places(), self.order.version_bytes)

    def _make_places(self) -> RunPlaces:
        """Return the files and directories through which the learner and the engines can exchange weights."""
        return RunPlaces(run_dir=self.order.run_dir, memory=self.weights, private=self.site.directory)

    def describe_components(self, restarts: Mapping[str, int], stopped: Mapping[int, str]) -> list[ComponentStatus]:
        """Return the status of every process, the controller first, and behind each rollout shard its workers.
        ``restarts`` contains how many times each process was started again, by name. ``stopped`` contains what has
        stopped a process that is not a child of the controller, by its pid."""
        parts = [ComponentStatus(role="controller", pid=os.getpid(), state="ready", version=None)]
        for child in self.children:
            version, device = _get_version(child.peer), child.peer.get_fact("device")
            parts.append(
                ComponentStatus(
                    role=child.role,
                    pid=child.pid,
                    state=child.state,
                    version=version,
                    device=device,
                    restarts=restarts.get(child.role, 0),
                    node=child.node,
                )
            )
            parts += [
                ComponentStatus(
                    role=worker.name,
                    pid=worker.pid,
                    state="ended" if child.state == "ended" else stopped.get(worker.pid, worker.state),
                    version=None,
                    parent=child.role,
                )
                for worker in shard_workers(child)
            ]
        return parts

    def get_facts(self) -> Facts:
        """Return the facts that the engines and the learner have reported about themselves. Parts that are not ready
        are skipped."""
        parts = [child for child in self.children if child.role == "learner" or child.role.startswith("engine")]
        return {child.role: child.peer.ready.result().facts for child in parts if child.peer.ready.done()}

    async def end(self) -> None:
        """Order all processes to shut down, and wait until they have ended. Processes that do not end in time are
        killed."""
        ends = [child.end(Shutdown()) for child in self.children]
        await asyncio.gather(*ends)

    async def _start(
        self,
        name: str,
        start: Start,
        num_threads: int,
        make_peer: Callable[[ControllerChannel], Peer],
        starter: Starter | None = None,
    ) -> Child:
        """Start the process ``name`` with the settings ``start``, append it to ``children``, and return it.
        ``make_peer`` creates its peer from its channel. ``starter`` is the starter of another machine; ``None`` means
        the run's own starter."""
        spec = ProcessSpec(name=name, start=start, num_threads=num_threads, make_peer=make_peer)
        child = await Child.start(self.site, spec, starter or self.starter)
        self.children.append(child)
        return child

    def _peer_maker(self, kind: type[Peer], name: str) -> Callable[[ControllerChannel], Peer]:
        """Return the function that makes the peer of the process ``name`` from its channel."""
        return partial(kind, name, token=self.site.token, on_spans=self.site.on_spans)

    def _make_engine_client(self, name: str, channel: ControllerChannel) -> EngineClient:
        """Return the peer of the engine ``name``. The deadline for answers to its orders is the longest time that the
        transfer of one version may take."""
        deadline_s = self.order.sync.longest_s(self.order.version_bytes)
        on_spans = rename_lane(name, self.site.on_spans)
        return EngineClient(name, channel, token=self.site.token, on_spans=on_spans, deadline_s=deadline_s)

    def _make_learner_client(self, channel: ControllerChannel) -> LearnerClient:
        """Return the peer of rank 0 of the learner."""
        deadline_s = self.order.sync.longest_s(self.order.version_bytes)
        return LearnerClient(
            "learner", channel, token=self.site.token, on_spans=self.site.on_spans, deadline_s=deadline_s
        )


def shard_workers(child: Child) -> tuple[WorkerSeen, ...]:
    """Return the environment workers of the process ``child``, if it is a rollout shard; otherwise empty."""
    return child.peer.workers if isinstance(child.peer, RolloutClient) else ()


def _get_version(peer: Peer) -> int | None:
    """Return the version of the weights that the engine or the learner behind ``peer`` currently has; ``None`` for a
    part without weights."""
    match peer:
        case EngineClient():
            return peer.stats().version
        case LearnerClient():
            return peer.version
    return None


def open_directories(order: LaunchOrder, leases: ExitStack) -> tuple[Rendezvous, Path]:
    """Create the directories, the token and the shared-memory file of a run, and remove leases that killed runs have
    left. Return the data that all processes share, and the path of the file through which weights are transferred.
    ``leases`` removes the directory of the sockets and this file at the end of the run. Raises
    :class:`~headrace.base.errors.RunError` if they cannot be created."""
    logs = order.run_dir / "logs"
    roots = Path(tempfile.gettempdir()), shared_memory_root()
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for root in roots:
            sweep(root)
        directory = Lease.create_directory(roots[0])
        leases.callback(directory.end)
        weights = Lease.create_file(roots[1])
        leases.callback(weights.end)
    except OSError as error:
        raise RunError(
            f"the files of the run's processes cannot be made: {error}",
            remedy=f"make room in {logs}, {roots[0]} and {roots[1]}, and let this user write there",
        ) from None
    return Rendezvous(
        directory=directory.path, logs=logs, token=secrets.token_hex(32), on_spans=order.on_spans
    ), weights.path
