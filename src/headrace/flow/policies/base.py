"""The contract of a staleness policy: its settings, and pure functions of the state of the flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.base.config import Section
from headrace.flow.state import FlowState

STALE = "stale"
"""The reason that is counted when a group is dropped, or a token carries no loss, because it would be older than the
bound."""
DISPLACED = "displaced"
"""The reason that is counted when a group is dropped because newer ones take its place in a full buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The groups that the next step trains, and the groups that are dropped before it."""

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
    """Settings of the flow that follow from the policy and cannot have another value."""
    paced: ClassVar[bool] = True
    """Whether ``flow.lead`` cannot be more than ``flow.max_age``, because the policy never lets generation run so far
    ahead."""

    recorded: ClassVar[bool] = False
    """Whether the policy repeats the decisions of another run, whatever this run needs."""

    @property
    def in_order(self) -> bool:
        """Whether groups are always trained in the order in which they start, so that none takes another's place."""
        return False

    @property
    def drops_stale(self) -> bool:
        """Return whether the policy drops groups that have become too old."""
        return False

    @property
    def masks_stale(self) -> bool:
        """Return whether tokens that are too old carry no loss, while their group is trained."""
        return False

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if the settings of the policy do not fit these settings of
        the flow."""

    def admit(self, state: FlowState) -> int:
        """Return how many groups may start now."""
        raise NotImplementedError

    def leave(self, state: FlowState) -> Mapping[int, str]:
        """Return the groups to drop now, each with the reason. It is called whenever a group has become ready."""
        return {}

    def select(self, state: FlowState) -> Selection:
        """Return the groups of the next batch, if there is one now, and the groups to drop before it."""
        raise NotImplementedError
