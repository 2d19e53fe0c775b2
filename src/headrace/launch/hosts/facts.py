"""The properties of a machine, other than settings and seeds, on which the exact bits of the results depend. They are
recorded with a run. A replay on a machine with other properties would produce other results, and is refused."""

from __future__ import annotations

import torch


def machine_facts(num_threads: int) -> dict[str, str | int | float]:
    """Return the properties of this process and machine by name: ``threads`` (the number of computing threads,
    ``num_threads``), the version of torch, the instruction set of the processor, and the name of the GPU (``none``
    without a GPU)."""
    return {
        "threads": num_threads,
        "torch": str(torch.__version__),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
