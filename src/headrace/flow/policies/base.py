"""The contract of a staleness policy: its settings, and pure functions of the state of the flow. A policy decides which
groups of episodes start, which make the next batch, and which are dropped because of their age, so that no token is
trained at an age above the bound (``flow.max_age``, in versions of the weights)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.base.config import Section
from headrace.flow.state import FlowState

STALE = "stale"
"""The reason under which groups that are dropped, and tokens that carry no loss, are counted if they would be older
than the bound."""
DISPLACED = "displaced"
"""The reason under which a group is counted that is dropped because newer ones take its place in a full buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The decision of a policy about the next step: the groups that it trains, and the groups that are dropped before
    it."""

    take: tuple[int, ...] = ()
    """Numbers of the groups to train, in the order in which they are laid out; empty if there is no batch yet."""
    leave: Mapping[int, str] = field(default_factory=dict)
    """Numbers of the groups to drop, each with the reason that is counted."""
    oldest_version: int | None = None
    """Tokens of older versions carry no loss; ``None``: every token carries loss."""


class StalenessPolicy(Section):
    """The base class of all staleness policies, which is also the section of their settings. It has no I/O, no clock
    and no memory: the same state gives the same decision."""

    fixes: ClassVar[Mapping[str, int | str | None]] = {}
    """Settings of the flow that follow from the policy and cannot have another value, by name."""
    paced: ClassVar[bool] = True
    """Whether the policy keeps generation within the versions that the bound allows, so that ``flow.lead`` cannot be
    more than ``flow.max_age`` and ``flow.pacing`` applies."""

    recorded: ClassVar[bool] = False
    """Whether the policy repeats the recorded decisions of another run, whatever this run needs."""

    @property
    def in_order(self) -> bool:
        """Return whether groups are always trained in the order in which they start, so that none takes another's
        place."""
        return False

    @property
    def drops_stale(self) -> bool:
        """Return whether the policy drops groups that have become too old to be trained within the bound."""
        return False

    @property
    def masks_stale(self) -> bool:
        """Return whether tokens that are too old carry no loss while the rest of their group is trained."""
        return False

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the settings of the policy do not fit the flow's:
        ``max_age`` is the staleness bound, ``lead`` the number of batches that generation may run ahead, and ``strict``
        says that groups are trained in order. The base class accepts everything."""

    def admit(self, state: FlowState) -> int:
        """Return how many groups may start now, given the state of all groups. Each policy implements this."""
        raise NotImplementedError

    def leave(self, state: FlowState) -> Mapping[int, str]:
        """Return the numbers of the groups to drop now, each with the reason that is counted. The flow calls it
        whenever a group has become ready."""
        return {}

    def select(self, state: FlowState) -> Selection:
        """Return the groups of the next batch, if there is one now, and the groups to drop before it. Each policy
        implements this; the flow calls it again after it has dropped groups."""
        raise NotImplementedError
