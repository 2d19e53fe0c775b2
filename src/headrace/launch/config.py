"""Settings of the launch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section


class LaunchConfig(Section):
    """Where the parts run, and how the cores are divided between them."""

    kind: Literal["local"] = "local"
    """Processes of this machine: the controller, engines, one learner or its ranks, scoring workers."""
    engine_threads: int | None = Field(default=None, ge=1)
    """Cores that the engines compute with, all together, one each at least; unset: half of the machine's."""
    learner_threads: int | None = Field(default=None, ge=1)
    """Cores that the learner computes with, all of its ranks together; unset: half of the machine's."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a part to load its model and report."""
    engine_restarts: int = Field(default=3, ge=0)
    """How many engines that died are started again within ten minutes; the next death ends the run, as every death does
    with 0."""
    engine_silence_s: float = Field(default=60.0, gt=0)
    """An engine that has sequences and says nothing for so long is ended and started again; with
    ``engine_restarts = 0`` nobody looks."""


def threads(asked: int | None, num_cores: int) -> int:
    """``asked``, or half of the cores.

    >>> threads(None, 8), threads(3, 8), threads(None, 1)
    (4, 3, 1)
    """
    return asked if asked is not None else max(1, num_cores // 2)
