"""The activity board: a table of what each loop of the controller works on or waits for. The live view shows the table,
and the stall watchdog prints it when a run makes no progress. Times are seconds on the run's clock."""

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
"""Factor by which the stall timeout is longer while a process of the run is stopped by a signal or a debugger, since
the process may be continued."""
MIN_SLEEP_S = 1e-3
"""Shortest sleep, in seconds. A shorter sleep might end before the clock has advanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContract:
    """A description of one loop of the controller in words for users: one row of the table in controller.py."""

    name: str
    """The name of the loop, such as ``rollout``."""
    consumes: str
    """The input of the loop."""
    produces: str
    """The output of the loop."""
    waits_for: str
    """The events that the loop waits for."""
    unblocked_by: str
    """The loops and parts of the run that can end such a wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A process of the run that makes no progress, as the stall watchdog reports it."""

    words: str
    """A clause for the message: the name of the process, the reason, and for how long."""
    stopped: bool
    """Whether a signal or a debugger has stopped the process, so that it may be continued at any time."""


@dataclass(slots=True, kw_only=True)
class _PendingRequest:
    """A request by one of a loop's tasks that has no response yet."""

    what: str
    """The requested object, in words."""
    provider: str
    """The part of the run that has to respond."""
    since: float
    """The time of the request, in seconds on the clock."""


@dataclass(slots=True, kw_only=True)
class _LoopRow:
    """The row of one loop in the table: what the loop does now, and since when."""

    contract: LoopContract
    """The name and the general description of the loop."""
    what: str
    """What the loop works on or waits for, in words."""
    since: float
    """The time at which this work or wait began, in seconds on the clock."""
    waiting_for: str = ""
    """The part of the run or the loop that can end the wait; empty while the loop works."""
    pending: dict[int, _PendingRequest] = field(default_factory=dict)
    """The requests of the loop's tasks that have no response, by a running number, oldest first."""


NOT_STARTED = "not started"
"""The text that a row shows until its loop first reports."""


