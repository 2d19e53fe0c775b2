"""Settings of the run as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from headrace.base.config import Section
from headrace.flow import FlowConfig
from headrace.models.gap import ROUNDING
from headrace.rollout.environments import Curriculum


class RunSection(Section):
    """How long, from which seed, where to, and what on the way."""

    dir: str = ""
    """The run's directory; empty: ``runs/`` and the date and time."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0)
    """Fixes the order of tasks and every draw of every sampled token."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between snapshots; there is always one at the end, and one when the run is stopped."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many snapshots to keep."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the held-out rows, while the run goes on; 0: before and after only."""
    eval_samples: int = Field(default=1, ge=1)
    """Attempts at each held-out row."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of evaluations; unset: that of training; 0: the most likely token."""
    max_start_gap: float | None = Field(default=None, gt=0)
    """Largest mean difference, in nats, between the log-probabilities of engine and learner at equal weights with which
    the run starts; see docs/observing.md. Unset: what rounding to the number formats of the run file explains, and 0
    with ``model.deterministic``. To be set where the engine rounds more than the run file says, such as a quantised
    server that runs already."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """The run ends, saying who waits for whom, when nothing has moved for this long; while a process of it is stopped
    by a signal or a debugger, 12 times as long. What does not go on is told by name before this has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """All that a controller is told beside its parts."""

    run: RunSection
    flow: FlowConfig
    order: Callable[[int], int | None]
    """Says which dataset row a group number attempts; ``None`` where the rows are used up."""
    curriculum: Curriculum | None = None
    """Says it in its place, if there is one."""
    taught: bool = False
    """Whether a teacher says what to prefer: a run goes on then however equal the rewards are."""
    env_column: str = "env"
    """The column of a row that names its environment, for metrics."""
    largest_gap: float = ROUNDING["bfloat16"]
    """Largest mean |log μ − log π| between engine and learner at equal weights that rounding explains."""
    fingerprint: str = ""
    """Names the configuration, in every snapshot."""
