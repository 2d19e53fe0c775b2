"""The launcher of a run's processes on the nodes of a Ray cluster (``launch.kind = "ray"``). A Ray actor starts and
supervises each process (far/supervisor.py).

fit.py        checks for settings that are impossible on a cluster
cluster.py    the only file that imports Ray: nodes, resources, actors
starter.py    starts each process with its resources on a node
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from headrace.launch.config import ClusterLaunch, Launcher

if TYPE_CHECKING:
    # at run time these are imported only when a run uses a cluster
    from headrace.engine.fleet import FleetConfig
    from headrace.launch.child import Starter
    from headrace.launch.config import LaunchConfig
    from headrace.launch.order import LaunchOrder
    from headrace.learner import LearnerConfig
    from headrace.models.devices import Devices
    from headrace.sync import SyncConfig


def _start_on_ray(order: LaunchOrder) -> AbstractAsyncContextManager[Starter]:
    """Return the context manager whose value is the starter of the run's processes on the Ray cluster."""
    from headrace.wings.cluster.ray.starter import starting_on_ray

    return starting_on_ray(order)


def _refuse_settings(launch: LaunchConfig, engine: FleetConfig, learner: LearnerConfig, sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for settings that are impossible on a Ray cluster."""
    from headrace.wings.cluster.ray.fit import refuse_misfit

    refuse_misfit(launch, engine, learner, sync)


def _part_devices(launch: LaunchConfig, num_engines: int, num_ranks: int) -> Devices:
    """Return the devices of the engines and of the learner's ranks, by the names that they have in each process on its
    node. Raises :class:`~headrace.base.errors.ConfigError` if Ray is not installed."""
    from headrace.wings.cluster.ray.cluster import refuse_absent
    from headrace.wings.cluster.ray.fit import choose_ray_devices

    refuse_absent()
    return choose_ray_devices(launch, num_engines, num_ranks)


def _num_threads(launch: LaunchConfig, role: str) -> int:
    """Return the number of threads for a process of the ``role`` ``engine`` or ``learner``: the number of CPUs that the
    process requests from the cluster, at least 1."""
    share = launch.ray.engine if role == "engine" else launch.ray.learner
    return max(1, int(share.cpus))


def _requests_sentence(launch: LaunchConfig, num_engines: int, num_ranks: int) -> str:
    """Return a sentence that names the resources that the learner and the engines request from the cluster."""
    ray = launch.ray
    learner = "the learner" if num_ranks == 1 else f"each of {num_ranks} ranks of the learner"
    engine = "the engine" if num_engines == 1 else f"each of {num_engines} engines"
    return (
        f"On the Ray cluster {ray.address!r}: {learner} asks for {ray.learner}, {engine} for {ray.engine}; the "
        "controller stays here."
    )


RAY = Launcher(
    starting=_start_on_ray,
    refuse_no_room=lambda starter, names: starter.refuse_no_room(names),
    cluster=ClusterLaunch(
        refuse=_refuse_settings, devices=_part_devices, threads=_num_threads, sentence=_requests_sentence
    ),
)
