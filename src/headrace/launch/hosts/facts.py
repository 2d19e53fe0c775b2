"""The properties of a machine on which results depend to the last bit, beside settings and seeds. They are recorded
with a run, so that a replay where they differ, whose results would differ too, is refused."""

from __future__ import annotations

import torch


def machine_facts(num_threads: int) -> dict[str, str | int | float]:
    """Return the properties of this process and machine by name: ``threads`` (``num_threads``, with which it computes),
    the version of torch, the instruction set of the processor and the name of the GPU (``none`` without one)."""
    return {
        "threads": num_threads,
        "torch": str(torch.__version__),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
