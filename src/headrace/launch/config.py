"""Settings of the launch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section


class LaunchConfig(Section):
    """Where the parts run, and how the cores are divided between them."""

    kind: Literal["local"] = "local"
    """Processes of this machine: the controller, one engine, one learner or its ranks, scoring workers."""
    engine_threads: int | None = Field(default=None, ge=1)
    """Cores that the engine computes with; unset: half of the machine's."""
    learner_threads: int | None = Field(default=None, ge=1)
    """Cores that the learner computes with, all of its ranks together; unset: half of the machine's."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a part to load its model and report."""


def threads(asked: int | None, num_cores: int) -> int:
    """``asked``, or half of the cores.

    >>> threads(None, 8), threads(3, 8), threads(None, 1)
    (4, 3, 1)
    """
    return asked if asked is not None else max(1, num_cores // 2)
