"""The settings of the run as a whole (``[run]`` in a run file), and the record of all settings that a controller
needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from headrace.base.config import Section
from headrace.flow import FlowConfig
from headrace.models.gap import ROUNDING
from headrace.rollout.environments import Curriculum


class RunSection(Section):
    """The settings of a run as a whole (``[run]`` in a run file): its length, seed, directory, checkpoints and
    evaluations."""

    dir: str = ""
    """The run's directory; empty: ``runs/`` and the date and time."""
    steps: int = Field(default=100, ge=1)
    """Number of optimizer steps."""
    seed: int = Field(default=0, ge=0)
    """The seed from which the order of tasks and all sampled tokens follow."""
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps between snapshots. There is always one at the end, and one when the run is stopped."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of snapshots to keep."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on the held-out rows, while the run is still running; 0: only before and after
    training."""
    eval_samples: int = Field(default=1, ge=1)
    """Number of attempts at each held-out row."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of evaluations; 0: always the most likely token. Unset: the temperature of training."""
    max_start_gap: float | None = Field(default=None, gt=0)
    """Largest mean difference, in nats, between the log-probabilities of engine and learner at equal weights with which
    the run starts; see docs/observing.md. Unset: the difference that rounding to the number formats of the run file
    explains, and 0 with ``model.deterministic``. Set it if the engine rounds more than the run file says, for example a
    quantised server that runs already."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without any progress after which the run ends, with a table of what each loop waits for; 12 times as long
    while a process of the run is stopped by a signal or a debugger. A warning names a process that makes no progress
    before this time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """All settings that a controller needs in addition to its components (engine, learner, scorers and others)."""

    run: RunSection
    """The settings ``[run]`` of the run file."""
    flow: FlowConfig
    """The settings ``[flow]`` of the run file."""
    order: Callable[[int], int | None]
    """A function that receives the number of a group and returns the index of the dataset row that the group attempts;
    it returns ``None`` if no rows are left."""
    curriculum: Curriculum | None = None
    """The curriculum, which picks the rows by the rewards of earlier attempts instead of ``order``; ``None``: there is
    none."""
    has_teachers: bool = False
    """Whether the run learns from a teacher: it then continues even if all rewards are equal."""
    env_column: str = "env"
    """The column of a dataset row that contains the name of its environment, for metrics by environment."""
    largest_gap: float = ROUNDING["bfloat16"]
    """The largest mean |log μ − log π|, in nats, between the logprobs of engine (μ) and learner (π) at equal weights
    that rounding explains."""
    fingerprint: str = ""
    """A hash of the settings and dataset rows, which is stored in every snapshot and compared when the run is
    resumed."""
