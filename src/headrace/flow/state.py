"""The state of the flow: which groups are where. Data and transitions; no I/O, no clock, no asyncio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.types.group import GroupState


@dataclass(slots=True, kw_only=True)
class GroupEntry:
    """One group that is neither released nor dropped."""

    state: GroupState
    oldest_version: int | None = None
    """No token of it is older: the committed version when it was admitted, or what its tokens say once it is ready.
    ``None`` where it has no token yet and was not admitted."""
    step: int | None = None
    """The step that takes it; set before that only where a crash is replayed."""


@dataclass(slots=True, kw_only=True)
class FlowState:
    """Every group's place, counted as it moves.

    >>> flow = FlowState()
    >>> number = flow.submit()
    >>> for state in (GroupState.ADMITTED, GroupState.RUNNING): flow.move(number, state)
    >>> flow.num_held, flow.num_running, flow.conserved()
    (1, 1, True)
    """

    version: int = 0
    """The newest version that is committed."""
    next_step: int = 0
    """The step that takes the next batch."""
    groups: dict[int, GroupEntry] = field(default_factory=dict)
    """By number; released and dropped ones have left."""
    ready: dict[int, int] = field(default_factory=dict)
    """Numbers of the ready groups, with the order in which they became so."""
    counts: Counter[GroupState] = field(default_factory=Counter)
    """How many groups stand in each state, the final ones included."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups dropped, by reason."""
    num_submitted: int = 0
    """Groups ever submitted; also the number of the next one."""
    _ready_order: int = 0

    def submit(self) -> int:
        """A new group; returns its number."""
        number = self.num_submitted
        self.num_submitted += 1
        self.groups[number] = GroupEntry(state=GroupState.SUBMITTED)
        self.counts[GroupState.SUBMITTED] += 1
        return number

    def move(self, number: int, new: GroupState, *, reason: str = "") -> None:
        """Move one group along an arrow of its life; ``AssertionError`` where there is none."""
        entry = self.groups[number]
        assert entry.state.may_become(new), f"group {number}: {entry.state} cannot become {new}"
        self._leave(number, entry)
        entry.state = new
        self.counts[new] += 1
        match new:
            case GroupState.ADMITTED:
                kept = entry.oldest_version  # of tokens from before a crash
                entry.oldest_version = self.version if kept is None else min(kept, self.version)
            case GroupState.READY:
                self.ready[number] = self._ready_order
                self._ready_order += 1
            case GroupState.TAKEN:
                entry.step = self.next_step
            case GroupState.RELEASED:
                del self.groups[number]
            case GroupState.DROPPED:
                self.dropped[reason] += 1
                del self.groups[number]

    def restore(self, number: int, entry: GroupEntry) -> None:
        """Put back a group that a ledger remembers."""
        self.groups[number] = entry
        self.counts[entry.state] += 1
        if entry.state is GroupState.READY:
            self.ready[number] = self._ready_order
            self._ready_order += 1

    def _leave(self, number: int, entry: GroupEntry) -> None:
        self.counts[entry.state] -= 1
        self.ready.pop(number, None)

    @property
    def num_held(self) -> int:
        """Slots in use."""
        return sum(self.counts[state] for state in GroupState if state.holds_slot)

    @property
    def num_running(self) -> int:
        """Groups being generated or scored."""
        return self.counts[GroupState.ADMITTED] + self.counts[GroupState.RUNNING] + self.counts[GroupState.SCORED]

    def untaken(self) -> Iterable[int]:
        """Numbers of the groups that are in no batch yet; those that a crash interrupted stand in line too."""
        gone = (GroupState.TAKEN, GroupState.TRAINED)
        return [number for number, entry in self.groups.items() if entry.state not in gone]

    def waiting(self) -> list[int]:
        """Numbers of the groups that a crash interrupted and that were not admitted again; the aged ones come first."""
        numbers = [number for number, entry in self.groups.items() if entry.state is GroupState.SUBMITTED]
        return sorted(numbers, key=lambda number: (not self.is_aged(number), number))

    def is_aged(self, number: int) -> bool:
        """Whether the group holds tokens that are no newer than those it would get now."""
        oldest = self.groups[number].oldest_version
        return oldest is not None and oldest <= self.version

    def oldest_version(self, number: int) -> int | None:
        """The version that none of the group's tokens is older than; ``None`` where it has none and is not admitted."""
        return self.groups[number].oldest_version

    def planned(self, step: int) -> list[int]:
        """The groups that a replayed ``step`` took before the crash, in order; empty for a new step."""
        return sorted(number for number in self.ready if self.groups[number].step == step)

    def conserved(self) -> bool:
        """submitted = released + dropped + in the flow, each counted on its own."""
        left = self.counts[GroupState.RELEASED] + sum(self.dropped.values())
        return self.num_submitted == left + len(self.groups) and self.counts[GroupState.DROPPED] == sum(
            self.dropped.values()
        )
