"""The choice of the device for each part of a run, made once before any part starts.

    GPUs    engine               learner
    0       cpu                  cpu
    1       cuda:0               cuda:0, shared
    2       cuda:1               cuda:0
    n       cuda:n−1, the last   cuda:0, and one more GPU for each further rank

Several engines use the GPUs that the learner does not use, from the last on. If there are more engines than GPUs, they
share these GPUs in the same order. An engine that computes on several GPUs (``engine.tensor``, ``engine.pipeline``)
uses consecutive GPUs and does not share them: ``cuda:6,7``. A setting that names a device overrides this table.
Importing this module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from headrace.base.errors import ConfigError
from headrace.models.gpus import gpu_numbers

if TYPE_CHECKING:
    import torch

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""The device files of GPU drivers whose GPUs torch calls ``cuda``: Linux, Jetson boards, Windows' Linux, AMD."""


def _check_device_name(name: str) -> str:
    """Return ``name`` if it is the name of a device. Raises ``ValueError`` otherwise."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+(,\d+)*)?", name):
        raise ValueError(
            "a device is 'auto', 'cpu', 'cuda' or 'cuda:' and the number of one, or of several: 'cuda:2,3'"
        )
    numbers = gpu_numbers(name)
    if len(set(numbers)) != len(numbers):
        raise ValueError("a device names each GPU once")
    return name


DeviceName = Annotated[str, AfterValidator(_check_device_name)]
"""The name of a device: ``auto`` for a GPU if torch finds one, else the CPU; ``cpu``; ``cuda`` for a GPU; ``cuda:N``
for the GPU with number N; ``cuda:N,M`` for the GPUs of one engine that computes on several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The device of each part of a run, by its name in torch."""

    engines: tuple[str, ...]
    """The devices of the engines, in their order."""
    learner: tuple[str, ...]
    """The devices of the learner's ranks, in their order; empty if nothing is trained."""

    def __str__(self) -> str:
        """Return the devices in words.

        >>> str(Devices(engines=("cuda:1",), learner=("cuda:0",)))
        'engine on cuda:1, learner on cuda:0'
        """
        learner, engines = ", ".join(dict.fromkeys(self.learner)), ", ".join(dict.fromkeys(self.engines))
        word = "engine" if len(self.engines) == 1 else f"{len(self.engines)} engines"
        return f"{word} on {engines}" + (f", learner on {learner}" if learner else "")


def use_device(setting: str, name: str, *, only_cpu: bool = False) -> torch.device:
    """Return the device on which this process computes, for the value ``name`` of ``setting``. With ``only_cpu``,
    ``auto`` means the CPU. A GPU also becomes this thread's current CUDA device.

    Raises :class:`~headrace.base.errors.ConfigError` for a device that does not exist.
    """
    import torch

    device = torch.device(choose_device(setting, name, gpus=num_gpus(), only_cpu=only_cpu))
    if device.type == CUDA:
        torch.cuda.set_device(device)
    return device


def has_gpu_driver() -> bool:
    """Return whether this system has a driver for a GPU that torch can use."""
    return any(Path(driver).exists() for driver in DRIVERS)


