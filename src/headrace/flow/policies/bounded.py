"""Pacing: a group starts only if it can be trained within the bound, so nothing needs to be thrown away.

Let B be the groups per step, v the committed version (v steps are trained and in use), k the next step to take a
batch. A slot is charged when a group is admitted and freed when the weights it helped to make are committed, so v·B
groups have left and the slots hold the rest. Admission keeps

    held slots ≤ (lead + 1)·B        equivalently  admitted ≤ (lead + v + 1)·B        (AReaL, arXiv 2505.24298, eq. 3)

A group admitted at version v must be trained at step v + max_age or before: its *deadline*. (k − v)·B of the held
groups are taken already, so at most (lead + 1)·B − (k − v)·B are not, and with lead ≤ max_age

    groups in no batch  ≤  (v + max_age − k + 1)·B

of which none is due before it was when it was admitted: all can be trained in time, the earliest deadline first
(:mod:`~headrace.flow.policies.deadlines`). Training what is ready first may overtake; it is allowed while the rest can
still be trained in time. Otherwise the batch waits for the group that is due. Both together keep the bound for every
group by construction. A bound that is raised only moves deadlines away; one that is lowered changes the v + max_age of
later versions only, for which the inequality above is asked again.

After a crash v and k are those of the checkpoint again, while groups that were interrupted may keep tokens and with
them their deadlines. They start first, whatever the slots (the lead may be less than it was), and others with them, as
far as all can still be trained in time.
"""

from __future__ import annotations

from typing import Literal

from headrace.flow.policies.base import Selection, StalenessPolicy
from headrace.flow.policies.deadlines import earliest_in_time, in_order, num_admissible, num_admissible_in_order
from headrace.flow.state import FlowState


def paced_admission(state: FlowState) -> int:
    """Return how many groups may start now so that every group can be trained within its bound: as many as slots are
    free, within the lead and the capacity. Groups that a crash interrupted may start beyond the slots, as far as all
    can still be trained in time."""
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
        """Return the next batch, or none yet. In strict order it is made of the groups with the lowest numbers;
        otherwise of the ready groups with the earliest deadlines, as long as every other group can still be trained in
        time."""
        if state.replayed:
            return Selection(take=state.replayed)
        chosen = in_order(state) if state.limits.strict else earliest_in_time(state)
        return Selection(take=tuple(sorted(chosen or ())))
