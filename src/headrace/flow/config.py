"""Settings of the flow."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.config import Section
from headrace.errors import ConfigError


class FlowConfig(Section):
    """How much is in flight, how old a token may be, and what makes a batch."""

    groups_per_step: int = Field(default=16, ge=1)
    """Groups that one optimizer step trains."""
    group_size: int = Field(default=8, ge=2)
    """Episodes per group: attempts at one task that share a baseline."""
    max_age: int = Field(default=1, ge=0)
    """The staleness bound: no token is trained by a learner more than this many versions newer than the weights that
    sampled it. 0 is synchronous."""
    lead: int | None = Field(default=None, ge=0)
    """How many batches generation may run ahead of training; unset: ``max_age``. Less than ``max_age`` leaves the bound
    as slack for stragglers."""
    order: Literal["ready_first", "strict"] = "ready_first"
    """``ready_first``: a batch is made of what is ready, as long as every group still meets its bound; ``strict``:
    groups are trained in the order they were admitted."""
    capacity: int | None = Field(default=None, ge=1)
    """Most groups being generated or scored at once; unset: no limit but the lead."""
    min_episodes: int = Field(default=2, ge=2)
    """A group with fewer scored episodes than this is dropped: it has no baseline."""
    max_failed_groups: int = Field(default=32, ge=1)
    """The run stops when this many groups in a row were dropped because their episodes failed."""
    max_idle_batches: int = Field(default=20, ge=1)
    """The run stops when this many batches in a row carry no signal: every group's rewards are all equal."""

    @property
    def effective_lead(self) -> int:
        """``lead``, or ``max_age`` where it is not set."""
        return self.max_age if self.lead is None else self.lead

    @model_validator(mode="after")
    def _sizes_can_work(self) -> Self:
        if self.effective_lead > self.max_age:
            raise ConfigError(
                f"flow.lead={self.lead} is more than flow.max_age={self.max_age}: the bound would never let it happen",
                remedy=f"set flow.lead <= {self.max_age}, or raise flow.max_age",
            )
        if self.capacity is not None and self.capacity < self.groups_per_step:
            raise ConfigError(
                f"flow.capacity={self.capacity} is smaller than one batch (flow.groups_per_step="
                f"{self.groups_per_step}): no step could ever start",
                remedy=f"set flow.capacity >= {self.groups_per_step}",
            )
        if self.min_episodes > self.group_size:
            raise ConfigError(
                f"flow.min_episodes={self.min_episodes} is more than flow.group_size={self.group_size}: every group "
                "would be dropped",
                remedy=f"set flow.min_episodes <= {self.group_size}",
            )
        return self
