"""The GPUs that a process may use, and their names in torch and in the driver.

    CUDA_VISIBLE_DEVICES, as Ray, Slurm or the user has set it     4,5,6,7
    torch's names of these GPUs                                    cuda:0, cuda:1, cuda:2, cuda:3
    the device of an engine                                        cuda:2,3
    the variable of a server that this engine starts               CUDA_VISIBLE_DEVICES=6,7

torch numbers the GPUs that its process can use from 0, and so does every program that the process starts. A name of
torch must therefore never be passed to another program unchanged: it would denote another GPU. This is the only module
that computes a value of ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass

from headrace.base.environ import visible_gpus
from headrace.base.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def gpu_numbers(device: str) -> tuple[int, ...]:
    """Return torch's numbers of the GPUs in the name of a device; empty for a CPU and for ``cuda`` without a number.

    >>> gpu_numbers("cuda:2"), gpu_numbers("cuda:4,5"), gpu_numbers("cpu")
    ((2,), (4, 5), ())
    """
    return tuple(int(number) for number in device.partition(":")[2].split(",") if number)


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The GPUs that a process can use, in torch's order."""

    names: tuple[str, ...] | None
    """The driver's name of each GPU: a number, a UUID (``GPU-...``) or a part of a GPU (``MIG-...``). ``None``: the
    process can use all GPUs of its machine, whose numbers are those of torch."""

    @classmethod
    def detect(cls) -> VisibleGpus:
        """Return the GPUs that this process can use."""
        return cls.read(visible_gpus())

    @classmethod
    def read(cls, value: str | None, present: int | None = None) -> VisibleGpus:
        """Return the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` names. As in the driver, the list ends before the
        first entry that is not a name, that occurred before, or that is a number not below ``present``, the number of
        GPUs of the machine.

        >>> VisibleGpus.read("4, 5,-1,6").names, VisibleGpus.read("").names, VisibleGpus.read(None).names
        (('4', '5'), (), None)
        """
        if value is None:
            return cls(None)
        names: list[str] = []
        for entry in (entry.strip() for entry in value.split(",")):
            absent = entry.isdecimal() and present is not None and int(entry) >= present
            if absent or entry in names or not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
                break
            names.append(entry)
        return cls(tuple(names))

    def driver_names(self, device: str) -> tuple[str, ...]:
        """Return the driver's names of the GPUs of ``device``, a name in this process such as ``cuda:1`` or
        ``cuda:2,3``. Raises :class:`~headrace.base.errors.ConfigError` for a GPU that this process cannot use.

        >>> VisibleGpus(("4", "5", "6", "7")).driver_names("cuda:2,3"), VisibleGpus(None).driver_names("cuda:1")
        (('6', '7'), ('1',))
        """
        numbers = gpu_numbers(device)
        if self.names is None:
            return tuple(str(number) for number in numbers)
        missing = [number for number in numbers if number >= len(self.names)]
        if missing:
            raise ConfigError(
                f"a part computes on cuda:{missing[0]}, and {VARIABLE}={','.join(self.names)!r} shows its process "
                f"{len(self.names)}",
                remedy="ask the cluster for as many GPUs as the part uses, or show the run more of them",
            )
        return tuple(self.names[number] for number in numbers)

    def place(self, device: str, machine: str) -> str:
        """Return which GPUs of which ``machine`` the ``device`` of a part of this process is, for messages; empty for a
        device that is no GPU, or none that this process can use.

        >>> VisibleGpus(("4", "GPU-8932")).place("cuda:0", "node-7"), VisibleGpus(None).place("cuda:2,3", "node-7")
        ('GPU 4 of node-7', 'GPUs 2, 3 of node-7')
        >>> VisibleGpus(("4", "GPU-8932")).place("cuda:1", "node-7"), VisibleGpus(("4",)).place("cuda:1", "node-7")
        ('GPU GPU-8932 of node-7', '')
        """
        if not device.startswith("cuda:"):
            return ""
        with suppress(ConfigError):
            names = self.driver_names(device)
            return f"GPU{'s' if len(names) > 1 else ''} {', '.join(names)} of {machine}"
        return ""

    def variable(self, device: str) -> dict[str, str]:
        """Return the environment variable that lets a program use exactly the GPUs of ``device``, in this order."""
        return {VARIABLE: ",".join(self.driver_names(device))}


def describe_place(device: str) -> str:
    """Return which GPUs of this machine the ``device`` of this process is, for messages, such as ``GPU 4 of node-7``;
    empty for a processor."""
    return VisibleGpus.detect().place(device, platform.node())
