"""Siblings: sequences that begin with the same tokens and could join the batch in the same step. One of them, the
*leader*, computes the common tokens; the others, its *followers*, wait for one step and share its cache blocks.

Full blocks are shared as soon as they are scheduled (:mod:`headrace.engine.native.blocks`). The last block, filled in
part, has to be a copy for each sequence, and can be copied only after it is computed. A sibling that waits for one step
then has only its last token to compute. In a model with recurrent layers, siblings wait until there is a snapshot of
the state at the last block border of their prompt.
"""

from __future__ import annotations

from headrace.engine.native.sequence import Sequence
from headrace.models.paged.base import BLOCK

WORTH_WAITING = 4
"""A sequence waits for a step only if at least this many tokens of its last block need not be computed then."""

_Context = tuple[bool, int, bytes]


class Siblings:
    """The leaders and followers among the sequences that join in one step. The scheduler makes one for each step.
    ``by_snapshot`` says that the model has recurrent layers, so that followers need a snapshot of the leader's
    state."""

    def __init__(self, *, by_snapshot: bool = False) -> None:
        self._by_snapshot = by_snapshot
        self._leaders: dict[_Context, Sequence] = {}
        self.num_waiting = 0
        """The sequences that wait for a leader. Each needs a row in the next step."""

    def lead(self, sequence: Sequence, end: int) -> None:
        """Record that the step computes the first ``end`` tokens of ``sequence``. If siblings that wait for one step
        save work by that, it becomes their leader."""
        size = len(sequence.given_ids_T)
        worth = end == size and (size - 1) % BLOCK >= WORTH_WAITING
        if self._by_snapshot:
            worth = sequence.answer is None and end <= last_border(size)
        if worth:
            self._leaders[_context(sequence)] = sequence

    def follow(self, sequence: Sequence) -> bool:
        """Return whether ``sequence`` should wait for one step for a leader with the same tokens, which becomes its
        parent. A fork does not wait, nor does a sequence that has begun or has waited for another leader."""
        begun = sequence.answer is not None or sequence.parent_ids_T is not None
        leader = None if begun or not self._leaders else self._leaders.get(_context(sequence))
        if leader is None or sequence.parent not in (None, leader):
            return False
        sequence.parent = leader
        self.num_waiting += 1
        return True


def last_border(size: int) -> int:
    """Return the number of tokens up to the last block border of ``size`` tokens that leaves one to compute.

    >>> last_border(16), last_border(17)
    (0, 16)
    """
    return (size - 1) // BLOCK * BLOCK


def _context(sequence: Sequence) -> _Context:
    """Return a key that is equal for siblings: whether the request pins its weights, the salt (adapter and routing),
    and the ids of the tokens that the sequence begins with."""
    return sequence.request.pinned, sequence.salt, sequence.given_ids_T.tobytes()
