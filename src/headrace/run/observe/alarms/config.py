"""Settings of the alarms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.base.config import Section

AlarmName = Literal[
    "entropy", "zero_variance", "rewards", "kl", "mismatch", "length", "repetition", "stall", "disk"
]  # fmt: skip


class AlarmsConfig(Section):
    """When a run complains, and when it stops by itself."""

    off: tuple[AlarmName, ...] = ()
    """Alarms that are not asked."""
    stop_on: tuple[AlarmName, ...] = ()
    """Alarms that end the run: after the steps that are ordered, with a checkpoint, as Ctrl-C does."""
    patience: int = Field(default=3, ge=1)
    """Steps in a row that something must be wrong for."""
    baseline_steps: int = Field(default=10, ge=1)
    """The beginning of a run, whose median entropy, length and repetition later steps are held against."""
    entropy_frac: float = Field(default=0.1, gt=0, lt=1)
    """``entropy``: the mean entropy has fallen below this fraction of the beginning's."""
    zero_variance_frac: float = Field(default=0.9, gt=0, le=1)
    """``zero_variance``: at least this fraction of the groups has equal rewards."""
    max_reward_failed: float = Field(default=0.1, ge=0, lt=1)
    """``rewards``: of the calls of a component of the reward, more than this fraction has failed."""
    max_kl: float = Field(default=0.5, gt=0)
    """``kl``: KL(μ‖π) by k3 over the batch, or KL(π‖π_ref), is above this, in nats per token."""
    max_mismatch: float = Field(default=0.01, gt=0)
    """``mismatch``: KL between engine and learner over fresh tokens is above this. About 0.0004 is usual, 0.0015 in a
    mixture of experts without replay; 0.013 has collapsed a run."""
    length_times: float = Field(default=3.0, gt=1)
    """``length``: episodes are this many times as long as in the beginning."""
    max_repetition: float = Field(default=0.5, gt=0, le=1)
    """``repetition``: this fraction of 4-grams stood in the same episode before, and twice as many as in the
    beginning."""
    stall_s: float = Field(default=120.0, gt=0)
    """``stall``: no step has ended for this long and for five times the usual step."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """``disk``: less than this is left on the disk of the run directory."""
