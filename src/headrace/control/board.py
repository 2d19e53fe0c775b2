"""The table of what each loop works on or waits for. The live view shows it, and the stall watchdog prints it."""

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
    """The contract of one loop of the controller: a row of the drawing in controller.py."""

    name: str
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
    """A process of the run that makes no progress."""

    words: str
    """The name of the process, the reason, and for how long."""
    stopped: bool
    """Whether a signal or a debugger has stopped it, so that it may be continued at any time."""


@dataclass(slots=True, kw_only=True)
class _PendingRequest:
    """A request of a task, to which there is no answer yet."""

    what: str
    provider: str
    since: float


@dataclass(slots=True, kw_only=True)
class _LoopRow:
    """The row of one loop in the table."""

    contract: LoopContract
    what: str
    since: float
    waiting_for: str = ""
    pending: dict[int, _PendingRequest] = field(default_factory=dict)
    """The requests of the loop's tasks that wait for an answer, oldest first."""


NOT_STARTED = "not started"


class ActivityBoard:
    """The table of what each loop does, which the loops themselves update."""

    def __init__(self, contracts: tuple[LoopContract, ...], clock: Clock) -> None:
        self._clock = clock
        self._rows = {
            contract.name: _LoopRow(contract=contract, what=NOT_STARTED, since=clock.now()) for contract in contracts
        }
        self._moved_at = clock.now()
        self._request_numbers = count()

    @property
    def all_started(self) -> bool:
        """Whether every loop has started. Before that, the table does not show what holds the run up."""
        return all(row.what != NOT_STARTED for row in self._rows.values())

    def progress(self) -> None:
        """Note that something has moved: a token arrived, or a group changed its state."""
        self._moved_at = self._clock.now()

    def working(self, loop: str, what: str) -> None:
        """Note that ``loop`` works on ``what`` from now on."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), ""

    @contextmanager
    def waiting(self, loop: str, what: str, *, on: str) -> Iterator[None]:
        """Show ``loop`` as waiting for ``what``, which ``on`` can bring, inside this context. If an error ends the
        wait, the row stays as it is, so that the error of the run can show what was waited for."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), on
        yield
        row.since, row.waiting_for = self._clock.now(), ""
        self._moved_at = row.since

    @contextmanager
    def requesting(self, loop: str, what: str, *, provider: str) -> Iterator[None]:
        """Show a task of ``loop`` as waiting for ``what`` from ``provider``, inside this context. The loop itself goes
        on."""
        pending, number = self._rows[loop].pending, next(self._request_numbers)
        pending[number] = _PendingRequest(what=what, provider=provider, since=self._clock.now())
        try:
            yield
        finally:
            del pending[number]
            self._moved_at = self._clock.now()

    def table(self) -> tuple[Wait, ...]:
        """Return one row for each loop, as it is now."""
        now = self._clock.now()
        return tuple(
            Wait(
                loop=name,
                state="waiting" if row.waiting_for else "busy",
                what=row.what + _pending_words(row.pending, now),
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
        """Raise :class:`~headrace.base.errors.StallError` when nothing has moved for ``timeout_s``.

        ``pulse`` returns a count of work that is not reported in another way, such as an engine's steps; if it grows,
        something moves. ``standstills`` returns the processes that make no progress. While one is stopped from outside,
        the timeout is :data:`STOPPED_PATIENCE` times as long."""
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
        """Describe the request that has waited longest for an answer; return an empty text if there is none."""
        oldest = [next(iter(row.pending.values())) for row in self._rows.values() if row.pending]
        if not oldest:
            return ""
        request = min(oldest, key=lambda request: request.since)
        return f"; {request.what} has been owed by {request.provider} for {self._clock.now() - request.since:.0f} s"

    def in_words(self) -> str:
        """Return the table as text, one line for each loop, with what it consumes and produces."""
        lines = []
        for line, row in zip(self.brief_lines(), self._rows.values(), strict=True):
            contract = row.contract
            lines.append(
                f"{line}  [consumes {contract.consumes}; produces {contract.produces}; "
                f"waits for {contract.waits_for}; unblocked by {contract.unblocked_by}]"
            )
        return "\n".join(lines)

    def brief_lines(self) -> list[str]:
        """Return the table as lines, one for each loop."""
        lines = []
        for wait in self.table():
            doing = f"waits {wait.since_s:.0f} s for {wait.what}, which {wait.unblocked_by} brings"
            if wait.state == "busy":
                doing = f"busy {wait.since_s:.0f} s with {wait.what}"
            lines.append(f"  {wait.loop:<8} {doing}")
        return lines


def _pending_words(pending: dict[int, _PendingRequest], now: float) -> str:
    """Return text that says how many requests are pending, and for how long the oldest."""
    if not pending:
        return ""
    oldest = next(iter(pending.values()))
    number = f"{len(pending)} × " if len(pending) > 1 else ""
    return f"; {number}{oldest.what}, owed by {oldest.provider} for up to {now - oldest.since:.0f} s"
