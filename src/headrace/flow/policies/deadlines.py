"""The deadlines of groups, and whether all groups can be trained in time.

Let k be the next step and B the groups per step. The deadline of a group is the last step that may train its oldest
token. All groups can be trained in time, the earliest deadline first, if and only if (Liu and Layland 1973; here all
groups are ready at once)

    for every step j ≥ k:   groups due by j  ≤  (j − k + 1)·B

A replayed step is one that took its groups before a crash, and takes the same groups again. The deadline of such a
group is that step.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from headrace.base.types.group import GroupState
from headrace.flow.state import FlowState


def due(state: FlowState) -> Counter[int]:
    """Return the number of groups that no batch has taken yet, by their deadline. A group of a replayed step is due at
    that step."""
    steps: Counter[int] = Counter()
    for version, count in state.open_by_oldest.items():
        steps[state.deadline(version)] += count
    for step, numbers in state.plan.items():
        steps[step] += len(numbers)
    return steps


def num_admissible(state: FlowState) -> int:
    """Return how many groups may be admitted now so that they and all others can be trained in time.

    Groups that kept tokens over a crash, and with them their deadlines, are counted among the others already. So those
    whose tokens are at least as old as new ones would be may all start.
    """
    latest = state.deadline(state.version)
    total, room = 0, None
    steps = due(state)
    for step in sorted({*steps, latest}):
        total += steps[step]
        if step >= latest:
            left = (step - state.next_step + 1) * state.limits.batch_size - total
            room = left if room is None else min(room, left)
    assert room is not None
    return state.num_waiting_aged + max(0, room)


def num_admissible_in_order(state: FlowState) -> int:
    """Return how many groups may be admitted now if groups are trained in the order of their numbers: those whose step
    in this order comes no later than the deadline of a group that starts now."""
    in_time = (state.deadline(state.version) + 1 - state.free_step) * state.limits.batch_size
    if in_time <= 0:
        return 0
    first = state.first_open(in_time)
    waiting = sum(state.groups[number].state is GroupState.SUBMITTED for number in first)
    return waiting + in_time - len(first)


def last_step(state: FlowState, number: int) -> int:
    """Return the deadline of the ready group ``number``: the last step that may train it."""
    oldest = state.groups[number].oldest_version
    assert oldest is not None
    return state.deadline(oldest)


def earliest(state: FlowState) -> tuple[int, ...] | None:
    """Return the numbers of the ready groups with the earliest deadlines, as many as a batch has; ``None`` if there are
    not enough ready groups."""
    if len(state.ready) < state.limits.batch_size:
        return None
    in_order = (
        number
        for version in sorted(state.ready_by_oldest, key=lambda version: (state.deadline(version), version))
        for number in state.ready_by_oldest[version]
    )
    chosen = tuple(islice(in_order, state.limits.batch_size))
    return chosen if len(chosen) == state.limits.batch_size else None


def earliest_in_time(state: FlowState) -> tuple[int, ...] | None:
    """Return the batch of :func:`earliest` if all other groups can still be trained in time after it, otherwise
    ``None``. Counts decide this; the groups themselves are looked up only afterwards."""
    steps, left = due(state), state.limits.batch_size
    if len(state.ready) < left:
        return None
    for version in sorted(state.ready_by_oldest, key=lambda version: (state.deadline(version), version)):
        taken = min(left, len(state.ready_by_oldest[version]))
        steps[state.deadline(version)] -= taken
        left -= taken
    return earliest(state) if left == 0 and _in_time(state, steps) else None


def in_order(state: FlowState) -> tuple[int, ...] | None:
    """Return the numbers of the groups with the lowest numbers that are in no batch, as many as a batch has; ``None``
    until all of these are ready."""
    if len(state.ready) < state.limits.batch_size:
        return None
    first = state.first_open(state.limits.batch_size, ready=True)
    return tuple(first) if len(first) == state.limits.batch_size else None


def rest_in_time(state: FlowState, chosen: tuple[int, ...]) -> bool:
    """Return whether all groups that are in no batch, except the ready groups ``chosen``, can be trained in time if
    ``chosen`` is the next batch."""
    steps = due(state)
    for number in chosen:
        steps[last_step(state, number)] -= 1
    return _in_time(state, steps)


def _in_time(state: FlowState, steps: Counter[int]) -> bool:
    """Return whether all groups can be trained in time, from the step after the next one on. ``steps`` is the number of
    groups by their deadline, without those of the next step's batch."""
    total = 0
    for step in sorted(steps):
        total += steps[step]
        if steps[step] and total > (step - state.next_step) * state.limits.batch_size:
            return False
    return True


def age_needed(state: FlowState, *, only_planned: bool) -> int:
    """Return the greatest age, in versions, that a kept token will have when it is trained, for the check of the bound
    after a crash. Groups of replayed steps are trained at their steps; the others follow, by number in strict order and
    otherwise oldest first. ``only_planned`` leaves these others out, for policies that drop groups that are too old."""
    planned = [(e.step, e.oldest_version) for e in state.groups.values() if e.step is not None]
    rest = [(n, e.oldest_version) for n, e in state.groups.items() if e.step is None]
    in_turn = [oldest for _, oldest in sorted(rest)]
    if not state.limits.strict:
        in_turn = [*sorted(oldest for oldest in in_turn if oldest is not None)]
    turns = [(state.free_step + index // state.limits.batch_size, oldest) for index, oldest in enumerate(in_turn)]
    kept = planned if only_planned else [*planned, *turns]
    return max((step - oldest for step, oldest in kept if oldest is not None), default=0)
