"""The books of a simulated run: they stand where a real one has its ledger, and are told the same operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from headrace.base.types.group import GroupState
from headrace.flow.ledger.base import CommitVersion, EndStep, Move, Operation, Submit
from headrace.flow.state import FlowState


class CountingLedger:
    """A :class:`~headrace.flow.ledger.LedgerWriter` that counts groups by what it is told, on its own: what the flow
    counts of itself has to agree."""

    def __init__(self, on_drop: Callable[[int, str], None]) -> None:
        """``on_drop`` is told of every group that leaves untrained, and why."""
        self._on_drop = on_drop
        self.submitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.version = 0

    def write(self, operation: Operation) -> None:
        """Count it."""
        match operation:
            case Submit():
                self.submitted += len(operation.numbers)
            case EndStep():
                self.trained += len(operation.numbers)
            case Move(state=GroupState.DROPPED):
                self.dropped[operation.reason] += len(operation.numbers)
                for number in operation.numbers:
                    self._on_drop(number, operation.reason)
            case CommitVersion():
                assert operation.version > self.version, f"version {operation.version} after {self.version}"
                self.version = operation.version

    async def flush(self, *, durable: bool = False) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""

    def verify(self, state: FlowState) -> None:
        """``AssertionError`` where a group is lost or counted twice."""
        assert state.conserved(), f"groups are not conserved: {state.counts}"
        assert state.dropped == self.dropped, f"dropped: {dict(state.dropped)}, the books say {dict(self.dropped)}"
        left = sum(count for place, count in state.counts.items() if place.in_flight)
        assert self.submitted == self.trained + self.dropped.total() + left, (
            f"{self.submitted} groups submitted, {self.trained} trained, {self.dropped.total()} dropped, {left} left"
        )
        assert state.version == self.version <= state.next_step
