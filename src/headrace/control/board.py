"""The table of what each loop of the controller works on or waits for. The live view shows it, and the stall watchdog
prints it when a run makes no progress. Times are seconds on the run's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from headrace.base.clock import OWN_STANDSTILL_S, Clock
from headrace.base.errors import StallError
from headrace.base.types.observation import Wait

STOPPED_PATIENCE = 12
"""Factor of the timeout while a process of the run is stopped by a signal or a debugger, since it may be continued."""
MIN_SLEEP_S = 1e-3
"""Shortest sleep, in seconds; a shorter one might not move a clock on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContract:
    """The contract of one loop of the controller, in words for people: a row of the table in controller.py."""

    name: str
    """The name of the loop, such as ``rollout``."""
    consumes: str
    """What the loop takes as input."""
    produces: str
    """What the loop gives to other loops."""
    waits_for: str
    """The events that the loop waits for."""
    unblocked_by: str
    """The loops and parts that can end such a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A process of the run that makes no progress, for the message of the stall watchdog."""

    words: str
    """The name of the process, the reason, and for how long."""
    stopped: bool
    """Whether a signal or a debugger has stopped it, so that it may be continued at any time."""


@dataclass(slots=True, kw_only=True)
class _PendingRequest:
    """A request of one of a loop's tasks that has no answer yet."""

    what: str
    """The thing that is requested, in words."""
    provider: str
    """The part of the run that has to answer."""
    since: float
    """The time of the request, in seconds on the clock."""


@dataclass(slots=True, kw_only=True)
class _LoopRow:
    """The row of one loop in the table: what it does now, and since when."""

    contract: LoopContract
    """The loop, and what it does in general."""
    what: str
    """What the loop works on or waits for, in words."""
    since: float
    """When that began, in seconds on the clock."""
    waiting_for: str = ""
    """The part or loop that can end the wait; empty while the loop works."""
    pending: dict[int, _PendingRequest] = field(default_factory=dict)
    """The requests of the loop's tasks that wait for an answer, oldest first."""


NOT_STARTED = "not started"
"""What a loop is shown to do before it first reports."""


