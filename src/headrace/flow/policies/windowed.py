"""Pacing with a window: only groups near the oldest one that is still untrained may overtake it.

Let a be the lowest number of a group that is in no batch, and W = ``window``·B. A batch is made of ready groups with
numbers below a + W, those that are due first; where these are too few, of the first B groups once all are ready. So
fewer than W groups are ever trained before a straggler that started earlier, and the groups of one batch were admitted
close to each other: ``window = 1`` trains in order, a wide window is ``bounded``.

What is admitted, and how old a token may become, is as with ``bounded``. Where a group beyond the window would miss its
bound (tokens kept over a crash can make it so), the bound goes first.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.group import GroupState
from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.bounded import paced_admission
from headrace.flow.policies.deadlines import earliest_in_time, in_order, last_step, rest_in_time
from headrace.flow.state import FlowState


class Windowed(StalenessPolicy):
    """Look-ahead anchored at the oldest group that is still untrained."""

    kind: Literal["windowed"] = "windowed"
    window: int = Field(default=1, ge=1)
    """Batches from the oldest untrained group on among which a batch is chosen; 1 trains in the order of admission."""
    fixes: ClassVar = {"order": "ready_first"}

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        if self.window > max_age + lead + 1:
            raise ConfigError(
                f"flow.policy.window={self.window} never acts: with flow.max_age={max_age} and flow.lead={lead} no two "
                f"groups that wait are further apart than {max_age + lead + 1} batches",
                remedy=f"set flow.policy.window <= {max_age + lead + 1}, or flow.policy = 'bounded'",
            )

    def admit(self, state: FlowState) -> int:
        return paced_admission(state)

    def select(self, state: FlowState) -> Selection:
        if state.replayed:
            return Selection(take=state.replayed)
        if len(state.ready) < state.limits.batch_size:
            return Selection()
        chosen = self._inside(state) or in_order(state)
        if not rest_in_time(state, chosen) if chosen else self._held_up(state):
            chosen = earliest_in_time(state)
        return Selection(take=tuple(sorted(chosen or ())))

    def _held_up(self, state: FlowState) -> bool:
        """Whether the oldest group has not even started: after a crash others may stand in its way."""
        return any(state.groups[number].state is GroupState.SUBMITTED for number in state.first_open(1))

    def _inside(self, state: FlowState) -> tuple[int, ...] | None:
        (anchor,) = state.first_open(1) or (state.num_submitted,)
        window = range(anchor, anchor + self.window * state.limits.batch_size)
        inside = [number for number in window if number in state.ready and state.groups[number].step is None]
        first = sorted(inside, key=lambda number: last_step(state, number))[: state.limits.batch_size]
        return tuple(first) if len(first) == state.limits.batch_size else None
