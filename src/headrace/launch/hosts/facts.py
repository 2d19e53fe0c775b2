"""The properties of a machine on which results depend, to the last bit, beside settings and seeds."""

from __future__ import annotations

import torch


def machine_facts(num_threads: int) -> dict[str, str | int | float]:
    """Return the properties of this process, which computes with ``num_threads``: threads, versions and processors."""
    return {
        "threads": num_threads,
        "torch": str(torch.__version__),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
