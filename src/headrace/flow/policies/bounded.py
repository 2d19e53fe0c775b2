"""Pacing: a group starts only if it can be trained within the bound, so nothing needs to be thrown away.

Let B be the groups per step, v the committed version (v steps are trained and in use), k the next step to take a
batch. A slot is charged when a group is admitted and freed when the weights it helped to make are committed, so v·B
groups have left and the slots hold the rest. Admission keeps

    held slots ≤ (lead + 1)·B        equivalently  admitted ≤ (lead + v + 1)·B        (AReaL, arXiv 2505.24298, eq. 3)

A group admitted at version v must be trained at step v + max_age or before: its *deadline*. At most (lead + 1)·B groups
stand before the end of the queue and (k − v)·B of them are taken already, so in order of admission each is trained by
step v + lead ≤ its deadline. Training what is ready first may overtake; it is allowed while the rest stay feasible:

    for every later step j:   groups left with a deadline ≤ j  ≤  (j − k)·B

Otherwise the batch waits for the group that is due. Both together keep the bound for every group by construction.

After a crash v and k are those of the checkpoint again, while groups that were interrupted may keep tokens and with
them their deadlines. They start first, and others only where the same condition stays true.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from headrace.flow.policies.base import Selection
from headrace.flow.state import FlowState
from headrace.types.group import GroupState


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """Paced admission, earliest deadline first. With ``max_age=0`` it is the synchronous policy."""

    batch_size: int
    max_age: int
    lead: int
    capacity: int | None = None
    """Most groups being generated or scored at once; ``None``: no limit but the lead."""
    strict: bool = False
    """Train in the order of admission."""

    def admit(self, state: FlowState) -> int:
        paced = (self.lead + 1) * self.batch_size - state.num_held
        if self.capacity is not None:
            paced = min(paced, self.capacity - state.num_running)
        if state.counts[GroupState.SUBMITTED]:
            paced = min(paced, self._room_after_crash(state))
        return max(0, paced)

    def _room_after_crash(self, state: FlowState) -> int:
        """How many may start so that the groups that kept tokens over a crash, and with them their deadlines, meet
        them: they themselves may, and of the others as many as the steps up to *their* deadline have room for."""
        latest = state.version + self.max_age
        due = sum(self._deadline(state, number) <= latest for number in state.untaken())
        aged = sum(state.is_aged(number) for number in state.waiting())
        return aged + max(0, (latest + 1 - state.next_step) * self.batch_size - due)

    def select(self, state: FlowState) -> Selection | None:
        replayed = state.planned(state.next_step)
        if replayed:
            return Selection(take=tuple(replayed))
        chosen = self._in_order(state) if self.strict else self._earliest_deadline(state)
        return None if chosen is None else Selection(take=tuple(sorted(chosen)))

    def _in_order(self, state: FlowState) -> list[int] | None:
        first = sorted(state.untaken())[: self.batch_size]
        complete = len(first) == self.batch_size and all(number in state.ready for number in first)
        return first if complete else None

    def _earliest_deadline(self, state: FlowState) -> list[int] | None:
        if len(state.ready) < self.batch_size:
            return None
        chosen = sorted(state.ready, key=lambda number: (self._deadline(state, number), state.ready[number]))
        chosen = chosen[: self.batch_size]
        return chosen if self._rest_is_feasible(state, set(chosen)) else None

    def _rest_is_feasible(self, state: FlowState, chosen: set[int]) -> bool:
        left = Counter(self._deadline(state, number) for number in state.untaken() if number not in chosen)
        due = 0
        for deadline in sorted(left):
            due += left[deadline]
            if due > (deadline - state.next_step) * self.batch_size:
                return False
        return True

    def _deadline(self, state: FlowState, number: int) -> float:
        """The last step that may train the group; none for one that has no token yet and was not admitted."""
        planned = state.groups[number].step
        if planned is not None:
            return planned
        oldest = state.oldest_version(number)
        return math.inf if oldest is None else oldest + self.max_age
