"""The only place that reads environment variables."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

RUN_TOKEN = "HEADRACE_RUN_TOKEN"


def run_token() -> str:
    """The secret that the launcher hands to the processes of one run; empty outside a run."""
    return os.environ.get(RUN_TOKEN, "")


def child_environment(token: str, num_threads: int) -> dict[str, str]:
    """The environment of a process of the run: the run's token, its share of the cores, no hub."""
    return {
        **os.environ,
        RUN_TOKEN: token,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def shared_memory_root() -> Path:
    """Where shared buffers live: ``/dev/shm`` where there is one, else the temporary directory."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def num_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # gate: getattr - not every system can tell
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
