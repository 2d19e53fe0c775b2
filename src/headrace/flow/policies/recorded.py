"""What a replay does in place of deciding: each group starts when the recorded run had the weights that it started
under, and each step takes the groups that it took."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from headrace.flow.policies.base import STALE, Selection, StalenessPolicy
from headrace.flow.state import FlowState


class RecordedPolicy(StalenessPolicy):
    """The decisions of another run. No run file can ask for it.

    >>> from headrace.flow.state import FlowLimits
    >>> policy = RecordedPolicy(starts=(0, 0, 1), steps={0: (1,)}, dropped_stale=False, masked_stale=False)
    >>> policy.admit(FlowState(limits=FlowLimits(batch_size=1, max_age=0)))
    2
    """

    starts: tuple[int, ...]
    """By number of the group, never falling: the version that must be committed when it starts."""
    steps: Mapping[int, tuple[int, ...]]
    """The groups of every step, in order."""
    dropped_stale: bool
    """Whether groups that had become too old left."""
    masked_stale: bool
    """Whether tokens that had become too old lost their loss."""
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
        take = self.steps.get(state.next_step, ())
        if not state.ready.issuperset(take):
            return Selection()
        oldest = state.next_step - state.limits.max_age if self.masked_stale else None
        return Selection(take=take, oldest_version=oldest)
