"""What a run on a cluster cannot be, refused when its settings are read; and on which devices its parts compute."""

from __future__ import annotations

from headrace.base.config.addresses import LOOPBACK
from headrace.base.errors import ConfigError
from headrace.engine.fleet import FleetConfig
from headrace.launch.config import LaunchConfig, ResourceShare
from headrace.learner import LearnerConfig
from headrace.models.devices import CPU, CUDA, Devices
from headrace.sync import SyncConfig

CROSSES = ("http", "files")
"""Transports that lead from one machine to another."""
FIRST_GPU = f"{CUDA}:0"
"""The one GPU that a part sees which has asked for one."""


def refuse_misfit(launch: LaunchConfig, engine: FleetConfig, learner: LearnerConfig, sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for settings that cannot be on a cluster."""
    if not launch.remote:
        return
    if sync.transport not in CROSSES:
        why = "is memory of one machine" if sync.transport == "shm" else "meets in a directory of one machine"
        raise ConfigError(
            f"sync.transport={sync.transport!r} {why}, and with launch.kind='ray' the learner and the engines may be "
            "on several",
            remedy="set sync.transport = 'http', or 'files' with a folder that every node sees",
        )
    if sync.host != LOOPBACK:
        raise ConfigError(
            f"sync.host={sync.host!r} is set, and with launch.kind='ray' the address is that of each engine's node",
            remedy="leave sync.host out",
        )
    _refuse_device("engine", engine.device, launch.ray.engine)
    _refuse_device("learner", learner.device, launch.ray.learner)


def devices_of(launch: LaunchConfig, num_engines: int, num_ranks: int) -> Devices:
    """Where the parts compute: each sees what it has asked the cluster for, and nothing else."""
    engine, learner = (FIRST_GPU if share.gpus else CPU for share in (launch.ray.engine, launch.ray.learner))
    return Devices(engines=(engine,) * num_engines, learner=(learner,) * num_ranks)


def _refuse_device(role: str, device: str, share: ResourceShare) -> None:
    wanted = "GPU" if device.startswith(CUDA) else "no GPU"
    if device == "auto" or (device.startswith(CUDA) and share.gpus and device in (CUDA, FIRST_GPU)):
        return
    if device != CPU or share.gpus:
        raise ConfigError(
            f"{role}.device={device!r} wants {wanted}, and launch.ray.{role}.gpus={share.gpus}: each part computes on "
            "what it asks the cluster for",
            remedy=f"set {role}.device = 'auto', and launch.ray.{role}.gpus = {int(wanted == 'GPU')}",
        )
