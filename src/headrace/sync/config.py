"""Settings of the weight sync."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section
from headrace.types.weights import Interrupt


class SyncConfig(Section):
    """How weights travel."""

    transport: Literal["shm"] = "shm"
    """Two packed buffers in shared memory: the engine's parameters are views of the committed one."""
    interrupt: Interrupt = Interrupt.INFLIGHT
    """What becomes of the running sequences when new weights are committed."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Longest wait for one stage or commit."""
