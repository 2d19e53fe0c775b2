"""The default staleness policy ``bounded``: a group starts only if it can be trained within the bound, so no group
needs to be dropped because of its age.

Let B be the number of groups per step, v the committed version (v steps are trained and their weights are in use), and
k the next step that takes a batch. A group occupies a slot from its admission until the weights of the step that
trained it are committed. So v·B groups have left their slots, and all other admitted groups occupy one. Admission
ensures

    held slots ≤ (lead + 1)·B        equivalently  admitted ≤ (lead + v + 1)·B        (AReaL, arXiv 2505.24298, eq. 3)

The *deadline* of a group admitted at version v is step v + max_age: no later step may train it. (k − v)·B of the groups
with slots are in a batch already, so at most (lead + 1)·B − (k − v)·B are not, and with lead ≤ max_age

    groups in no batch  ≤  (v + max_age − k + 1)·B

No deadline ever becomes earlier, so all groups can be trained in time, the earliest deadline first
(:mod:`~headrace.flow.policies.deadlines`). A batch may be formed of groups that are ready, overtaking others, as long
as the other groups can still be trained in time. Otherwise the batch waits for the group that is due. Together, these
two rules keep the bound for every group. Raising the bound during a run only makes deadlines later. Lowering it changes
the deadlines of later versions only, and admission checks the inequality above for these.

After a crash, v and k return to the values of the checkpoint, while interrupted groups may keep tokens and therefore
their deadlines. These groups start first, even if there are not enough slots (the lead may be smaller than before);
other groups start with them as far as all can still be trained in time.
"""

from __future__ import annotations

from typing import Literal

from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.deadlines import (
    num_admissible,
    num_admissible_in_order,
    select_earliest_in_time,
    select_in_order,
)
from headrace.flow.state import FlowState


def paced_admission(state: FlowState) -> int:
    """Return how many groups may start now so that every group can be trained within its bound: the number of free
    slots, limited by the capacity. Groups that a crash interrupted may start even without a free slot, as far as all
    groups can still be trained in time."""
    limits = state.limits
    free = (min(limits.run_ahead, limits.max_age) + 1) * limits.batch_size - state.num_held
    if state.num_waiting:
        in_time = num_admissible_in_order(state) if limits.strict else num_admissible(state)
        free = min(max(free, state.num_waiting), in_time)
    return max(0, min(free, state.free_capacity))


class Bounded(StalenessPolicy):
    """The default policy: it starts a group only if it can be trained within the bound, and trains the groups with the
    earliest deadlines first. With ``flow.max_age = 0`` it is synchronous."""

    kind: Literal["bounded"] = "bounded"

    def admit(self, state: FlowState) -> int:
        """Return how many groups may start now so that all can be trained within the bound."""
        return paced_admission(state)

    def select(self, state: FlowState) -> Selection:
        """Return the next batch; empty if it is not complete yet. In strict order, it consists of the groups with the
        lowest numbers; otherwise of the ready groups with the earliest deadlines, provided that all other groups can
        still be trained in time."""
        if state.replayed:
            return Selection(take=state.replayed)
        chosen = select_in_order(state) if state.limits.strict else select_earliest_in_time(state)
        return Selection(take=tuple(sorted(chosen or ())))
