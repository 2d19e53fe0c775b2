"""The policy ``windowed``: only groups whose numbers are close to the oldest untrained group may be trained before it.

Let a be the lowest number of a group that is in no batch, and W = ``window``·B. A batch is made of ready groups with
numbers below a + W, earliest deadline first. If these are too few, it is made of the first B groups once all are ready.
So fewer than W groups are trained before a slow group that started earlier, and the groups of one batch were admitted
at similar times. ``window = 1`` trains in order, and a wide window is equal to ``bounded``.

Admission and the age of tokens are the same as with ``bounded``. Where a group outside the window would miss its bound
(tokens kept over a crash can cause that), the bound takes precedence over the window.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.group import GroupState
from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.bounded import paced_admission
from headrace.flow.policies.deadlines import get_deadline, is_rest_in_time, select_earliest_in_time, select_in_order
from headrace.flow.state import FlowState


class Windowed(StalenessPolicy):
    """A policy that trains only groups whose numbers are within a window that begins at the oldest untrained group, so
    that few groups overtake a slow one."""

    kind: Literal["windowed"] = "windowed"
    window: int = Field(default=1, ge=1)
    """Size of the window, in batches from the oldest untrained group on; 1 trains in the order of admission."""
    fixes: ClassVar = {"order": "ready_first"}
    """The settings of the flow that follow from the policy and cannot have another value."""

    @property
    def in_order(self) -> bool:
        """Return whether groups are always trained in the order in which they start: with a window of one batch."""
        return self.window == 1

    def refuse(self, *, max_age: int, lead: int, strict: bool) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` for a window that is so wide that it has no effect, given
        the staleness bound ``max_age`` and the ``lead`` in batches. ``strict`` is not used."""
        if self.window > max_age + lead + 1:
            raise ConfigError(
                f"flow.policy.window={self.window} never acts: with flow.max_age={max_age} and flow.lead={lead} no two "
                f"groups that wait are further apart than {max_age + lead + 1} batches",
                remedy=f"set flow.policy.window <= {max_age + lead + 1}, or flow.policy = 'bounded'",
            )

    def admit(self, state: FlowState) -> int:
        """Return how many groups may start now so that all can be trained within the bound."""
        return paced_admission(state)

    def select(self, state: FlowState) -> Selection:
        """Return the groups of the next batch: the ready groups within the window that have the earliest deadlines or,
        if there are too few of these, the groups with the lowest numbers once all of them are ready. If another group
        would then miss its deadline, return the ready groups with the earliest deadlines instead, whatever the
        window."""
        if state.replayed:
            return Selection(take=state.replayed)
        if len(state.ready) < state.limits.batch_size:
            return Selection()
        chosen = self._earliest_in_window(state) or select_in_order(state)
        if not is_rest_in_time(state, chosen) if chosen else self._is_oldest_waiting(state):
            chosen = select_earliest_in_time(state)
        return Selection(take=tuple(sorted(chosen or ())))

    def _is_oldest_waiting(self, state: FlowState) -> bool:
        """Return whether the group with the lowest number that is in no batch has not started yet. This can happen
        after a crash, when other groups start before it."""
        return any(state.groups[number].state is GroupState.SUBMITTED for number in state.first_open(1))

    def _earliest_in_window(self, state: FlowState) -> tuple[int, ...] | None:
        """Return the numbers of the ready groups in the window with the earliest deadlines, exactly one batch; ``None``
        if there are too few."""
        (anchor,) = state.first_open(1) or (state.num_submitted,)
        window = range(anchor, anchor + self.window * state.limits.batch_size)
        in_window = [number for number in window if number in state.ready and state.groups[number].step is None]
        first = sorted(in_window, key=lambda number: get_deadline(state, number))[: state.limits.batch_size]
        return tuple(first) if len(first) == state.limits.batch_size else None
