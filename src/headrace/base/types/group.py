"""The life of a group: the episodes that share a baseline.

SUBMITTED ─▶ ADMITTED ─▶ RUNNING ─▶ SCORED ─▶ READY ─▶ TAKEN(step) ─▶ TRAINED ─▶ RELEASED
    └────────────┴──────────┴──────────┴────────┴──────────┴──▶ DROPPED(reason)

after a crash   ADMITTED, RUNNING, SCORED ─▶ SUBMITTED   finished turns are kept, the rest is generated again
                TAKEN, TRAINED, RELEASED ─▶ READY        if the checkpoint is older than their step
"""

from __future__ import annotations

import enum


class GroupState(enum.StrEnum):
    """The state of a group. Its slot, the right to be in flight, is charged at ADMITTED and freed at RELEASED or
    DROPPED."""

    SUBMITTED = "submitted"
    """The group exists: it has a task and a number, and waits to be admitted."""
    ADMITTED = "admitted"
    """The group holds a slot: the staleness bound will hold for it."""
    RUNNING = "running"
    """Its episodes are being generated and scored."""
    SCORED = "scored"
    """Every episode has a reward or a cause of failure."""
    READY = "ready"
    """Enough of its episodes have a reward: it may be trained."""
    TAKEN = "taken"
    """The group is in the batch of a step."""
    TRAINED = "trained"
    """The optimizer has stepped on the group; the new weights are not in use yet."""
    RELEASED = "released"
    """The weights that the group helped to make are committed."""
    DROPPED = "dropped"
    """The group left the flow without being trained, for a counted reason."""

    @property
    def holds_slot(self) -> bool:
        """Return whether the group holds a slot and so counts against the capacity of the flow: it is admitted, and
        neither released nor dropped."""
        return self in _HOLDS_SLOT

    @property
    def in_flight(self) -> bool:
        """Return whether the group is neither trained nor dropped; a submitted group is in flight."""
        return self in _IN_FLIGHT

    def may_become(self, new: GroupState) -> bool:
        """Return whether a group may go from this state to ``new``: whether the picture at the top of the file has that
        arrow, those after a crash excluded."""
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
