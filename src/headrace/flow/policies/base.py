"""What a staleness policy is: a pure function of the flow's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.flow.state import FlowState


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The next batch."""

    take: tuple[int, ...]
    """Numbers of the groups to train, in the order they are laid out."""


class StalenessPolicy(Protocol):
    """Decides admission and selection. No I/O, no clock, no memory of its own."""

    def admit(self, state: FlowState) -> int:
        """How many groups may start now."""
        ...

    def select(self, state: FlowState) -> Selection | None:
        """The groups that make the next batch; ``None``: wait."""
        ...
