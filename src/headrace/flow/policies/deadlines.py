"""Which groups are due when, and whether all of them can be trained in time.

Let k be the next step and B the groups per step. A group is due at the last step that may train its oldest token. All
can be trained in time, the earliest deadline first, if and only if (Liu and Layland 1973; here all are ready at once)

    for every step j ≥ k:   groups due by j  ≤  (j − k + 1)·B

Groups of replayed steps are due at their step.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from headrace.base.types.group import GroupState
from headrace.flow.state import FlowState


def due(state: FlowState) -> Counter[int]:
    """How many groups that are in no batch are due at each step."""
    steps: Counter[int] = Counter()
    for version, count in state.aging.items():
        steps[state.deadline(version)] += count
    for step, numbers in state.plan.items():
        steps[step] += len(numbers)
    return steps


def room_for_new(state: FlowState) -> int:
    """How many groups may be admitted now so that they and all others can be trained in time.

    Those that kept tokens over a crash, and with them their deadlines, are counted already: they themselves may start.
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


def room_in_order(state: FlowState) -> int:
    """The same where groups are trained in the order of their numbers: those may start whose turn comes in time."""
    in_time = (state.deadline(state.version) + 1 - state.free_step) * state.limits.batch_size
    if in_time <= 0:
        return 0
    first = state.first_open(in_time)
    waiting = sum(state.groups[number].state is GroupState.SUBMITTED for number in first)
    return waiting + in_time - len(first)


def last_step(state: FlowState, number: int) -> int:
    """The last step that may train a ready group."""
    oldest = state.groups[number].oldest_version
    assert oldest is not None
    return state.deadline(oldest)


def earliest(state: FlowState) -> tuple[int, ...] | None:
    """The batch of those ready groups that are due first; ``None`` if there are not enough."""
    if len(state.ready) < state.limits.batch_size:
        return None
    in_order = (
        number
        for version in sorted(state.ready_from, key=lambda version: (state.deadline(version), version))
        for number in state.ready_from[version]
    )
    chosen = tuple(islice(in_order, state.limits.batch_size))
    return chosen if len(chosen) == state.limits.batch_size else None


def earliest_in_time(state: FlowState) -> tuple[int, ...] | None:
    """The same, if all other groups can then be trained in time; decided by counts alone, and looked up afterwards."""
    steps, left = due(state), state.limits.batch_size
    if len(state.ready) < left:
        return None
    for version in sorted(state.ready_from, key=lambda version: (state.deadline(version), version)):
        taken = min(left, len(state.ready_from[version]))
        steps[state.deadline(version)] -= taken
        left -= taken
    return earliest(state) if left == 0 and _in_time(state, steps) else None


def in_order(state: FlowState) -> tuple[int, ...] | None:
    """The batch of the groups that were submitted first; ``None`` until all of them are ready."""
    if len(state.ready) < state.limits.batch_size:
        return None
    first = state.first_open(state.limits.batch_size, ready=True)
    return tuple(first) if len(first) == state.limits.batch_size else None


def rest_in_time(state: FlowState, chosen: tuple[int, ...]) -> bool:
    """Whether all other groups can be trained in time once ``chosen`` make the next batch."""
    steps = due(state)
    for number in chosen:
        steps[last_step(state, number)] -= 1
    return _in_time(state, steps)


def _in_time(state: FlowState, steps: Counter[int]) -> bool:
    """Whether what is due at each of ``steps`` can be trained from the step after the next on."""
    total = 0
    for step in sorted(steps):
        total += steps[step]
        if steps[step] and total > (step - state.next_step) * state.limits.batch_size:
            return False
    return True


def age_needed(state: FlowState, *, only_planned: bool) -> int:
    """The age at which the oldest kept token will be trained: those of replayed steps then, the others right after, in
    strict order or the oldest first, unless what is too old is dropped anyway (``only_planned``)."""
    planned = [(e.step, e.oldest_version) for e in state.groups.values() if e.step is not None]
    rest = [(n, e.oldest_version) for n, e in state.groups.items() if e.step is None]
    in_turn = [oldest for _, oldest in sorted(rest)]
    if not state.limits.strict:
        in_turn = [*sorted(oldest for oldest in in_turn if oldest is not None)]
    turns = [(state.free_step + index // state.limits.batch_size, oldest) for index, oldest in enumerate(in_turn)]
    kept = planned if only_planned else [*planned, *turns]
    return max((step - oldest for step, oldest in kept if oldest is not None), default=0)
