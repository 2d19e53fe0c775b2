"""The settings of the launch (the table ``[launch]`` of a run file), and the contract of a launcher, which the settings
name. A *part* of a run is one of its processes: an engine, a rank of the learner, a scoring or environment worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.config.addresses import host_and_port, refuse_secret
from headrace.base.config.kinds import NameOf
from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry, make_class_check

if TYPE_CHECKING:
    from headrace.engine.fleet import FleetConfig
    from headrace.learner import LearnerConfig
    from headrace.models.devices import Devices
    from headrace.sync import SyncConfig

INVITATION_FILE = "join.json"
"""The file in the run's directory that another machine needs to join. It exists as long as the run accepts machines."""
Amount = Annotated[float, Field(ge=0)]
"""An amount of a resource, at least 0."""


class ResourceShare(Section):
    """The resources that one part requests from a cluster. Its libraries compute with as many threads as it has whole
    cores."""

    cpus: Amount = 1.0
    """Number of cores; may be a fraction."""
    gpus: int = Field(default=0, ge=0, le=64)
    """The number of GPUs for this part alone, all on one machine: 1 for a rank of the learner, ``engine.tensor`` times
    ``engine.pipeline`` for an engine. 0: the part computes on processors."""
    memory_gb: Amount = 0.0
    """Memory in GB; 0: the cluster does not reserve memory."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Amounts of resources that the cluster defines itself, by name: ``{ "big_disk" = 1 }``."""

    def __str__(self) -> str:
        """Return the resources in words, for messages to the user.

        >>> str(ResourceShare(cpus=4, gpus=1))
        '4 CPUs, 1 GPU'
        """
        parts = [f"{self.cpus:g} CPU{'' if self.cpus == 1 else 's'}"]
        parts += [f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}"] if self.gpus else []
        parts += [f"{self.memory_gb:g} GB of memory"] if self.memory_gb else []
        return ", ".join([*parts, *(f"{amount:g} {name}" for name, amount in sorted(self.resources.items()))])


class WorkerShare(ResourceShare):
    """The resources that a scoring or environment worker requests from a cluster. By default it requests none: a worker
    waits most of the time, and uses cores that other parts leave free."""

    cpus: Amount = 0.0
    """Number of cores that the cluster reserves for the worker; may be a fraction. 0: it reserves none."""


