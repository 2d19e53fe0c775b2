"""The states of a group, the set of episodes that share a baseline.

SUBMITTED ─▶ ADMITTED ─▶ RUNNING ─▶ SCORED ─▶ READY ─▶ TAKEN(step) ─▶ TRAINED ─▶ RELEASED
    └────────────┴──────────┴──────────┴────────┴──────────┴──▶ DROPPED(reason)

after a crash   ADMITTED, RUNNING, SCORED ─▶ SUBMITTED   completed turns are kept, others are generated again
                TAKEN, TRAINED, RELEASED ─▶ READY        if the checkpoint is older than the group's step
"""

from __future__ import annotations

import enum


class GroupState(enum.StrEnum):
    """The state of a group. The slot of a group, the right to be in flight, is charged at ADMITTED and freed at
    RELEASED or DROPPED."""

    SUBMITTED = "submitted"
    """The group exists: it has a task and a number, and waits for admission."""
    ADMITTED = "admitted"
    """The group occupies a slot: no token of the group will exceed the staleness bound."""
    RUNNING = "running"
    """Its episodes are being generated and scored."""
    SCORED = "scored"
    """Every episode has a reward or a cause of failure."""
    READY = "ready"
    """Enough episodes of the group have a reward, so that it may be trained."""
    TAKEN = "taken"
    """The group is in the batch of a step."""
    TRAINED = "trained"
    """The optimizer has made its step on the group; the engines do not use the new weights yet."""
    RELEASED = "released"
    """The new weights, to which the group has contributed, are committed."""
    DROPPED = "dropped"
    """The group left the flow without being trained, for a counted reason."""

    @property
    def holds_slot(self) -> bool:
        """Return whether the group occupies a slot, and so counts against the capacity of the flow: it is admitted, and
        neither released nor dropped."""
        return self in _HOLDS_SLOT

    @property
    def in_flight(self) -> bool:
        """Return whether the group is neither trained nor dropped; a submitted group is in flight."""
        return self in _IN_FLIGHT

    def may_become(self, new: GroupState) -> bool:
        """Return whether a group may change from this state to ``new``: whether the picture at the top of the file has
        this arrow. Transitions after a crash are not included."""
        return new in _NEXT[self]


_S = GroupState
_HOLDS_SLOT = frozenset({_S.ADMITTED, _S.RUNNING, _S.SCORED, _S.READY, _S.TAKEN, _S.TRAINED})
_IN_FLIGHT = frozenset({_S.SUBMITTED, _S.ADMITTED, _S.RUNNING, _S.SCORED, _S.READY, _S.TAKEN})
_NEXT: dict[GroupState, frozenset[GroupState]] = {
    _S.SUBMITTED: frozenset({_S.ADMITTED, _S.DROPPED}),
    _S.ADMITTED: frozenset({_S.RUNNING, _S.DROPPED}),
    _S.RUNNING: frozenset({_S.SCORED, _S.DROPPED}),
    _S.SCORED: frozenset({_S.READY, _S.DROPPED}),
    _S.READY: frozenset({_S.TAKEN, _S.DROPPED}),
    _S.TAKEN: frozenset({_S.TRAINED, _S.DROPPED}),
    _S.TRAINED: frozenset({_S.RELEASED}),
    _S.RELEASED: frozenset(),
    _S.DROPPED: frozenset(),
}
