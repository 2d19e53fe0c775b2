"""The checks for settings that are impossible on a Ray cluster, and the devices on which the parts of a run compute
there."""

from __future__ import annotations

from headrace.base.config.addresses import LOOPBACK
from headrace.base.errors import ConfigError
from headrace.engine.fleet import FleetConfig
from headrace.launch.config import LaunchConfig, ResourceShare
from headrace.learner import LearnerConfig
from headrace.models.devices import CPU, CUDA, Devices
from headrace.sync import SyncConfig
from headrace.sync.config import TRANSPORTS

FIRST_GPU = f"{CUDA}:0"
"""The device of a part that has requested one GPU: Ray makes only that GPU visible to the part."""


def refuse_misfit(launch: LaunchConfig, engine: FleetConfig, learner: LearnerConfig, sync: SyncConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for settings of a run that are impossible on a Ray cluster: a
    transport within one machine, a fixed host, and devices or numbers of GPUs that contradict the requested resources.
    The parameters are sections of the run file."""
    transport = TRANSPORTS.load(sync.transport)
    if not transport.crosses_machines:
        raise ConfigError(
            f"sync.transport={sync.transport!r} {transport.one_machine}, and with launch.kind='ray' the learner and "
            "the engines may be on several",
            remedy="set sync.transport = 'http', or 'files' with a folder that every node sees",
        )
    if sync.host != LOOPBACK:
        raise ConfigError(
            f"sync.host={sync.host!r} is set, and with launch.kind='ray' the address is that of each part's node",
            remedy="leave sync.host out",
        )
    _refuse_device("engine", engine.device, launch.ray.engine)
    _refuse_device("learner", learner.device, launch.ray.learner)
    _refuse_gpu_count("engine", launch.ray.engine, engine.width, "engine.tensor x engine.pipeline")
    _refuse_gpu_count("learner", launch.ray.learner, 1, "each rank of the learner")
    for name, share in (("scorer", launch.ray.scorer), ("environment", launch.ray.environment)):
        _refuse_gpu_count(name, share, 1, f"each {name} worker")


def choose_ray_devices(launch: LaunchConfig, num_engines: int, num_ranks: int) -> Devices:
    """Return the devices, with the settings ``launch``, of ``num_engines`` engines and ``num_ranks`` ranks of the
    learner. Only the GPUs that a part has requested from the cluster are visible to it, and torch numbers them from
    0."""
    engine, learner = (_name_device(share.gpus) for share in (launch.ray.engine, launch.ray.learner))
    return Devices(engines=(engine,) * num_engines, learner=(learner,) * num_ranks)


def _name_device(gpus: int) -> str:
    """Return the device of a part that has requested ``gpus`` GPUs, such as ``cuda:0,1``; the CPU for 0 GPUs."""
    return f"{CUDA}:{','.join(map(str, range(gpus)))}" if gpus else CPU


def _refuse_gpu_count(role: str, share: ResourceShare, needed: int, what: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` unless the parts of a ``role`` request 0 GPUs or the ``needed``
    number. ``what`` describes the needed number in the message."""
    if share.gpus not in (0, needed):
        raise ConfigError(
            f"launch.ray.{role}.gpus={share.gpus}, and {what} is {needed}: a part gets exactly the GPUs that it "
            "computes on",
            remedy=f"set launch.ray.{role}.gpus = {needed}, or 0 to compute on processors",
        )


def _refuse_device(role: str, device: str, share: ResourceShare) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a ``device`` setting that contradicts the GPUs that the
    ``role`` requests from the cluster."""
    wanted = "GPU" if device.startswith(CUDA) else "no GPU"
    if device == "auto" or (device.startswith(CUDA) and share.gpus and device in (CUDA, FIRST_GPU)):
        return
    if device != CPU or share.gpus:
        raise ConfigError(
            f"{role}.device={device!r} wants {wanted}, and launch.ray.{role}.gpus={share.gpus}: each part computes on "
            "what it asks the cluster for",
            remedy=f"set {role}.device = 'auto', and launch.ray.{role}.gpus = {int(wanted == 'GPU')}",
        )
