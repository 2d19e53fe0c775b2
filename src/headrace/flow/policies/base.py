"""What a staleness policy is: its own settings, and pure functions of the flow's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.base.config import Section
from headrace.flow.state import FlowState

STALE = "stale"
"""Why a group leaves, or a token carries no loss: it would be older than the bound."""
DISPLACED = "displaced"
"""Why a group leaves: newer ones stand in a full buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the next step trains, and what leaves untrained before it."""

    take: tuple[int, ...] = ()
    """Numbers of the groups to train, in the order they are laid out; empty: not yet."""
    leave: Mapping[int, str] = field(default_factory=dict)
    """Numbers of the groups that leave untrained, with the reason that is counted."""
    oldest_version: int | None = None
    """Tokens of older versions carry no loss; ``None``: every token carries it."""


class StalenessPolicy(Section):
    """Decides what starts, what is trained next, and what leaves. No I/O, no clock, no memory of its own: the same
    state gives the same answer."""

    fixes: ClassVar[Mapping[str, int | str | None]] = {}
    """Settings of the flow that follow from the policy: nothing else can be set for them."""
    paced: ClassVar[bool] = True
    """Whether ``flow.lead`` beyond ``flow.max_age`` could never happen."""

    recorded: ClassVar[bool] = False
    """Whether it repeats what was decided in another run, whatever this one would need."""

    @property
    def drops_stale(self) -> bool:
        """Whether a group that has become too old leaves, rather than never becoming so."""
        return False

    @property
    def masks_stale(self) -> bool:
        """Whether tokens that are too old lose their loss, while their group is trained."""
        return False

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        """:class:`~headrace.base.errors.ConfigError` where its own settings do not fit these."""

    def admit(self, state: FlowState) -> int:
        """How many groups may start now."""
        raise NotImplementedError

    def leave(self, state: FlowState) -> Mapping[int, str]:
        """The groups that leave untrained now, with the reason: asked whenever a group has become ready."""
        return {}

    def select(self, state: FlowState) -> Selection:
        """The groups of the next batch, if there is one now, and those that leave before it."""
        raise NotImplementedError
