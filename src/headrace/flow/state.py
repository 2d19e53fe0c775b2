"""The state of the flow: the state of every group, with counters and indexes. This module contains data and
transitions, without I/O, clock or asyncio.

A group holds the attempts at one task, and is trained in one step. The *version* of a token is the integer that names
the weights that sampled it; its age is measured in versions. A step is *replayed* if it took its groups before a crash,
and takes the same groups again.

The numbers that policies need are counters, which are updated when a group changes its state. No operation iterates
over all groups, so the time of an operation does not grow with the number of groups in flight.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice

from headrace.base.types.group import GroupState

_BATCHED = (GroupState.TAKEN, GroupState.TRAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """The limits that staleness policies apply. The record is replaced as a whole when the run tunes a limit."""

    batch_size: int
    """Number of groups per step."""
    max_age: int
    """The staleness bound, in versions, for groups that are admitted now; see :meth:`FlowState.allowed_age`."""
    lead: int | None = None
    """Number of batches that generation may run ahead of training; ``None``: the same as ``max_age``."""
    capacity: int | None = None
    """Greatest number of groups that are generated or scored at once; ``None``: only the lead limits it."""
    strict: bool = False
    """Whether groups are trained in the order of admission."""

    @property
    def run_ahead(self) -> int:
        """Return the number of batches that generation may run ahead of training: ``lead``, or ``max_age`` where
        ``lead`` is ``None``."""
        return self.max_age if self.lead is None else self.lead


@dataclass(slots=True, kw_only=True)
class GroupEntry:
    """The state of one group that is neither released nor dropped."""

    state: GroupState
    """The state of the group."""
    oldest_version: int | None = None
    """A lower bound of the versions of the group's tokens: once the group is ready, the oldest version of its tokens;
    before that, the version that was committed at its admission, or the oldest version of tokens that it kept over a
    crash if that is older. ``None`` if the group has no token and was not admitted."""
    newest_version: int | None = None
    """The newest version that sampled a token of the group; ``None`` until it is ready."""
    step: int | None = None
    """The step whose batch contains the group; ``None`` if no batch does. For a group of a replayed step, it is known
    before the step takes the group."""


@dataclass(slots=True, kw_only=True)
class FlowState:
    """The states of all groups, with counters and indexes that every transition updates. The flow changes it, and
    policies read it.

    >>> flow = FlowState(limits=FlowLimits(batch_size=1, max_age=0))
    >>> number = flow.submit()
    >>> for state in (GroupState.ADMITTED, GroupState.RUNNING): flow.move(number, state)
    >>> flow.num_held, flow.num_running, flow.conserved()
    (1, 1, True)
    """

    limits: FlowLimits
    """The limits that the policy applies now."""
    version: int = 0
    """The newest version that is committed."""
    next_step: int = 0
    """The step that takes the next batch."""
    groups: dict[int, GroupEntry] = field(default_factory=dict)
    """All groups except released and dropped ones, by number."""
    ready: set[int] = field(default_factory=set)
    """Numbers of the ready groups, including groups of replayed steps."""
    ready_by_oldest: dict[int, dict[int, None]] = field(default_factory=dict)
    """Ready groups that belong to no replayed step, by oldest version; within a version, in the order in which they
    became ready."""
    ready_by_newest: dict[int, dict[int, None]] = field(default_factory=dict)
    """Ready groups that belong to no replayed step, by newest version."""
    open_by_oldest: Counter[int] = field(default_factory=Counter)
    """Number of groups in no batch and no replayed step, by their oldest version."""
    num_open: int = 0
    """Number of groups in no batch and no replayed step, whether they have started or not."""
    plan: dict[int, dict[int, None]] = field(default_factory=dict)
    """Numbers of the groups of each replayed step, by step."""
    counts: Counter[GroupState] = field(default_factory=Counter)
    """Number of groups in each state, final states included."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups by reason."""
    num_submitted: int = 0
    """Number of groups submitted so far, which is also the number that the next group gets."""
    _submitted_heap: list[int] = field(default_factory=list)
    """A heap of the numbers of submitted groups. Some of these groups may have left the state SUBMITTED."""
    _waiting_by_oldest: dict[int, dict[int, None]] = field(default_factory=dict)
    """Submitted groups that have tokens, by oldest version, in the order of their numbers."""
    _open_heap: list[int] = field(default_factory=list)
    """A heap of the numbers of groups that are in no batch. Some of these groups may have been taken into a batch
    since."""
    _earlier_bounds: list[tuple[int, int]] = field(default_factory=list)
    """Higher staleness bounds that still hold for older tokens: (until, age) means that tokens of versions before
    ``until`` may reach the age ``age``. ``until`` ascends and ``age`` descends."""

    # --- transitions

    def submit(self) -> int:
        """Create a group in the state SUBMITTED and return its number."""
        number = self.num_submitted
        self.num_submitted += 1
        self.restore(number, GroupEntry(state=GroupState.SUBMITTED))
        return number

    def next_submitted(self, count: int) -> list[int]:
        """Return the numbers of the ``count`` groups to admit next, and create new groups if fewer are waiting. The
        groups are in the order of their numbers, except that groups whose kept tokens are at least as old as new tokens
        would be come first, unless groups are trained in strict order."""
        while self.num_waiting < count:
            self.submit()
        chosen: dict[int, None] = {}
        if self._waiting_by_oldest and not self.limits.strict:
            aged = (numbers for version, numbers in self._waiting_by_oldest.items() if version <= self.version)
            chosen.update(dict.fromkeys(islice(heapq.merge(*aged), count)))
        while len(chosen) < count:
            number = heapq.heappop(self._submitted_heap)
            entry = self.groups.get(number)
            if entry is not None and entry.state is GroupState.SUBMITTED:
                chosen[number] = None
        return list(chosen)

    def move(self, number: int, new: GroupState, *, reason: str = "", versions: tuple[int, int] | None = None) -> None:
        """Move the group ``number`` to the state ``new`` and update all counters. For READY, ``versions`` are the
        oldest and the newest version of its tokens; for DROPPED, ``reason`` is the reason that is counted. Raises
        ``AssertionError`` if the transition is not allowed."""
        entry = self.groups[number]
        assert entry.state.may_become(new), f"group {number}: {entry.state} cannot become {new}"
        self._count(number, entry, -1)
        entry.state = new
        match new:
            case GroupState.ADMITTED:
                kept_version = entry.oldest_version  # the version of tokens from before a crash
                entry.oldest_version = self.version if kept_version is None else min(kept_version, self.version)
            case GroupState.READY if versions is not None:
                entry.oldest_version, entry.newest_version = versions
            case GroupState.TAKEN:
                entry.step = self.next_step
            case GroupState.RELEASED:
                del self.groups[number]
            case GroupState.DROPPED:
                self.dropped[reason] += 1
                del self.groups[number]
        self._count(number, entry, 1)

    def restore(self, number: int, entry: GroupEntry) -> None:
        """Add the group ``number`` in the state ``entry``: a new group, or a group from before a crash that the ledger
        has recorded."""
        self.groups[number] = entry
        self._count(number, entry, 1)
        if entry.state is GroupState.SUBMITTED:
            heapq.heappush(self._submitted_heap, number)
        if entry.step is None:
            heapq.heappush(self._open_heap, number)

    def _count(self, number: int, entry: GroupEntry, change: int) -> None:
        """Update all counters and indexes for the group ``number``: it enters the state in ``entry`` (``change`` = 1)
        or leaves it (``change`` = −1)."""
        state, oldest = entry.state, entry.oldest_version
        self.counts[state] += change
        if state is GroupState.READY:
            (self.ready.add if change > 0 else self.ready.remove)(number)
        if state in _BATCHED or not state.in_flight:
            return
        if entry.step is not None:
            _update_index(self.plan, entry.step, number, change)
            return
        self.num_open += change
        if oldest is not None:
            _update_counter(self.open_by_oldest, oldest, change)
            if state is GroupState.SUBMITTED:
                _update_index(self._waiting_by_oldest, oldest, number, change)
        if state is GroupState.READY:
            assert oldest is not None
            newest = oldest if entry.newest_version is None else entry.newest_version
            _update_index(self.ready_by_oldest, oldest, number, change)
            _update_index(self.ready_by_newest, newest, number, change)

    def set_max_age(self, max_age: int) -> None:
        """Set the staleness bound, in versions. A higher bound applies to all tokens at once. A lower bound applies
        only to tokens of later versions, because older tokens were admitted under the earlier bound."""
        earlier_bound = self.limits.max_age
        self.limits = replace(self.limits, max_age=max_age)
        self.extend_bound(self.version + 1, earlier_bound)

    def extend_bound(self, until: int, max_age: int) -> None:
        """Allow tokens of versions before ``until`` to be trained up to the age ``max_age``, even if the bound is lower
        then."""
        extended = [(other, age) for other, age in self._earlier_bounds if other > until or age > max_age]
        extended = sorted([*extended, (until, max_age)])
        self._earlier_bounds = [(other, age) for other, age in extended if age > self.limits.max_age]

    # --- queries that policies use

    @property
    def num_held(self) -> int:
        """Return the number of occupied slots, which is the number of groups that are admitted and neither released nor
        dropped."""
        return sum(self.counts[state] for state in GroupState if state.holds_slot)

    @property
    def num_running(self) -> int:
        """Return the number of groups that are being generated or scored."""
        return self.counts[GroupState.ADMITTED] + self.counts[GroupState.RUNNING] + self.counts[GroupState.SCORED]

    @property
    def num_waiting(self) -> int:
        """Return the number of groups in the state SUBMITTED, which wait for admission. Outside of
        :meth:`next_submitted`, these are the groups that a crash interrupted."""
        return self.counts[GroupState.SUBMITTED]

    @property
    def num_waiting_aged(self) -> int:
        """Return the number of groups in the state SUBMITTED that kept tokens over a crash which are at least as old as
        new tokens would be."""
        return sum(len(numbers) for oldest, numbers in self._waiting_by_oldest.items() if oldest <= self.version)

    @property
    def free_capacity(self) -> int:
        """Return how many more groups may be generated or scored at once; ``sys.maxsize`` if the capacity is not
        limited."""
        capacity = self.limits.capacity
        return sys.maxsize if capacity is None else capacity - self.num_running

    @property
    def free_step(self) -> int:
        """Return the first step that has no batch and is not a replayed step."""
        return max(self.plan, default=self.next_step - 1) + 1

    @property
    def replayed(self) -> tuple[int, ...]:
        """Return the numbers of the groups that the next step took before a crash and takes again, in order; empty for
        a step that is not replayed."""
        return tuple(sorted(self.plan.get(self.next_step, ())))

    def allowed_age(self, version: int) -> int:
        """Return the largest age at which tokens of ``version`` may be trained: the largest staleness bound since
        they were sampled."""
        return next((age for until, age in self._earlier_bounds if version < until), self.limits.max_age)

    def deadline(self, version: int) -> int:
        """Return the last step that may train tokens of ``version``."""
        return version + self.allowed_age(version)

    def first_open(self, count: int, *, ready: bool = False) -> list[int]:
        """Return up to ``count`` numbers of groups that are in no batch and no replayed step, the lowest numbers in
        ascending order. With ``ready``, stop before the first group that is not ready."""
        first: list[int] = []
        while self._open_heap and len(first) < count:
            number = self._open_heap[0]
            entry = self.groups.get(number)
            is_open = entry is not None and entry.step is None
            if is_open and ready and number not in self.ready:
                break
            heapq.heappop(self._open_heap)
            if is_open:
                first.append(number)
        for number in first:
            heapq.heappush(self._open_heap, number)
        return first

    def conserved(self) -> bool:
        """Return whether no group was lost or counted twice: submitted = released + dropped + in flight, where each
        number is counted separately."""
        num_dropped = sum(self.dropped.values())
        num_left = self.counts[GroupState.RELEASED] + num_dropped
        return self.num_submitted == num_left + len(self.groups) and self.counts[GroupState.DROPPED] == num_dropped


def _update_counter(counter: Counter[int], version: int, change: int) -> None:
    """Add ``change`` to the number of groups of ``version``, and remove an entry that becomes 0."""
    counter[version] += change
    if not counter[version]:
        del counter[version]


def _update_index(index: dict[int, dict[int, None]], key: int, number: int, change: int) -> None:
    """Add the group ``number`` to the groups of ``key``, a version or step, or remove it if ``change`` is negative. An
    empty entry is removed from ``index``. The inner dictionaries are used as ordered sets."""
    if change > 0:
        index.setdefault(key, {})[number] = None
        return
    del index[key][number]
    if not index[key]:
        del index[key]
