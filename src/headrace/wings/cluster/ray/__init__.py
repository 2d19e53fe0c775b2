"""Processes on the nodes of a Ray cluster, each started and watched by an actor (far/supervisor.py).

fit.py        refuses settings that a run on a cluster cannot have
cluster.py    the only file that imports Ray: nodes, resources, actors
starter.py    chooses the resources and the node of each process
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from headrace.launch.config import ClusterLaunch, Launcher

if TYPE_CHECKING:
    # imported when a run uses a cluster
    from headrace.engine.fleet import FleetConfig
    from headrace.launch.child import Starter
    from headrace.launch.config import LaunchConfig
    from headrace.launch.order import LaunchOrder
    from headrace.learner import LearnerConfig
    from headrace.models.devices import Devices
    from headrace.sync import SyncConfig
    from headrace.wings.cluster.ray.starter import RayStarter


def _starting(order: LaunchOrder) -> AbstractAsyncContextManager[Starter]:
    """Return the context in which the processes of a run are started on the Ray cluster."""
    from headrace.wings.cluster.ray.starter import starting_on_ray

    return starting_on_ray(order)


def _refuse(launch: LaunchConfig, engine: FleetConfig, learner: LearnerConfig, sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for settings that a run on a cluster cannot have."""
    from headrace.wings.cluster.ray.fit import refuse_misfit

    refuse_misfit(launch, engine, learner, sync)


def _devices(launch: LaunchConfig, num_engines: int, num_ranks: int) -> Devices:
    """Return the devices of the engines and of the learner's ranks, as they see them on their nodes. Raises
    :class:`~headrace.base.errors.ConfigError` if Ray is not installed."""
    from headrace.wings.cluster.ray.cluster import refuse_absent
    from headrace.wings.cluster.ray.fit import devices_of

    refuse_absent()
    return devices_of(launch, num_engines, num_ranks)


def _threads(launch: LaunchConfig, role: str) -> int:
    """Return the number of threads for a process of the ``role`` ``engine`` or ``learner``: the CPUs that it requests
    from the cluster."""
    share = launch.ray.engine if role == "engine" else launch.ray.learner
    return max(1, int(share.cpus))


def _sentence(launch: LaunchConfig, num_engines: int, num_ranks: int) -> str:
    """Return a sentence that says what the learner and the engines request from the cluster."""
    ray = launch.ray
    learner = "the learner" if num_ranks == 1 else f"each of {num_ranks} ranks of the learner"
    engine = "the engine" if num_engines == 1 else f"each of {num_engines} engines"
    return (
        f"On the Ray cluster {ray.address!r}: {learner} asks for {ray.learner}, {engine} for {ray.engine}; the "
        "controller stays here."
    )


async def _engine_room(starter: RayStarter, names: tuple[str, ...]) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the cluster has no room for the engines ``names``."""
    await starter.refuse_no_room(names)


RAY = Launcher(
    starting=_starting,
    engine_room=_engine_room,
    cluster=ClusterLaunch(refuse=_refuse, devices=_devices, threads=_threads, sentence=_sentence),
)