class ActivityBoard:
    """The table of what each loop of the controller does. The loops update it; views and the stall watchdog read it."""

    def __init__(self, contracts: tuple[LoopContract, ...], clock: Clock) -> None:
        """Show one row for each of ``contracts``, with the loop not started."""
        self._clock = clock
        self._rows = {
            contract.name: _LoopRow(contract=contract, what=NOT_STARTED, since=clock.now()) for contract in contracts
        }
        self._moved_at = clock.now()
        self._request_numbers = count()

    @property
    def all_started(self) -> bool:
        """Return whether every loop has started. Before that, the table does not show what holds the run up."""
        return all(row.what != NOT_STARTED for row in self._rows.values())

    def progress(self) -> None:
        """Note that something in the run has moved, such as a token that arrived or a group that changed its state. The
        stall watchdog counts the time since then."""
        self._moved_at = self._clock.now()

    def working(self, loop: str, what: str) -> None:
        """Show the loop named ``loop`` as working on ``what`` from now on."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), ""

    @contextmanager
    def waiting(self, loop: str, what: str, *, on: str) -> Iterator[None]:
        """Show the loop named ``loop`` as waiting for ``what`` while the body runs; ``on`` names the part or loop that
        can end the wait. If an error ends it, the row stays as it is, so that the report of the error shows what the
        loop waited for."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), on
        yield
        row.since, row.waiting_for = self._clock.now(), ""
        self._moved_at = row.since

    @contextmanager
    def requesting(self, loop: str, what: str, *, provider: str) -> Iterator[None]:
        """Show one of the tasks of the loop named ``loop`` as waiting for ``what`` from ``provider`` while the body
        runs. The loop itself continues, so its row stays; the request is added to it."""
        pending, number = self._rows[loop].pending, next(self._request_numbers)
        pending[number] = _PendingRequest(what=what, provider=provider, since=self._clock.now())
        try:
            yield
        finally:
            del pending[number]
            self._moved_at = self._clock.now()

    def table(self) -> tuple[Wait, ...]:
        """Return one row for each loop, which says what it works on or waits for now, with its tasks' open requests."""
        now = self._clock.now()
        return tuple(
            Wait(
                loop=name,
                state="waiting" if row.waiting_for else "busy",
                what=row.what + _describe_pending(row.pending, now),
                since_s=now - row.since,
                unblocked_by=row.waiting_for,
            )
            for name, row in self._rows.items()
        )

    async def watch(
        self,
        timeout_s: float,
        pulse: Callable[[], int] = lambda: 0,
        standstills: Callable[[], Sequence[Standstill]] = tuple,
    ) -> None:
        """Raise :class:`~headrace.base.errors.StallError` when nothing has moved for ``timeout_s`` seconds; otherwise
        run until cancelled.

        ``pulse`` returns a count of work that is not reported in another way, such as an engine's steps; if it grows,
        something moves. ``standstills`` returns the processes that make no progress. While one of them is stopped by a
        signal or a debugger, the timeout is :data:`STOPPED_PATIENCE` times as long.
        """
        beats, held = pulse(), False
        while True:
            if pulse() != beats:
                beats = pulse()
                self.progress()
            found = standstills()
            was_held, held = held, any(each.stopped for each in found)
            if was_held and not held:  # it continues, or was replaced
                self.progress()
            still_s = self._clock.now() - self._moved_at
            allowed_s = timeout_s * (STOPPED_PATIENCE if held else 1)
            if still_s >= allowed_s:
                bound = f"run.stall_timeout_s={timeout_s:g}"
                if held:
                    bound = f"{STOPPED_PATIENCE} times {bound}, because a process is stopped"
                raise StallError(
                    f"nothing has moved for {still_s:.0f} s ({bound}){self._oldest_pending()}"
                    f"{''.join(f'; {each.words}' for each in found)}\n{self.in_words()}",
                    remedy="look at the part that owes an answer: its log is in the run directory; "
                    "raise run.stall_timeout_s if it is only slow",
                )
            left_s = allowed_s - still_s
            nap_s = min(1.0, max(left_s, MIN_SLEEP_S))
            looked_s = self._clock.now()
            await asyncio.sleep(nap_s)
            late_s = self._clock.now() - looked_s - nap_s
            # While this process stood still, nothing could be reported: the time is not counted as a stall.
            if late_s > OWN_STANDSTILL_S:
                self._moved_at += late_s

    def _oldest_pending(self) -> str:
        """Return a clause, for an error message, about the request that has waited longest for an answer; empty if
        there is none."""
        oldest = [next(iter(row.pending.values())) for row in self._rows.values() if row.pending]
        if not oldest:
            return ""
        request = min(oldest, key=lambda request: request.since)
        return f"; {request.what} has been owed by {request.provider} for {self._clock.now() - request.since:.0f} s"

    def in_words(self) -> str:
        """Return the table as text, one line for each loop, with what the loop consumes, produces and waits for in
        general."""
        lines = []
        for line, row in zip(self.brief_lines(), self._rows.values(), strict=True):
            contract = row.contract
            lines.append(
                f"{line}  [consumes {contract.consumes}; produces {contract.produces}; "
                f"waits for {contract.waits_for}; unblocked by {contract.unblocked_by}]"
            )
        return "\n".join(lines)

    def brief_lines(self) -> list[str]:
        """Return the table as lines of text, one for each loop: what it works on or waits for, and for how long."""
        lines = []
        for wait in self.table():
            doing = f"waits {wait.since_s:.0f} s for {wait.what}, which {wait.unblocked_by} brings"
            if wait.state == "busy":
                doing = f"busy {wait.since_s:.0f} s with {wait.what}"
            lines.append(f"  {wait.loop:<8} {doing}")
        return lines


def _describe_pending(pending: dict[int, _PendingRequest], now: float) -> str:
    """Return the end of a sentence about the requests of one loop that have no answer, oldest first: their number, the
    oldest one, who owes the answer and for how long until ``now``. Empty if there are none."""
    if not pending:
        return ""
    oldest = next(iter(pending.values()))
    number = f"{len(pending)} × " if len(pending) > 1 else ""
    return f"; {number}{oldest.what}, owed by {oldest.provider} for up to {now - oldest.since:.0f} s"
