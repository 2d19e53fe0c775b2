"""A collector of the tokens of running turns, which records them in the ledger often enough that a crash loses few of
them. A *part* of a turn is a chunk of its tokens, as an engine sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeKey, TokenChunk
from headrace.flow.ledger.base import Stream


@dataclass(slots=True, kw_only=True)
class _Unrecorded:
    """The parts of one running turn that are not recorded yet, and their total number of tokens."""

    parts: list[TokenChunk] = field(default_factory=list)
    num_tokens: int = 0


class RunningTurns:
    """A collector of the parts of running turns. It records the parts of a turn before a crash could lose more than a
    given number of its tokens. All turns that become due in one iteration of the event loop are recorded in one
    operation. The flow owns the collector."""

    def __init__(self, record: Callable[[Stream], object], clock: Clock, *, max_unrecorded: int) -> None:
        """Create an empty collector. ``record`` is the function that records an operation, and ``clock`` gives the time
        at which it was recorded. ``max_unrecorded`` is the largest number of tokens of each turn that a crash may lose;
        with 0, nothing is recorded before a turn ends."""
        self._record = record
        self._clock = clock
        self._max_unrecorded = max_unrecorded
        self._unrecorded: dict[EpisodeKey, dict[int, _Unrecorded]] = {}
        """The parts that are not recorded yet, by episode and turn."""
        self._due_turns: dict[tuple[EpisodeKey, int], None] = {}
        """The turns that are recorded in the next iteration of the event loop, in order."""

    def add(self, part: TokenChunk) -> None:
        """Add a new part of a turn. If too many of its tokens are unrecorded, record them in the next iteration of the
        event loop. A crash loses the collected tokens and about as many as the last part has, because the engine has
        already sampled the next part."""
        if not self._max_unrecorded:
            return
        turn = self._unrecorded.setdefault(part.key, {}).setdefault(part.turn, _Unrecorded())
        if part.lost:
            turn.parts.clear()
            turn.num_tokens = 0
        turn.parts.append(part)
        turn.num_tokens += len(part.tokens)
        if turn.num_tokens + len(part.tokens) > self._max_unrecorded or part.lost:
            if not self._due_turns:
                asyncio.get_running_loop().call_soon(self._record_due)
            self._due_turns[part.key, part.turn] = None

    def record(self, parts: Sequence[TokenChunk]) -> None:
        """Record parts that were collected in another process: a rollout shard, which runs their episodes."""
        if parts:
            self._record(Stream(parts=tuple(parts), at_s=self._clock.wall()))

    def forget(self, key: EpisodeKey) -> None:
        """Delete the collected parts of the episode ``key``, which has ended and is recorded as a whole."""
        for turn in self._unrecorded.pop(key, {}):
            self._due_turns.pop((key, turn), None)

    def record_all(self) -> None:
        """Record all collected parts, at the end of the run."""
        self._due_turns = {(key, turn): None for key, turns in self._unrecorded.items() for turn in turns}
        self._record_due()

    def _record_due(self) -> None:
        """Record the unrecorded tokens of all turns that are due, as one operation."""
        due_turns, self._due_turns = self._due_turns, {}
        turns = [self._unrecorded[key].pop(turn) for key, turn in due_turns]
        parts = tuple(TokenChunk.concat(turn.parts) for turn in turns)
        self.record(parts)
