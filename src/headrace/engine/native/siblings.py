"""The sharing of prompts among siblings: sequences that begin with the same tokens and could join the batch in the same
step. One of them, the *leader*, computes the common tokens; the other siblings, its *followers*, wait for one step and
then share the leader's cache blocks.

Full blocks are shared as soon as they are scheduled (:mod:`headrace.engine.native.blocks`). A partly filled last block
has to be copied for each sequence, and can be copied only after it is computed. A follower that has waited for one step
computes only its last token. In a model with recurrent layers, siblings wait until there is a snapshot of the state at
the last block border of their prompt.
"""

from __future__ import annotations

from headrace.engine.native.sequence import Sequence
from headrace.models.paged.base import BLOCK

WORTH_WAITING = 4
"""The least number of tokens of the last block that a follower must save, so that it waits for a step."""

_Context = tuple[bool, int, bytes]


class Siblings:
    """The leaders among the sequences that one step computes, and the count of their followers. The scheduler creates
    this record for each step. ``by_snapshot`` means that the model has recurrent layers, so that followers need a
    snapshot of the leader's state."""

    def __init__(self, *, by_snapshot: bool = False) -> None:
        """Create the record of a step without leaders and followers. The argument is described at the class."""
        self._by_snapshot = by_snapshot
        self._leaders: dict[_Context, Sequence] = {}
        """The leaders by the context that their followers share with them."""
        self.num_waiting = 0
        """The number of sequences that wait for a leader. Each needs a row in the next step."""

    def lead(self, sequence: Sequence, end: int) -> None:
        """Record that the step computes the first ``end`` tokens of ``sequence``. It becomes a leader if its siblings
        save work by waiting for one step."""
        size = len(sequence.given_ids_T)
        is_leader = end == size and (size - 1) % BLOCK >= WORTH_WAITING
        if self._by_snapshot:
            is_leader = sequence.answer is None and end <= find_last_border(size)
        if is_leader:
            self._leaders[_context(sequence)] = sequence

    def follow(self, sequence: Sequence) -> bool:
        """Return whether ``sequence`` should wait for one step for a leader with the same tokens; the leader becomes
        its parent. Forks, sequences with sampled tokens, and sequences that have waited for another leader do not
        wait."""
        has_tokens = sequence.answer is not None or sequence.parent_ids_T is not None
        leader = None if has_tokens or not self._leaders else self._leaders.get(_context(sequence))
        if leader is None or sequence.parent not in (None, leader):
            return False
        sequence.parent = leader
        self.num_waiting += 1
        return True


def find_last_border(size: int) -> int:
    """Return the number of tokens before the last block border within ``size`` tokens. At least one token remains after
    it, which has to be computed.

    >>> find_last_border(16), find_last_border(17)
    (0, 16)
    """
    return (size - 1) // BLOCK * BLOCK


def _context(sequence: Sequence) -> _Context:
    """Return a key that is equal for siblings: whether the request pins its weights, the salt (adapter and routing),
    and the ids of the given tokens."""
    return sequence.request.pinned, sequence.salt, sequence.given_ids_T.tobytes()