class RayConfig(Section):
    """The address of a Ray cluster, and the resources that each part requests from it."""

    address: str = "auto"
    """The cluster's address, in the form that ``ray.init`` accepts. ``auto``: the cluster that this machine, or this
    job, belongs to; ``local``: a new cluster on this machine."""
    engine: ResourceShare = ResourceShare()
    """The resources of each engine, including engines of teachers and of agents that have their own weights."""
    learner: ResourceShare = ResourceShare()
    """The resources of each rank of the learner."""
    scorer: WorkerShare = WorkerShare()
    """The resources of each scoring worker. At times one worker more than ``workers`` runs, so the cluster needs
    resources for it."""
    environment: WorkerShare = WorkerShare()
    """The resources of each environment worker. At times up to four workers more than ``env.workers`` run, so the
    cluster needs resources for them."""
    placement: Literal["pack", "spread"] = "pack"
    """``pack``: engines and ranks run on as few nodes as possible; ``spread``: on as many as possible."""

    @model_validator(mode="after")
    def _permanent_parts_request_resources(self) -> Self:
        """Refuse an engine or a learner that requests no resources of the cluster."""
        for role, share in (("engine", self.engine), ("learner", self.learner)):
            if not (share.cpus or share.gpus or share.memory_gb or share.resources):
                raise ConfigError(
                    f"launch.ray.{role}.cpus=0 requests nothing, and a cluster cannot reserve nothing",
                    remedy=f"set launch.ray.{role}.cpus >= 1",
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLaunch:
    """The functions of a launcher that can start parts of a run on other machines than the controller's machine."""

    refuse: Callable[[LaunchConfig, FleetConfig, LearnerConfig, SyncConfig], None]
    """Raises :class:`~headrace.base.errors.ConfigError` for settings that cannot be used when parts run on other
    machines."""
    devices: Callable[[LaunchConfig, int, int], Devices]
    """Returns the devices on which the engines and the ranks of the learner compute, given the number of engines and
    the number of ranks. Raises :class:`~headrace.base.errors.ConfigError` if a package that the launcher needs is not
    installed."""
    threads: Callable[[LaunchConfig, str], int]
    """Returns the number of cores on which each part with the given role (``engine`` or ``learner``) computes."""
    sentence: Callable[[LaunchConfig, int, int], str]
    """Returns a sentence for the user about the resources that the parts request from the cluster, given the number of
    engines and the number of ranks of the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A way to start the processes of a run. ``launch.kind`` selects one by name.

    A package provides a launcher through an entry point in its ``pyproject.toml``,
    ``[project.entry-points."headrace.launchers"]``.
    """

    starting: Callable[[Any], AbstractAsyncContextManager[Any]]
    """Returns a context manager that opens a :class:`~headrace.launch.child.Starter` for a
    :class:`~headrace.launch.order.LaunchOrder`. Its resources on other machines are released after the body."""
    cluster: ClusterLaunch | None = None
    """The functions for other machines; ``None`` if every process is on this machine."""
    refuse_no_room: Callable[[Any, tuple[str, ...]], Awaitable[None]] | None = None
    """Checks whether engines with the given names can be added while a run goes on, given the starter that ``starting``
    has opened, and raises :class:`~headrace.base.errors.ConfigError` if there is no room for them. Their processes are
    then started as those of other engines are. Among the names are those of engines that are being added or started
    again already, until the starter has started their processes; the error says which of them it has counted.
    ``None``: engines are started only with the run."""


LAUNCHERS = Registry[Launcher](
    group="headrace.launchers",
    setting="launch.kind",
    rows={"local": "headrace.launch.starters:LOCAL"},
    check=make_class_check(Launcher),
)
"""The launchers that ``launch.kind`` can select, by name."""


class LaunchConfig(Section):
    """The settings that determine where the parts of a run are started, and how the cores are divided between them."""

    kind: Annotated[str, NameOf(LAUNCHERS)] = "local"
    """``local``: all parts are processes of this machine: the controller, engines, one learner or its ranks, workers.
    ``ray``: the controller runs here, and all other parts run where a Ray cluster has free resources. Other names are
    launchers of installed packages."""
    ray: RayConfig = RayConfig()
    """The address of the cluster, and the resources that each part requests from it. Only with ``kind = "ray"``."""
    engine_threads: int | None = Field(default=None, ge=1)
    """Number of cores on which all engines together compute, at least one for each; unset: half of the machine's cores.
    Only with ``kind = "local"``."""
    learner_threads: int | None = Field(default=None, ge=1)
    """Number of cores on which all ranks of the learner together compute; unset: half of the machine's cores. Only with
    ``kind = "local"``."""
    lend_cores: bool = False
    """Whether a part that waits lends its cores to parts that compute: an engine while it has no sequence to sample,
    the learner until its next batch. A part borrows cores only while it measures a gain. This works only for processors
    of one machine. A run that lends cores cannot be replayed bit for bit."""
    join: str = ""
    """``ADDRESS:PORT`` of this machine, at which other machines may join the run with workers for its environments: see
    ``headrace join``. Only with ``kind = "local"`` and an environment that runs in workers."""
    rollouts: int = Field(default=0, ge=0, le=64)
    """Number of rollout shards: processes of this machine that run the episodes of training. Each has ``env.workers``
    workers of its own if the environment runs in workers. 0: the episodes run in the controller. The seeds do not
    depend on this setting. With shards, the chunks of answers do not pass through the controller, which may be too slow
    for a thousand engines, or for the messages of many agents. Evaluations stay in the controller. Only with ``kind =
    "local"``."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a part may take to load its model and report that it is ready. On a cluster, also the seconds that a
    part may wait for free resources before it starts. An engine that is added while the run goes on has as many seconds
    again until it gets weights. Time in which the learner or an engine owes an answer (a step, an upload, a commit)
    does not count then; time in which a version cannot reach the new engine counts in any case."""
    engine_restarts: int = Field(default=3, ge=0)
    """Number of times within ten minutes that engines which died are started again; the same number applies to rollout
    shards. The next death ends the run; with 0, every death does."""
    learner_restarts: int = Field(default=0, ge=0)
    """Number of times that a run continues by itself from its last snapshot when its learner, or a rank of it, has
    died. All parts are started again, and answers continue from the tokens that had been streamed. The next death ends
    the run; with 0, every death does."""
    engine_silence_s: float = Field(default=60.0, gt=0)
    """Seconds after which a silent engine is killed and started again. An engine is silent if it has sequences and
    sends nothing, or if it is stopped (SIGSTOP, a debugger) and has not answered an order. Not used with
    ``engine_restarts = 0``."""

    @model_validator(mode="after")
    def _join_address_is_usable(self) -> Self:
        """Refuse a ``join`` that is not an address of this machine at which other machines can join."""
        if not self.join:
            return self
        if self.remote:
            raise ConfigError(
                f"launch.join={self.join!r}, and with launch.kind={self.kind!r} the cluster is what machines join",
                remedy="leave launch.join out, and add those machines to the cluster",
            )
        refuse_secret("launch.join", self.join, "machines join at an address of this machine, as in 10.0.0.5:7781")
        if "://" in self.join:
            raise ConfigError(
                f"launch.join={self.join!r}: machines join over TCP, and no longer over a Redis server",
                remedy="write ADDRESS:PORT of this machine, as in 10.0.0.5:7781; where no TCP connection is possible, "
                "make one with a tunnel (ssh -R) or a VPN",
            )
        try:
            host, _ = host_and_port(self.join)
        except ConfigError as error:
            raise ConfigError(f"launch.join={error.problem}", remedy=error.remedy) from None
        try:
            is_unusable = ip_address(host).is_unspecified
        except ValueError:
            is_unusable = True
        if is_unusable:
            raise ConfigError(
                f"launch.join={self.join!r}: {host} is not the address of one machine, in numbers",
                remedy="write the address by which the others reach this one, as in 10.0.0.5:7781",
            )
        return self

    @model_validator(mode="after")
    def _settings_are_used(self) -> Self:
        """Raise :class:`~headrace.base.errors.ConfigError` for settings that the chosen launcher does not use."""
        if self.kind != "ray" and self.ray != RayConfig():
            changed = [name for name, value in self.ray if value != RayConfig.model_fields[name].default]
            raise ConfigError(
                f"launch.ray.{changed[0]} is set, and launch.kind={self.kind!r} uses no Ray cluster",
                remedy="set launch.kind = 'ray', or leave [launch.ray] out",
            )
        if self.remote and self.rollouts:
            raise ConfigError(
                f"launch.rollouts={self.rollouts}, and with launch.kind={self.kind!r} engines may be on other "
                "machines, where they cannot answer shards of this one",
                remedy="leave launch.rollouts out, or set launch.kind = 'local'",
            )
        if self.remote and self.lend_cores:
            raise ConfigError(
                f"launch.lend_cores=true, and with launch.kind={self.kind!r} the cluster gives each part its cores",
                remedy="leave launch.lend_cores out",
            )
        threads_by_role = {"engine": self.engine_threads, "learner": self.learner_threads}
        for role, setting in threads_by_role.items():
            if self.remote and setting is not None:
                raise ConfigError(
                    f"launch.{role}_threads={setting} is set, and with launch.kind={self.kind!r} each part has the "
                    "cores that it asks the cluster for",
                    remedy=f"set launch.{self.kind}.{role}.cpus, and leave launch.{role}_threads out",
                )
        return self

    @property
    def remote(self) -> bool:
        """Whether parts may run on other machines than the controller."""
        return self.cluster is not None

    @property
    def cluster(self) -> ClusterLaunch | None:
        """The launcher's functions for other machines; ``None`` if every part is on this machine."""
        return LAUNCHERS.load(self.kind).cluster

    def threads(self, role: Literal["engine", "learner"], count: int, num_cores: int) -> int:
        """Return the number of cores on which each of ``count`` parts with the role ``role`` computes, on a machine
        with ``num_cores`` cores; at least 1. On a cluster, it is the number of cores that each part requests.

        >>> LaunchConfig(engine_threads=4).threads("engine", 2, 8)
        2
        """
        if self.cluster is not None:
            return self.cluster.threads(self, role)
        setting = self.engine_threads if role == "engine" else self.learner_threads
        return max(1, threads(setting, num_cores) // count)


def threads(setting: int | None, num_cores: int) -> int:
    """Return the number of cores on which all parts of a role together compute: ``setting``, or half of ``num_cores``
    (at least 1) if ``setting`` is ``None``.

    >>> threads(None, 8), threads(3, 8), threads(None, 1)
    (4, 3, 1)
    """
    return setting if setting is not None else max(1, num_cores // 2)
