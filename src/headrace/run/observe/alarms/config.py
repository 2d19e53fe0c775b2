"""Settings of the alarms."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headrace.base.config import Section
from headrace.base.config.kinds import NameOf
from headrace.base.plugins import Registry

OWN = ("entropy", "zero_variance", "rewards", "kl", "mismatch", "length", "repetition", "stall", "disk")
"""The names of Headrace's own alarms."""
OFFERED = Registry[Any](group="headrace.alarms", setting="the alarm")
"""The alarms of installed packages: each is an :class:`~headrace.run.observe.alarms.rows.AlarmRow`."""
AlarmName = Annotated[str, NameOf(OFFERED, also=OWN)]
"""The name of one of Headrace's alarms, or of an installed package's."""


class AlarmsConfig(Section):
    """The alarms of a run: which are on, which stop the run, and their thresholds."""

    off: tuple[AlarmName, ...] = ()
    """The alarms that are switched off."""
    on: tuple[Annotated[str, NameOf(OFFERED)], ...] = ()
    """The alarms of installed packages that are switched on, beside those of Headrace."""
    stop_on: tuple[AlarmName, ...] = ()
    """The alarms that end the run, after the steps that are ordered, with a checkpoint, as Ctrl-C does."""
    patience: int = Field(default=3, ge=1)
    """The number of steps in a row for which a problem must last before its alarm goes off."""
    baseline_steps: int = Field(default=10, ge=1)
    """The number of steps at the beginning of a run whose median entropy, length and repetition are the baseline for
    later steps."""
    entropy_frac: float = Field(default=0.1, gt=0, lt=1)
    """``entropy`` goes off where the mean entropy is below this fraction of the baseline."""
    zero_variance_frac: float = Field(default=0.9, gt=0, le=1)
    """``zero_variance`` goes off where at least this fraction of the groups has equal rewards."""
    max_reward_failed: float = Field(default=0.1, ge=0, lt=1)
    """``rewards`` goes off where more than this fraction of the calls of a reward component has failed."""
    max_kl: float = Field(default=0.5, gt=0)
    """``kl`` goes off where KL(μ‖π) by k3 over the batch, or KL(π‖π_ref), is above this, in nats per token."""
    max_mismatch: float = Field(default=0.01, gt=0)
    """``mismatch`` goes off where KL between engine and learner over fresh tokens is above this, in nats per token.
    About 0.0004 is usual, 0.0015 in a mixture of experts without replay; a run with 0.013 has collapsed."""
    length_times: float = Field(default=3.0, gt=1)
    """``length`` goes off where episodes are this many times as long as the baseline."""
    max_repetition: float = Field(default=0.5, gt=0, le=1)
    """``repetition`` goes off where this fraction of 4-grams occurred earlier in the same episode, and it is at
    least twice the baseline."""
    stall_s: float = Field(default=120.0, gt=0)
    """``stall`` goes off where no step has ended for this many seconds and for five times the usual step."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """``disk`` goes off where fewer gigabytes than this are free on the disk of the run directory."""
