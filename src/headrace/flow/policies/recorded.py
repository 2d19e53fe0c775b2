"""The policy of a replay. It decides nothing: each group starts at the version at which it started in the recorded run,
and each step takes the groups that it took."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from headrace.flow.policies.base import STALE, Selection, StalenessPolicy
from headrace.flow.state import FlowState


class RecordedPolicy(StalenessPolicy):
    """A policy that repeats the decisions of another run. A run file cannot select it.

    >>> from headrace.flow.state import FlowLimits
    >>> policy = RecordedPolicy(starts=(0, 0, 1), steps={0: (1,)}, dropped_stale=False, masked_stale=False)
    >>> policy.admit(FlowState(limits=FlowLimits(batch_size=1, max_age=0)))
    2
    """

    starts: tuple[int, ...]
    """The version that must be committed before each group starts, by group number, ascending."""
    steps: Mapping[int, tuple[int, ...]]
    """The groups that each step took, in order."""
    dropped_stale: bool
    """Whether groups that had become too old were dropped."""
    masked_stale: bool
    """Whether tokens that had become too old carried no loss."""
    recorded: ClassVar[bool] = True

    @property
    def drops_stale(self) -> bool:
        return self.dropped_stale

    @property
    def masks_stale(self) -> bool:
        return self.masked_stale

    def admit(self, state: FlowState) -> int:
        return max(0, bisect_right(self.starts, state.version) - state.num_submitted)

    def leave(self, state: FlowState) -> Mapping[int, str]:
        if not self.dropped_stale:
            return {}
        return dict.fromkeys(state.ready - self._trained, STALE)

    @cached_property
    def _trained(self) -> frozenset[int]:
        return frozenset(number for groups in self.steps.values() for number in groups)

    def select(self, state: FlowState) -> Selection:
        """Choose the groups that the recorded run trained in this step, once all of them are ready."""
        take = self.steps.get(state.next_step, ())
        if not state.ready.issuperset(take):
            return Selection()
        oldest = state.next_step - state.limits.max_age if self.masked_stale else None
        return Selection(take=take, oldest_version=oldest)
