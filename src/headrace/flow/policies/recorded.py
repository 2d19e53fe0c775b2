"""The policy of a replay: a run that repeats another run from its record. Each group starts at the version at which it
started in the recorded run, and each step takes the groups that it took in the recorded run."""

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
    """The version that must be committed before each group starts: one number per group, in the order of the group
    numbers. The versions ascend."""
    steps: Mapping[int, tuple[int, ...]]
    """The numbers of the groups that each step took, in order, by step."""
    dropped_stale: bool
    """Whether the recorded run dropped groups that had become too old."""
    masked_stale: bool
    """Whether tokens that had become too old carried no loss in the recorded run."""
    recorded: ClassVar[bool] = True
    """This policy repeats recorded decisions."""

    @property
    def drops_stale(self) -> bool:
        """Return whether the recorded run dropped groups that had become too old."""
        return self.dropped_stale

    @property
    def masks_stale(self) -> bool:
        """Return whether tokens that had become too old carried no loss in the recorded run."""
        return self.masked_stale

    def admit(self, state: FlowState) -> int:
        """Return how many more groups may start: the number of groups that had started in the recorded run by the
        current committed version, minus the number of groups that this run has submitted."""
        return max(0, bisect_right(self.starts, state.version) - state.num_submitted)

    def leave(self, state: FlowState) -> Mapping[int, str]:
        """Return the numbers of the ready groups that no step of the recorded run trained, to be dropped as stale;
        empty if the recorded run dropped no stale groups."""
        if not self.dropped_stale:
            return {}
        return dict.fromkeys(state.ready - self._trained, STALE)

    @cached_property
    def _trained(self) -> frozenset[int]:
        """Return the numbers of all groups that a step of the recorded run trained."""
        return frozenset(number for groups in self.steps.values() for number in groups)

    def select(self, state: FlowState) -> Selection:
        """Return the groups that the recorded run trained in the next step; an empty selection until all of them are
        ready."""
        take = self.steps.get(state.next_step, ())
        if not state.ready.issuperset(take):
            return Selection()
        oldest = state.next_step - state.limits.max_age if self.masked_stale else None
        return Selection(take=take, oldest_version=oldest)
