"""The tokens of running turns that the ledger does not have yet, and when to record them. A *part* of a turn is a chunk
of its tokens, as an engine sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeKey, TokenChunk
from headrace.flow.ledger.base import Stream


@dataclass(slots=True, kw_only=True)
class _Unrecorded:
    """The parts of one running turn that are not recorded yet, and their number of tokens."""

    parts: list[TokenChunk] = field(default_factory=list)
    num_tokens: int = 0


class RunningTurns:
    """A collector of the parts of running turns, which records the parts of a turn before a crash could lose too many
    of its tokens. All turns that are due in one pass of the event loop are recorded in one transaction. The flow owns
    it."""

    def __init__(self, record: Callable[[Stream], object], clock: Clock, *, most: int) -> None:
        """Record with ``record``. ``most`` is the greatest number of tokens of each turn that a crash may lose; 0
        records nothing before a turn ends."""
        self._record = record
        self._clock = clock
        self._most = most
        self._unrecorded: dict[EpisodeKey, dict[int, _Unrecorded]] = {}
        self._due: dict[tuple[EpisodeKey, int], None] = {}

    def add(self, part: TokenChunk) -> None:
        """Add a new part of a turn, and record the turn soon if too many of its tokens are unrecorded. A crash loses
        the collected tokens and about as many as the last part has, because the engine has sampled the next part
        already."""
        if not self._most:
            return
        turn = self._unrecorded.setdefault(part.key, {}).setdefault(part.turn, _Unrecorded())
        if part.lost:
            turn.parts.clear()
            turn.num_tokens = 0
        turn.parts.append(part)
        turn.num_tokens += len(part.tokens)
        if turn.num_tokens + len(part.tokens) > self._most or part.lost:
            if not self._due:
                asyncio.get_running_loop().call_soon(self._record_due)
            self._due[part.key, part.turn] = None

    def record(self, parts: Sequence[TokenChunk]) -> None:
        """Record parts that were collected in another process, which runs their episodes."""
        if parts:
            self._record(Stream(parts=tuple(parts), at_s=self._clock.wall()))

    def ended(self, key: EpisodeKey) -> None:
        """Forget the parts of the episode ``key``, which has ended and is recorded as a whole."""
        for turn in self._unrecorded.pop(key, {}):
            self._due.pop((key, turn), None)

    def record_all(self) -> None:
        """Record all parts that were collected, at the end of the run."""
        self._due = {(key, turn): None for key, turns in self._unrecorded.items() for turn in turns}
        self._record_due()

    def _record_due(self) -> None:
        """Record the unrecorded tokens of all turns that are due, as one operation."""
        due, self._due = self._due, {}
        turns = [self._unrecorded[key].pop(turn) for key, turn in due]
        parts = tuple(TokenChunk.joined(turn.parts) for turn in turns)
        self.record(parts)
