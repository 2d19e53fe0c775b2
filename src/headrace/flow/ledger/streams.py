"""Which tokens of running turns are in the ledger, and which are to be next."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from headrace.base.clock import Clock
from headrace.base.types.episode import EpisodeKey, TurnPart
from headrace.base.types.tokens import Tokens
from headrace.flow.ledger.base import Stream
from headrace.flow.ledger.writer import LedgerWriter


@dataclass(slots=True, kw_only=True)
class _Unrecorded:
    """Of one turn."""

    parts: list[TurnPart] = field(default_factory=list)
    num_tokens: int = 0


class RunningTurns:
    """Collects parts of running turns and records those of a turn before ``most`` of its tokens would be lost with
    this process; all turns that are due in one turn of the event loop in one transaction. 0: records none."""

    def __init__(self, writer: LedgerWriter, clock: Clock, *, most: int) -> None:
        self._writer = writer
        self._clock = clock
        self._most = most
        self._unrecorded: dict[EpisodeKey, dict[int, _Unrecorded]] = {}
        self._due: dict[tuple[EpisodeKey, int], None] = {}

    def add(self, part: TurnPart) -> None:
        """A turn has grown. What has arrived and as much again as its last chunk may be lost: the engine holds that."""
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

    def ended(self, key: EpisodeKey) -> None:
        """Its episode is recorded as a whole."""
        for turn in self._unrecorded.pop(key, {}):
            self._due.pop((key, turn), None)

    def record_all(self) -> None:
        """Record whatever has arrived: nothing more will."""
        self._due = {(key, turn): None for key, turns in self._unrecorded.items() for turn in turns}
        self._record_due()

    def _record_due(self) -> None:
        due, self._due = self._due, {}
        turns = [self._unrecorded[key].pop(turn) for key, turn in due]
        parts = tuple(_joined(turn.parts) for turn in turns)
        if parts:
            self._writer.write(Stream(parts=parts, at_s=self._clock.wall()))


def _joined(parts: list[TurnPart]) -> TurnPart:
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    tokens = Tokens.concat([part.tokens for part in parts])
    return replace(first, tokens=tokens, stop_reason=last.stop_reason)
