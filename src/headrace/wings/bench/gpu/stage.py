"""The process of one stage: ``python -m headrace.wings.bench.gpu.stage REQUEST``, where REQUEST is a JSON file with a
:class:`~headrace.wings.bench.gpu.base.StageRequest`."""

from __future__ import annotations

import gc
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.base.clock import RealClock
from headrace.launch.hosts.main import die_with_starter
from headrace.wings.bench.gpu.base import StageContext, StageRequest, WorkCounter

_KINDS: Mapping[str, tuple[str, ...]] = {
    "launch": ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"),
    "wait": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "upload": ("Memcpy HtoD",),
    "download": ("Memcpy DtoH",),
}
"""For each kind of work, the prefixes of its names in torch's profiler."""


class ProfiledWork:
    """A counter of the work of a real GPU, which uses torch's profiler."""

    def count(self, act: Callable[[], object]) -> Mapping[str, int]:
        """Call ``act`` under the profiler, and return the number of events of each kind of work."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            act()
        names = Counter(event.name for event in profiled.events() or ())
        return {
            kind: sum(number for name, number in names.items() if name.startswith(begins))
            for kind, begins in _KINDS.items()
        }


def main(arguments: list[str], work: WorkCounter | None = None) -> None:
    """Run the stage that the request describes; the first argument is the path of the request's file. ``work`` counts
    the work of the device, by default with torch's profiler. This process and its group end when the command ends,
    which has the other end of the standard input."""
    die_with_starter(sys.stdin.fileno())
    request = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=StageRequest)
    context = StageContext(
        request=request,
        clock=RealClock(),
        work=work or ProfiledWork(),
        wait=lambda: _wait(request.device),
        release=_release,
    )
    importlib.import_module(request.module).run(context)


def _wait(device: str) -> None:
    """Wait until the GPU ``device`` has finished all its work."""
    import torch

    torch.cuda.synchronize(device)


def _release() -> None:
    """Free GPU memory that torch has cached and no tensor uses."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
