"""The state of the flow: which groups are where. Data and transitions; no I/O, no clock, no asyncio.

What policies ask for is kept as counts that follow every move, so that an event costs as much with a hundred thousand
groups in flight as with ten: nothing here looks at all groups.
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
    """What policies keep to. Replaced as a whole where the run tunes a limit."""

    batch_size: int
    """Groups per step."""
    max_age: int
    """The staleness bound, in versions, of groups that are admitted now; see :meth:`FlowState.allowed_age`."""
    lead: int | None = None
    """How many batches generation may run ahead of training; ``None``: as many as the bound has versions."""
    capacity: int | None = None
    """Most groups being generated or scored at once; ``None``: no limit but the lead."""
    strict: bool = False
    """Whether groups are trained in the order of admission."""

    @property
    def run_ahead(self) -> int:
        """``lead``, or ``max_age`` where it is not set."""
        return self.max_age if self.lead is None else self.lead


@dataclass(slots=True, kw_only=True)
class GroupEntry:
    """One group that is neither released nor dropped."""

    state: GroupState
    oldest_version: int | None = None
    """No token of it is older: the committed version when it was admitted, or what its tokens say once it is ready.
    ``None`` where it has no token yet and was not admitted."""
    newest_version: int | None = None
    """The newest version that sampled a token of it; known once it is ready."""
    step: int | None = None
    """The step that takes it; set before that only where a crash is replayed."""


@dataclass(slots=True, kw_only=True)
class FlowState:
    """Every group's place, counted as it moves.

    >>> flow = FlowState(limits=FlowLimits(batch_size=1, max_age=0))
    >>> number = flow.submit()
    >>> for state in (GroupState.ADMITTED, GroupState.RUNNING): flow.move(number, state)
    >>> flow.num_held, flow.num_running, flow.conserved()
    (1, 1, True)
    """

    limits: FlowLimits
    version: int = 0
    """The newest version that is committed."""
    next_step: int = 0
    """The step that takes the next batch."""
    groups: dict[int, GroupEntry] = field(default_factory=dict)
    """By number; released and dropped ones have left."""
    ready: set[int] = field(default_factory=set)
    """Numbers of the ready groups, those of replayed steps included."""
    ready_from: dict[int, dict[int, None]] = field(default_factory=dict)
    """Ready groups that no replayed step waits for, by oldest version; of one version, in the order they became so."""
    ready_to: dict[int, dict[int, None]] = field(default_factory=dict)
    """The same by newest version."""
    aging: Counter[int] = field(default_factory=Counter)
    """How many groups in no batch, and for which no replayed step waits, have tokens as old as each version."""
    num_open: int = 0
    """Groups that are in no batch and for which no replayed step waits, whether they have tokens or not."""
    plan: dict[int, set[int]] = field(default_factory=dict)
    """The groups that each step took before a crash and that are to be taken again."""
    counts: Counter[GroupState] = field(default_factory=Counter)
    """How many groups stand in each state, the final ones included."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups dropped, by reason."""
    num_submitted: int = 0
    """Groups ever submitted; also the number of the next one."""
    _line: list[int] = field(default_factory=list)
    """A heap of the submitted groups' numbers; some may have left."""
    _waiting_from: dict[int, dict[int, None]] = field(default_factory=dict)
    """The submitted groups that have tokens, by oldest version, in order of their numbers."""
    _by_number: list[int] = field(default_factory=list)
    """A heap of the open groups' numbers; some may be open no more."""
    _earlier: list[tuple[int, int]] = field(default_factory=list)
    """(until, age): tokens of versions before ``until`` may reach ``age``, which is more than the bound is now.
    ``until`` rises from one to the next and ``age`` falls."""

    # --- transitions

    def submit(self) -> int:
        """A new group; returns its number."""
        number = self.num_submitted
        self.num_submitted += 1
        self.restore(number, GroupEntry(state=GroupState.SUBMITTED))
        return number

    def call_up(self, count: int) -> list[int]:
        """The ``count`` submitted groups whose turn it is, by number; unless they are trained in that order too, those
        first that hold tokens as old as they would get now. They are to be admitted. There are new ones where a crash
        left none."""
        while self.num_waiting < count:
            self.submit()
        called: dict[int, None] = {}
        if self._waiting_from and not self.limits.strict:
            aged = (numbers for version, numbers in self._waiting_from.items() if version <= self.version)
            called.update(dict.fromkeys(islice(heapq.merge(*aged), count)))
        while len(called) < count:
            number = heapq.heappop(self._line)
            entry = self.groups.get(number)
            if entry is not None and entry.state is GroupState.SUBMITTED:
                called[number] = None
        return list(called)

    def move(
        self,
        number: int,
        new: GroupState,
        *,
        reason: str = "",
        versions: tuple[int, int] | None = None,
    ) -> None:
        """Move one group along an arrow of its life; ``AssertionError`` where there is none. ``versions``, with READY:
        the oldest and newest that sampled a token of it."""
        entry = self.groups[number]
        assert entry.state.may_become(new), f"group {number}: {entry.state} cannot become {new}"
        self._count(number, entry, -1)
        entry.state = new
        match new:
            case GroupState.ADMITTED:
                kept = entry.oldest_version  # of tokens from before a crash
                entry.oldest_version = self.version if kept is None else min(kept, self.version)
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
        """Put back a group that a ledger remembers."""
        self.groups[number] = entry
        self._count(number, entry, 1)
        if entry.state is GroupState.SUBMITTED:
            heapq.heappush(self._line, number)
        if entry.step is None:
            heapq.heappush(self._by_number, number)

    def _count(self, number: int, entry: GroupEntry, by: int) -> None:
        """The group enters its state (``by`` = 1), or leaves it (−1)."""
        state, oldest = entry.state, entry.oldest_version
        self.counts[state] += by
        if state is GroupState.READY:
            (self.ready.add if by > 0 else self.ready.remove)(number)
        if state in _BATCHED or not state.in_flight:
            return
        if entry.step is not None:
            _put(self.plan, entry.step, number, by)
            return
        self.num_open += by
        if oldest is not None:
            _add(self.aging, oldest, by)
            if state is GroupState.SUBMITTED:
                _file(self._waiting_from, oldest, number, by)
        if state is GroupState.READY:
            assert oldest is not None
            newest = oldest if entry.newest_version is None else entry.newest_version
            _file(self.ready_from, oldest, number, by)
            _file(self.ready_to, newest, number, by)

    def set_max_age(self, max_age: int) -> None:
        """A higher bound holds for every group at once; a lower one for tokens of later versions only: those that are
        there already may become as old as they were promised."""
        before = self.limits.max_age
        self.limits = replace(self.limits, max_age=max_age)
        self.promise(self.version + 1, before)

    def promise(self, until: int, max_age: int) -> None:
        """Tokens of versions before ``until`` may reach ``max_age``, whatever is the bound by then."""
        promised = [(other, age) for other, age in self._earlier if other > until or age > max_age]
        promised = sorted([*promised, (until, max_age)])
        self._earlier = [(other, age) for other, age in promised if age > self.limits.max_age]

    # --- what policies ask

    @property
    def num_held(self) -> int:
        """Slots in use."""
        return sum(self.counts[state] for state in GroupState if state.holds_slot)

    @property
    def num_running(self) -> int:
        """Groups being generated or scored."""
        return self.counts[GroupState.ADMITTED] + self.counts[GroupState.RUNNING] + self.counts[GroupState.SCORED]

    @property
    def num_waiting(self) -> int:
        """Groups that a crash interrupted and that were not admitted again."""
        return self.counts[GroupState.SUBMITTED]

    @property
    def num_waiting_aged(self) -> int:
        """Of those, the ones whose tokens are no newer than those they would get now."""
        return sum(len(numbers) for oldest, numbers in self._waiting_from.items() if oldest <= self.version)

    @property
    def room(self) -> int:
        """How many more groups may be generated or scored at once."""
        capacity = self.limits.capacity
        return sys.maxsize if capacity is None else capacity - self.num_running

    @property
    def free_step(self) -> int:
        """The first step whose batch no replay decides."""
        return max(self.plan, default=self.next_step - 1) + 1

    @property
    def replayed(self) -> tuple[int, ...]:
        """The groups that the next step took before a crash, in order; empty for a new step."""
        return tuple(sorted(self.plan.get(self.next_step, ())))

    def allowed_age(self, version: int) -> int:
        """The age that tokens of ``version`` may reach: the greatest bound that held since they were sampled."""
        return next((age for until, age in self._earlier if version < until), self.limits.max_age)

    def deadline(self, version: int) -> int:
        """The last step that may train tokens of ``version``."""
        return version + self.allowed_age(version)

    def first_open(self, count: int, *, ready: bool = False) -> list[int]:
        """The lowest numbers of groups that are in no batch; those of replayed steps aside. ``ready``: only up to the
        first that is not ready."""
        first: list[int] = []
        while self._by_number and len(first) < count:
            number = self._by_number[0]
            entry = self.groups.get(number)
            open_still = entry is not None and entry.step is None
            if open_still and ready and number not in self.ready:
                break
            heapq.heappop(self._by_number)
            if open_still:
                first.append(number)
        for number in first:
            heapq.heappush(self._by_number, number)
        return first

    def conserved(self) -> bool:
        """submitted = released + dropped + in the flow, each counted on its own."""
        left = self.counts[GroupState.RELEASED] + sum(self.dropped.values())
        return self.num_submitted == left + len(self.groups) and self.counts[GroupState.DROPPED] == sum(
            self.dropped.values()
        )


def _add(counter: Counter[int], version: int, by: int) -> None:
    counter[version] += by
    if not counter[version]:
        del counter[version]


def _put(plan: dict[int, set[int]], step: int, number: int, by: int) -> None:
    if by > 0:
        plan.setdefault(step, set()).add(number)
        return
    plan[step].remove(number)
    if not plan[step]:
        del plan[step]


def _file(files: dict[int, dict[int, None]], version: int, number: int, by: int) -> None:
    if by > 0:
        files.setdefault(version, {})[number] = None
        return
    del files[version][number]
    if not files[version]:
        del files[version]