class ActivityBoard:
    """The table of what each loop of the controller does. The loops update it; views and the stall watchdog read it."""

    def __init__(self, contracts: tuple[LoopContract, ...], clock: Clock) -> None:
        """Create a table with one row for each of ``contracts``, whose loops have not started. ``clock`` measures the
        waits."""
        self._clock = clock
        self._rows = {
            contract.name: _LoopRow(contract=contract, what=NOT_STARTED, since=clock.now()) for contract in contracts
        }
        self._progress_at = clock.now()
        """The time at which the run last made progress, in seconds on the clock."""
        self._request_numbers = count()
        """The numbers of the requests that will be added."""

    @property
    def all_started(self) -> bool:
        """Return whether every loop has reported at least once. Before that, the table does not show why the run
        waits."""
        return all(row.what != NOT_STARTED for row in self._rows.values())

    def record_progress(self) -> None:
        """Record that the run has made progress, such as a token that arrived or a group that changed its state. The
        stall watchdog measures the time since the last call."""
        self._progress_at = self._clock.now()

    def set_working(self, loop: str, what: str) -> None:
        """Set the row of the loop named ``loop``: it works on ``what`` from now on."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), ""

    @contextmanager
    def waiting(self, loop: str, what: str, *, on: str) -> Iterator[None]:
        """Set the row of the loop named ``loop`` while the body runs: it waits for ``what``, and ``on`` names the part
        or loop that can end the wait. If the body raises, the row is not changed, so that the report of the error shows
        what the loop waited for."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), on
        yield
        row.since, row.waiting_for = self._clock.now(), ""
        self._progress_at = row.since

    @contextmanager
    def requesting(self, loop: str, what: str, *, provider: str) -> Iterator[None]:
        """Add a request to the row of the loop named ``loop`` while the body runs: one of the loop's tasks waits for
        ``what`` from ``provider``. The loop itself continues, so its state in the row is not changed."""
        pending, number = self._rows[loop].pending, next(self._request_numbers)
        pending[number] = _PendingRequest(what=what, provider=provider, since=self._clock.now())
        try:
            yield
        finally:
            del pending[number]
            self._progress_at = self._clock.now()

    def table(self) -> tuple[Wait, ...]:
        """Return one row for each loop: what it works on or waits for now, for how long, and the open requests of its
        tasks."""
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
        """Run until cancelled, and raise :class:`~headrace.base.errors.StallError` when there was no progress for
        ``timeout_s`` seconds.

        ``pulse`` returns a count of work that is not reported in another way, such as the number of an engine's steps;
        an increase is progress. ``standstills`` returns the processes that make no progress. While a process is stopped
        by a signal or a debugger, the timeout is :data:`STOPPED_PATIENCE` times as long.
        """
        last_pulse, is_stopped = pulse(), False
        while True:
            if pulse() != last_pulse:
                last_pulse = pulse()
                self.record_progress()
            stalled = standstills()
            was_stopped, is_stopped = is_stopped, any(each.stopped for each in stalled)
            if was_stopped and not is_stopped:  # the process continues, or was replaced
                self.record_progress()
            still_s = self._clock.now() - self._progress_at
            allowed_s = timeout_s * (STOPPED_PATIENCE if is_stopped else 1)
            if still_s >= allowed_s:
                bound = f"run.stall_timeout_s={timeout_s:g}"
                if is_stopped:
                    bound = f"{STOPPED_PATIENCE} times {bound}, because a process is stopped"
                raise StallError(
                    f"nothing has moved for {still_s:.0f} s ({bound}){self._oldest_pending()}"
                    f"{''.join(f'; {each.words}' for each in stalled)}\n{self.describe()}",
                    remedy="look at the part that owes an answer: its log is in the run directory; "
                    "raise run.stall_timeout_s if it is only slow",
                )
            left_s = allowed_s - still_s
            nap_s = min(1.0, max(left_s, MIN_SLEEP_S))
            sleep_start_s = self._clock.now()
            await asyncio.sleep(nap_s)
            late_s = self._clock.now() - sleep_start_s - nap_s
            # While this process itself did not run, nothing could be reported, so the time does not count as a stall.
            if late_s > OWN_STANDSTILL_S:
                self._progress_at += late_s

    def _oldest_pending(self) -> str:
        """Return a clause for an error message about the request that has waited longest for a response; empty if there
        are no requests."""
        oldest = [next(iter(row.pending.values())) for row in self._rows.values() if row.pending]
        if not oldest:
            return ""
        request = min(oldest, key=lambda request: request.since)
        return f"; {request.what} has been owed by {request.provider} for {self._clock.now() - request.since:.0f} s"

    def describe(self) -> str:
        """Return the table as text for an error message: one line for each loop, with its current state and its
        contract."""
        lines = []
        for line, row in zip(self.brief_lines(), self._rows.values(), strict=True):
            contract = row.contract
            lines.append(
                f"{line}  [consumes {contract.consumes}; produces {contract.produces}; "
                f"waits for {contract.waits_for}; unblocked by {contract.unblocked_by}]"
            )
        return "\n".join(lines)

    def brief_lines(self) -> list[str]:
        """Return the table as lines of text, one for each loop: what the loop works on or waits for, and for how
        long."""
        lines = []
        for wait in self.table():
            doing = f"waits {wait.since_s:.0f} s for {wait.what}, which {wait.unblocked_by} brings"
            if wait.state == "busy":
                doing = f"busy {wait.since_s:.0f} s with {wait.what}"
            lines.append(f"  {wait.loop:<8} {doing}")
        return lines


def _describe_pending(pending: dict[int, _PendingRequest], now: float) -> str:
    """Return the end of a sentence about the ``pending`` requests of one loop: their number, the oldest request, the
    part that has to respond, and the age of this request at the time ``now``. Empty if there are no requests."""
    if not pending:
        return ""
    oldest = next(iter(pending.values()))
    number = f"{len(pending)} × " if len(pending) > 1 else ""
    return f"; {number}{oldest.what}, owed by {oldest.provider} for up to {now - oldest.since:.0f} s"
