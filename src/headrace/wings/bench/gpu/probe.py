"""The facts about the GPU that torch reports, for the checks before the first stage and for the stage ``facts``.
``python -m headrace.wings.bench.gpu.probe`` prints them as JSON, so that the command itself does not import torch."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata

import msgspec


class CardFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about torch, the driver and the first GPU."""

    torch: str
    """The version of torch."""
    cuda: str
    """The version of CUDA that torch was built for; empty for a build without CUDA."""
    triton: str
    """The version of Triton; empty if it is not installed."""
    count: int = 0
    """The number of GPUs that torch can use."""
    error: str = ""
    """The error of torch where it cannot use the driver; empty if it can."""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    """The compute capability, such as (9, 0)."""
    total: int = 0
    """The memory of the GPU, in bytes."""
    free: int = 0
    """The free memory of the GPU, in bytes; the memory that this process itself needs for CUDA does not count as
    free."""


def probe() -> CardFacts:
    """Return the facts about the first GPU that is visible to this process. torch is imported here."""
    import torch

    triton = metadata.version("triton") if importlib.util.find_spec("triton") else ""
    built = CardFacts(torch=str(torch.__version__), cuda=torch.version.cuda or "", triton=triton)
    try:
        torch.cuda.init()
        free, total = torch.cuda.mem_get_info(0)
        return msgspec.structs.replace(
            built,
            count=torch.cuda.device_count(),
            name=torch.cuda.get_device_name(0),
            capability=torch.cuda.get_device_capability(0),
            total=total,
            free=free,
        )
    except (RuntimeError, AssertionError) as error:  # the latter for a build without CUDA
        return msgspec.structs.replace(built, error=str(error).strip().splitlines()[0])


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(probe()) + b"\n")
