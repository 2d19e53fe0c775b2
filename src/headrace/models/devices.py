"""Where the parts of a run compute: settled once, before any of them starts.

    GPUs    engine               learner
    0       cpu                  cpu
    1       cuda:0               cuda:0, the same
    2       cuda:1               cuda:0
    n       cuda:n−1, the last   cuda:0, and one GPU more for each rank more

Several engines take the GPUs that the learner leaves, from the last on, and begin again where these are used up.
A setting that names a device wins over this table. Importing this module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    import torch

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
DRIVERS = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""What a system with a GPU that torch calls ``cuda`` has one of: Linux, Jetson boards, Windows' Linux, AMD."""


def _known(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("a device is 'auto', 'cpu', 'cuda' or 'cuda:' and the number of one")
    return name


DeviceName = Annotated[str, AfterValidator(_known)]
"""``auto``: a GPU where torch sees one, else the processor; ``cpu``; ``cuda``: a GPU; ``cuda:N``: that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Torch's name of the device of each part."""

    engines: tuple[str, ...]
    """Of the engines, in order."""
    learner: tuple[str, ...]
    """Of its ranks, in order; empty where nothing is trained."""

    def __str__(self) -> str:
        """
        >>> str(Devices(engines=("cuda:1",), learner=("cuda:0",)))
        'engine on cuda:1, learner on cuda:0'
        """
        learner, engines = ", ".join(dict.fromkeys(self.learner)), ", ".join(dict.fromkeys(self.engines))
        word = "engine" if len(self.engines) == 1 else f"{len(self.engines)} engines"
        return f"{word} on {engines}" + (f", learner on {learner}" if learner else "")


def use(setting: str, name: str, *, only_cpu: bool = False) -> torch.device:
    """Where this process is to compute, of a setting that may be settled already. From now on it is what this thread's
    libraries take where nobody names a GPU.

    Raises :class:`~headrace.base.errors.ConfigError` for a device that is not there.
    """
    import torch

    device = torch.device(settle_one(setting, name, gpus=num_gpus(), only_cpu=only_cpu))
    if device.type == CUDA:
        torch.cuda.set_device(device)
    return device


def has_gpu_driver() -> bool:
    """Whether this system can have a GPU that torch computes on."""
    return any(Path(driver).exists() for driver in DRIVERS)


def num_gpus() -> int:
    """How many GPUs torch can compute on. Where the system has no driver for one, that is known without torch."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def settle(engine: str, learner: str, *, ranks: int, gpus: int, count: int = 1, only_cpu: bool = False) -> Devices:
    """What the settings ``engine.device`` and ``learner.device`` mean on a machine with ``gpus`` GPUs, for ``count``
    engines and a learner of ``ranks`` ranks; 0 ranks are no learner. ``only_cpu``: what the run asks for exists on
    processors only; ``auto`` is one then.

    Raises :class:`~headrace.base.errors.ConfigError` for a device that is not there.

    >>> str(settle("auto", "auto", ranks=2, gpus=4))
    'engine on cuda:3, learner on cuda:0, cuda:1'
    >>> str(settle("auto", "auto", ranks=1, gpus=4, count=3))
    '3 engines on cuda:3, cuda:2, cuda:1, learner on cuda:0'
    """
    trainers = _ranks(learner, ranks=ranks, gpus=gpus, only_cpu=only_cpu) if ranks else ()
    last_first = range(gpus)[::-1]
    free = [number for number in last_first if f"{CUDA}:{number}" not in trainers] or last_first or [0]
    engines = [
        _one("engine.device", engine, gpus=gpus, usual=free[place % len(free)], only_cpu=only_cpu)
        for place in range(count)
    ]
    return Devices(engines=tuple(engines), learner=trainers)


def settle_one(setting: str, name: str, *, gpus: int, only_cpu: bool = False) -> str:
    """As :func:`settle`, for a part by itself: ``auto`` and ``cuda`` are the first GPU. ``setting`` is what the user
    calls it."""
    return _one(setting, name, gpus=gpus, usual=0, only_cpu=only_cpu)


def _one(setting: str, name: str, *, gpus: int, usual: int, only_cpu: bool) -> str:
    if name == CPU or (name == AUTO and (only_cpu or not gpus)):
        return CPU
    number = usual if name in (AUTO, CUDA) else int(name.partition(":")[2])
    if number not in range(gpus):
        known = {0: "no GPU", 1: "one GPU, cuda:0"}.get(gpus, f"{gpus} GPUs, cuda:0 to cuda:{gpus - 1}")
        raise ConfigError(f"{setting}={name!r}, and torch sees {known}", remedy=_remedy(setting, gpus))
    return f"{CUDA}:{number}"


def _remedy(setting: str, gpus: int) -> str:
    if gpus:
        return f"set {setting} = 'auto', or one of those"
    return f"set {setting} = 'auto' or 'cpu'; for a GPU, install torch with CUDA and look at nvidia-smi"


def _ranks(name: str, *, ranks: int, gpus: int, only_cpu: bool) -> tuple[str, ...]:
    """Each rank has a GPU of its own: the library that they speak through allows nothing else, and torch numbers them
    from the first."""
    first = _one("learner.device", name, gpus=gpus, usual=0, only_cpu=only_cpu)
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
