"""Batches that are generated whole, one after the other: what ``synchronous`` and ``one_ahead`` share."""

from __future__ import annotations

from headrace.flow.policies.base import Selection
from headrace.flow.policies.deadlines import earliest
from headrace.flow.state import FlowState


def admit_whole_batch(state: FlowState, *, ahead: int) -> int:
    """What the next batch lacks, once the engines' weights are at most ``ahead`` steps behind it.

    Every group that starts is in the batch of step k = ``free_step`` and gets tokens of version v ≥ k − ``ahead`` only:
    none is trained at an age above ``ahead``.
    """
    if state.free_step > state.version + ahead:
        return 0
    return max(0, min(state.limits.batch_size - (state.num_open - state.num_waiting), state.room))


def select_whole_batch(state: FlowState) -> Selection:
    """The batch, once all of its groups are ready."""
    chosen = state.replayed or earliest(state) or ()
    return Selection(take=tuple(sorted(chosen)))
