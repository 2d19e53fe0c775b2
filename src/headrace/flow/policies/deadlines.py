"""Functions that compute the deadlines of groups, and whether all groups can be trained in time. Staleness policies use
them.

Let k be the next step and B the number of groups per step. The deadline of a group is the last step that may train its
oldest token. All groups can be trained in time, the earliest deadline first, if and only if (Liu and Layland 1973, for
the case that all groups are ready)

    for every step j ≥ k:   groups due by j  ≤  (j − k + 1)·B

A replayed step took its groups before a crash and takes the same groups again. The deadline of these groups is the
replayed step.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from headrace.base.types.group import GroupState
from headrace.flow.state import FlowState


def count_by_deadline(state: FlowState) -> Counter[int]:
    """Return the number of groups that are in no batch yet, by their deadline. The deadline of a group of a replayed
    step is that step."""
    steps: Counter[int] = Counter()
    for version, count in state.open_by_oldest.items():
        steps[state.deadline(version)] += count
    for step, numbers in state.plan.items():
        steps[step] += len(numbers)
    return steps


def num_admissible(state: FlowState) -> int:
    """Return how many groups may be admitted now so that these and all other groups can be trained in time.

    Interrupted groups that kept tokens are already counted at the deadlines of these tokens. So interrupted groups
    whose tokens are at least as old as new tokens would be may all start.
    """
    latest = state.deadline(state.version)
    total, room = 0, None
    steps = count_by_deadline(state)
    for step in sorted({*steps, latest}):
        total += steps[step]
        # a group that starts now is due at `latest`, so it needs room at this deadline and all later ones
        if step >= latest:
            num_free = (step - state.next_step + 1) * state.limits.batch_size - total
            room = num_free if room is None else min(room, num_free)
    assert room is not None
    return state.num_waiting_aged + max(0, room)


def num_admissible_in_order(state: FlowState) -> int:
    """Return how many groups may be admitted now if groups are trained in the order of their numbers. A group may be
    admitted if its step in this order is not after the deadline of a group that starts now."""
    num_places = (state.deadline(state.version) + 1 - state.free_step) * state.limits.batch_size
    if num_places <= 0:
        return 0
    first = state.first_open(num_places)
    waiting = sum(state.groups[number].state is GroupState.SUBMITTED for number in first)
    return waiting + num_places - len(first)


def get_deadline(state: FlowState, number: int) -> int:
    """Return the deadline of the ready group ``number``: the last step that may train it."""
    oldest = state.groups[number].oldest_version
    assert oldest is not None
    return state.deadline(oldest)


def select_earliest(state: FlowState) -> tuple[int, ...] | None:
    """Return the numbers of the ready groups with the earliest deadlines, exactly one batch; ``None`` if there are not
    enough ready groups."""
    if len(state.ready) < state.limits.batch_size:
        return None
    in_order = (
        number
        for version in sorted(state.ready_by_oldest, key=lambda version: (state.deadline(version), version))
        for number in state.ready_by_oldest[version]
    )
    chosen = tuple(islice(in_order, state.limits.batch_size))
    return chosen if len(chosen) == state.limits.batch_size else None


def select_earliest_in_time(state: FlowState) -> tuple[int, ...] | None:
    """Return the batch of :func:`select_earliest` if all other groups can be trained in time after it, otherwise
    ``None``. The check uses counts, and the groups are looked up only if it succeeds."""
    steps, num_missing = count_by_deadline(state), state.limits.batch_size
    if len(state.ready) < num_missing:
        return None
    for version in sorted(state.ready_by_oldest, key=lambda version: (state.deadline(version), version)):
        num_taken = min(num_missing, len(state.ready_by_oldest[version]))
        steps[state.deadline(version)] -= num_taken
        num_missing -= num_taken
    return select_earliest(state) if num_missing == 0 and _in_time(state, steps) else None


def select_in_order(state: FlowState) -> tuple[int, ...] | None:
    """Return the lowest numbers of groups that are in no batch, exactly one batch; ``None`` until all of these groups
    are ready."""
    if len(state.ready) < state.limits.batch_size:
        return None
    first = state.first_open(state.limits.batch_size, ready=True)
    return tuple(first) if len(first) == state.limits.batch_size else None


def is_rest_in_time(state: FlowState, chosen: tuple[int, ...]) -> bool:
    """Return whether all other groups that are in no batch can be trained in time if the ready groups ``chosen`` are
    the next batch."""
    steps = count_by_deadline(state)
    for number in chosen:
        steps[get_deadline(state, number)] -= 1
    return _in_time(state, steps)


def _in_time(state: FlowState, steps: Counter[int]) -> bool:
    """Return whether all groups can be trained in time by the steps after the next step. ``steps`` is the number of
    groups by their deadline, without the groups of the next step's batch."""
    total = 0
    for step in sorted(steps):
        total += steps[step]
        if steps[step] and total > (step - state.next_step) * state.limits.batch_size:
            return False
    return True


def compute_needed_age(state: FlowState, *, only_planned: bool) -> int:
    """Return the largest age, in versions, that a recorded token will have when it is trained. It is compared with the
    bound after a crash. Groups of replayed steps are trained at their steps. The remaining groups follow, by number in
    strict order and otherwise the oldest first. With ``only_planned``, only groups of replayed steps are considered,
    for policies that drop groups that are too old."""
    planned = [(e.step, e.oldest_version) for e in state.groups.values() if e.step is not None]
    rest = [(n, e.oldest_version) for n, e in state.groups.items() if e.step is None]
    in_turn = [oldest for _, oldest in sorted(rest)]
    if not state.limits.strict:
        in_turn = [*sorted(oldest for oldest in in_turn if oldest is not None)]
    turns = [(state.free_step + index // state.limits.batch_size, oldest) for index, oldest in enumerate(in_turn)]
    all_turns = planned if only_planned else [*planned, *turns]
    return max((step - oldest for step, oldest in all_turns if oldest is not None), default=0)