def num_gpus() -> int:
    """Return the number of GPUs that torch can use. On a system without a GPU driver, torch is not imported."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_devices(
    engine: str, learner: str, *, ranks: int, gpus: int, count: int = 1, width: int = 1, only_cpu: bool = False
) -> Devices:
    """Return the devices for ``count`` engines of ``width`` GPUs each and a learner of ``ranks`` ranks (0 for no
    learner) on a machine with ``gpus`` GPUs. ``engine`` and ``learner`` are the values of ``engine.device`` and
    ``learner.device``. With ``only_cpu``, the run uses a feature that exists only on CPUs, and ``auto`` means the CPU.

    Raises :class:`~headrace.base.errors.ConfigError` for a device that does not exist.

    >>> str(choose_devices("auto", "auto", ranks=2, gpus=4))
    'engine on cuda:3, learner on cuda:0, cuda:1'
    >>> str(choose_devices("auto", "auto", ranks=1, gpus=4, count=3))
    '3 engines on cuda:3, cuda:2, cuda:1, learner on cuda:0'
    >>> str(choose_devices("auto", "auto", ranks=2, gpus=8, count=2, width=2))
    '2 engines on cuda:6,7, cuda:4,5, learner on cuda:0, cuda:1'
    """
    trainers = _rank_devices(learner, ranks=ranks, gpus=gpus, only_cpu=only_cpu) if ranks else ()
    if width > 1 or "," in engine:
        return Devices(
            engines=_multi_gpu_engines(engine, trainers, gpus, count, width, only_cpu=only_cpu), learner=trainers
        )
    last_first = range(gpus)[::-1]
    free = [number for number in last_first if f"{CUDA}:{number}" not in trainers] or last_first or [0]
    engines = [
        choose_device("engine.device", engine, gpus=gpus, usual=free[place % len(free)], only_cpu=only_cpu)
        for place in range(count)
    ]
    return Devices(engines=tuple(engines), learner=trainers)


def _multi_gpu_engines(
    name: str, trainers: tuple[str, ...], gpus: int, count: int, width: int, *, only_cpu: bool
) -> tuple[str, ...]:
    """Return the devices of ``count`` engines that compute on ``width`` GPUs each and share them with no other part.
    ``name`` is the value of ``engine.device``, ``trainers`` are the devices of the learner, and ``gpus`` is the number
    of GPUs of the machine. Raises :class:`~headrace.base.errors.ConfigError` if there are too few GPUs."""
    if name == CPU or (name == AUTO and (only_cpu or not gpus)):
        return (CPU,) * count
    named = gpu_numbers(name)
    if named and len(named) != width * count:
        raise ConfigError(
            f"engine.device={name!r} names {len(named)} GPUs, and engine.count={count} engines of engine.tensor x "
            f"engine.pipeline={width} need {width * count}",
            remedy=f"name {width * count} of them, or set engine.device = 'auto'",
        )
    trained = {number for device in trainers for number in gpu_numbers(device)}
    unknown = [number for number in named if number >= gpus]
    if unknown:
        raise ConfigError(
            f"engine.device={name!r}, and torch sees {_describe_gpus(gpus)}", remedy=_remedy("engine.device", gpus)
        )
    free = [number for number in named or range(gpus) if number not in trained]
    if len(free) < width * count:
        raise ConfigError(
            f"{count} engine{'s' if count > 1 else ''} of {width} GPUs each (engine.tensor x engine.pipeline) need "
            f"{width * count} GPUs beside the learner's {len(trained)}, and there are {len(free)}: torch sees "
            f"{_describe_gpus(gpus)}",
            remedy="lower engine.tensor, engine.count or the learner's ranks, or take a machine with more GPUs",
        )
    last_first = free if named else free[len(free) - width * count :]
    gpu_sets = [last_first[at : at + width] for at in range(0, width * count, width)]
    return tuple(f"{CUDA}:{','.join(map(str, gpu_set))}" for gpu_set in (gpu_sets if named else gpu_sets[::-1]))


def device_for_one_more(engine: str, devices: Devices, *, gpus: int, width: int = 1, only_cpu: bool = False) -> str:
    """Return the device for one more engine of ``width`` GPUs beside the parts that compute on ``devices``, on a
    machine with ``gpus`` GPUs: the last GPUs that no other part uses, or the CPU. For ``engine`` and ``only_cpu`` see
    :func:`choose_devices`.

    Raises :class:`~headrace.base.errors.ConfigError` if too few GPUs are free.

    >>> here = Devices(engines=("cuda:3",), learner=("cuda:0",))
    >>> device_for_one_more("auto", here, gpus=4), device_for_one_more("auto", here, gpus=4, width=2)
    ('cuda:2', 'cuda:1,2')
    """
    if engine == CPU or (engine == AUTO and (only_cpu or not gpus)):
        return CPU
    used = {number for device in (*devices.engines, *devices.learner) for number in gpu_numbers(device)}
    free = [number for number in gpu_numbers(engine) or range(gpus) if number not in used]
    if len(free) >= width:
        return f"{CUDA}:{','.join(map(str, free[-width:]))}"
    few = f"{len(free)} of the {width} GPUs that it computes on are" if free else "no GPU is"
    named = f", and engine.device={engine!r}" if gpu_numbers(engine) else ""
    here = replace(devices, engines=tuple(device for device in devices.engines if device))
    raise ConfigError(
        f"one more engine cannot be added: {few} free; torch sees {_describe_gpus(gpus)}{named}, and they "
        f"are in use: {here}",
        remedy="remove another engine first, or restart the run with fewer ranks of the learner, or on a machine with "
        "more GPUs",
    )


def choose_device(setting: str, name: str, *, gpus: int, usual: int = 0, only_cpu: bool = False) -> str:
    """Return the device of a single part that ``setting``, whose value is ``name``, selects on a machine with ``gpus``
    GPUs. With ``only_cpu``, ``auto`` means the CPU. ``auto`` and ``cuda`` select the GPU with number ``usual``, or the
    CPU if there is no GPU. Raises :class:`~headrace.base.errors.ConfigError` for several GPUs and for a GPU that does
    not exist."""
    if name == CPU or (name == AUTO and (only_cpu or not gpus)):
        return CPU
    number, *more = gpu_numbers(name) or (usual,)
    if more:
        raise ConfigError(
            f"{setting}={name!r} is {1 + len(more)} GPUs, and this part computes on one",
            remedy="name one; an engine that is a server takes several with engine.tensor",
        )
    if number not in range(gpus):
        raise ConfigError(f"{setting}={name!r}, and torch sees {_describe_gpus(gpus)}", remedy=_remedy(setting, gpus))
    return f"{CUDA}:{number}"


def _describe_gpus(gpus: int) -> str:
    """Return a description of the GPUs that torch finds, if there are ``gpus`` of them."""
    return {0: "no GPU", 1: "one GPU, cuda:0"}.get(gpus, f"{gpus} GPUs, cuda:0 to cuda:{gpus - 1}")


def _remedy(setting: str, gpus: int) -> str:
    """Return the remedy for a setting that names a GPU which does not exist on a machine with ``gpus`` GPUs."""
    if gpus:
        return f"set {setting} = 'auto', or one of those"
    return f"set {setting} = 'auto' or 'cpu'; for a GPU, install torch with CUDA and look at nvidia-smi"


def _rank_devices(name: str, *, ranks: int, gpus: int, only_cpu: bool) -> tuple[str, ...]:
    """Return the device of each of the ``ranks`` ranks of the learner on a machine with ``gpus`` GPUs. ``name`` is the
    value of ``learner.device``; with ``only_cpu``, ``auto`` means the CPU. Each rank needs its own GPU, as NCCL
    requires, and the ranks use torch's GPUs from the first on. Raises :class:`~headrace.base.errors.ConfigError` if
    there are too few GPUs."""
    first = choose_device("learner.device", name, gpus=gpus, only_cpu=only_cpu)
    if first == CPU or ranks == 1:
        return (first,) * ranks
    if first != f"{CUDA}:0":
        raise ConfigError(
            f"learner.device={name!r} is one GPU, and learner.parallel asks for {ranks} ranks, which need one each",
            remedy="set learner.device = 'cuda'; CUDA_VISIBLE_DEVICES chooses which GPUs torch sees",
        )
    if ranks > gpus:
        raise ConfigError(
            f"learner.parallel asks for {ranks} ranks, each on a GPU of its own, and torch sees {gpus}",
            remedy=f"ask for {gpus} rank{'s' if gpus > 1 else ''}, or set learner.device = 'cpu'",
        )
    return tuple(f"{CUDA}:{rank}" for rank in range(ranks))
