"""The contract of a staleness policy: its settings, and decisions that are pure functions of the state of the flow.

A policy decides which groups of episodes start, which groups form the next batch, and which are dropped because of
their age, so that no token is trained at an age above the staleness bound (``flow.max_age``, in versions of the
weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.base.config import Section
from headrace.flow.state import FlowState

STALE = "stale"
"""The reason under which dropped groups and masked tokens are counted if they would be trained at an age above the
bound."""
DISPLACED = "displaced"
"""The reason under which a dropped group is counted if newer groups take its place in a full buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The decision of a policy about the next step: the groups that the step trains, and the groups to drop first."""

    take: tuple[int, ...] = ()
    """Numbers of the groups to train, in the order in which they are laid out in the batch; empty if there is no batch
    yet."""
    leave: Mapping[int, str] = field(default_factory=dict)
    """Numbers of the groups to drop, each with the reason that is counted."""
    oldest_version: int | None = None
    """Tokens of older versions carry no loss; ``None``: every token carries loss."""


class StalenessPolicy(Section):
    """The base class of all staleness policies, which is also the section of their settings. Policies use no I/O and no
    clock and store no state: the same state of the flow results in the same decision."""

    fixes: ClassVar[Mapping[str, int | str | None]] = {}
    """Values of the flow's settings that the policy requires, by the name of the setting."""
    paced: ClassVar[bool] = True
    """Whether the policy keeps generation within the versions that the bound allows, so that ``flow.lead`` cannot be
    more than ``flow.max_age`` and ``flow.pacing`` applies."""

    recorded: ClassVar[bool] = False
    """Whether the policy repeats the recorded decisions of another run instead of deciding itself."""

    @property
    def in_order(self) -> bool:
        """Return whether groups are always trained in the order in which they start."""
        return False

    @property
    def drops_stale(self) -> bool:
        """Return whether the policy drops groups that have become too old to be trained within the bound."""
        return False

    @property
    def masks_stale(self) -> bool:
        """Return whether tokens that are too old are masked (carry no loss) while the rest of their group is
        trained."""
        return False

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the settings of the policy contradict settings of the
        flow: ``max_age`` is the staleness bound, ``lead`` the number of batches that generation may run ahead, and
        ``strict`` says that groups are trained in the order of admission. The base class accepts all settings."""

    def admit(self, state: FlowState) -> int:
        """Return how many groups may start now, given the state of all groups."""
        raise NotImplementedError

    def leave(self, state: FlowState) -> Mapping[int, str]:
        """Return the numbers of the ready groups to drop now, each with the reason that is counted. The flow calls this
        method whenever a group has become ready."""
        return {}

    def select(self, state: FlowState) -> Selection:
        """Return the groups of the next batch, if it is complete, and the groups to drop first. The flow calls this
        method again after it has dropped groups."""
        raise NotImplementedError
