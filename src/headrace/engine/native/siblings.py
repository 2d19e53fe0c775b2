"""Who begins with the same tokens as another does in this very step.

Full blocks are shared as soon as they are scheduled (:mod:`headrace.engine.native.blocks`). The last one, filled in
part, becomes each sequence's own, and can be copied only when it is computed: a sibling that waits for one step has
but its last token to compute.
"""

from __future__ import annotations

from headrace.engine.native.sequence import Sequence
from headrace.models.paged.base import BLOCK

WORTH_WAITING = 4
"""Tokens of the last block: as many must be spared for a sequence to wait for a step."""

_Context = tuple[bool, int, bytes]


class Siblings:
    """Of one step."""

    def __init__(self) -> None:
        self._leaders: dict[_Context, Sequence] = {}
        self.num_waiting = 0
        """Those who wait for a leader, and need a row each in the next step."""

    def lead(self, sequence: Sequence, end: int) -> None:
        """The step computes the first ``end`` tokens of ``sequence``: if it was given no more, siblings wait for it."""
        size = len(sequence.given_ids_T)
        if end == size and (size - 1) % BLOCK >= WORTH_WAITING:
            self._leaders[_context(sequence)] = sequence

    def follow(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` waits for a leader, its parent from now on. A fork does not, nor does one that has
        waited so, or has begun."""
        begun = sequence.answer is not None or sequence.parent is not None or sequence.lineage_T is not None
        leader = None if begun or not self._leaders else self._leaders.get(_context(sequence))
        if leader is None:
            return False
        sequence.parent = leader
        self.num_waiting += 1
        return True


def _context(sequence: Sequence) -> _Context:
    """What a sequence computes first, and whether it keeps the weights that it does so with."""
    return sequence.request.pinned, sequence.salt, sequence.given_ids_T.tobytes()
