"""Who works on what, and who waits for whom: what the live view shows and the stall watchdog prints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from headrace.base.clock import Clock
from headrace.base.errors import StallError
from headrace.base.types.observation import Wait

PATIENCE = 12
"""How many times as long as otherwise the watch waits while a process of the run is known to be stopped by a signal or
a debugger: it may be let go on."""
OWN_STANDSTILL_S = 2.0
"""A look of the watch that comes later than this says that the controller itself stood still: that time is nobody's."""
MIN_SLEEP_S = 1e-3
"""Less would not move a clock on for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContract:
    """One loop of the controller, as the picture in its docstring draws it."""

    name: str
    consumes: str
    produces: str
    waits_for: str
    unblocked_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A process of the run that does not go on."""

    words: str
    """Which one, why and for how long."""
    stopped: bool
    """Whether a signal or a debugger has stopped it, so that it may go on at any time."""


@dataclass(slots=True, kw_only=True)
class _Ask:
    what: str
    of: str
    since: float


@dataclass(slots=True, kw_only=True)
class _LoopRow:
    contract: LoopContract
    what: str
    since: float
    waiting_for: str = ""
    asks: dict[int, _Ask] = field(default_factory=dict)
    """What tasks of the loop have asked of others and not got yet, oldest first."""


class ActivityBoard:
    """The table of loops, kept by the loops themselves."""

    def __init__(self, contracts: tuple[LoopContract, ...], clock: Clock) -> None:
        self._clock = clock
        self._rows = {
            contract.name: _LoopRow(contract=contract, what="not started", since=clock.now()) for contract in contracts
        }
        self._moved_at = clock.now()
        self._ask_numbers = count()

    def progress(self) -> None:
        """Something moved: a token arrived, a group changed its place."""
        self._moved_at = self._clock.now()

    def working(self, loop: str, what: str) -> None:
        """``loop`` has begun to work on ``what``."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), ""

    @contextmanager
    def waiting(self, loop: str, what: str, *, on: str) -> Iterator[None]:
        """Within this, ``loop`` waits for ``what``, which ``on`` can bring. A wait that is broken off stays on the
        board: whoever tells why the run failed tells what it waited for."""
        row = self._rows[loop]
        row.what, row.since, row.waiting_for = what, self._clock.now(), on
        yield
        row.since, row.waiting_for = self._clock.now(), ""
        self._moved_at = row.since

    @contextmanager
    def asking(self, loop: str, what: str, *, of: str) -> Iterator[None]:
        """Within this, a task of ``loop`` waits for ``what``, which ``of`` owes it; the loop itself goes on."""
        asks, number = self._rows[loop].asks, next(self._ask_numbers)
        asks[number] = _Ask(what=what, of=of, since=self._clock.now())
        try:
            yield
        finally:
            del asks[number]
            self._moved_at = self._clock.now()

    def table(self) -> tuple[Wait, ...]:
        """One row per loop, as it is now."""
        now = self._clock.now()
        return tuple(
            Wait(
                loop=name,
                state="waiting" if row.waiting_for else "busy",
                what=row.what + _owed(row.asks, now),
                since_s=now - row.since,
                unblocked_by=row.waiting_for,
            )
            for name, row in self._rows.items()
        )

    async def watch(
        self,
        timeout_s: float,
        pulse: Callable[[], int] = lambda: 0,
        standing: Callable[[], Sequence[Standstill]] = tuple,
    ) -> None:
        """Raise :class:`~headrace.base.errors.StallError` when nothing has moved for ``timeout_s``.

        ``pulse`` counts what a part does that tells nobody, an engine's steps for one: where it grows, something moves.
        ``standing``: the processes that do not go on. While one is stopped from outside, the watch waits
        :data:`PATIENCE` times as long.
        """
        beats, held = pulse(), False
        while True:
            if pulse() != beats:
                beats = pulse()
                self.progress()
            found = standing()
            was_held, held = held, any(each.stopped for each in found)
            if was_held and not held:  # it goes on, or was replaced
                self.progress()
            still_s = self._clock.now() - self._moved_at
            allowed_s = timeout_s * (PATIENCE if held else 1)
            if still_s >= allowed_s:
                raise StallError(
                    f"nothing has moved for {still_s:.0f} s (run.stall_timeout_s={timeout_s:g}){self._owing()}"
                    f"{''.join(f'; {each.words}' for each in found)}\n{self.in_words()}",
                    remedy="look at the part that owes an answer: its log is in the run directory; "
                    "raise run.stall_timeout_s if it is only slow",
                )
            left_s = allowed_s - still_s
            nap_s = min(1.0, max(left_s, MIN_SLEEP_S))
            looked_s = self._clock.now()
            await asyncio.sleep(nap_s)
            late_s = self._clock.now() - looked_s - nap_s
            if late_s > OWN_STANDSTILL_S:
                self._moved_at += late_s

    def _owing(self) -> str:
        """Who has owed an answer for longest, in words; empty where nobody owes one."""
        oldest = [next(iter(row.asks.values())) for row in self._rows.values() if row.asks]
        if not oldest:
            return ""
        ask = min(oldest, key=lambda ask: ask.since)
        return f"; {ask.what} has been owed by {ask.of} for {self._clock.now() - ask.since:.0f} s"

    def in_words(self) -> str:
        """The table, a line per loop, with what each consumes and produces."""
        lines = []
        for line, row in zip(self.in_brief(), self._rows.values(), strict=True):
            contract = row.contract
            lines.append(
                f"{line}  [consumes {contract.consumes}; produces {contract.produces}; "
                f"waits for {contract.waits_for}; unblocked by {contract.unblocked_by}]"
            )
        return "\n".join(lines)

    def in_brief(self) -> list[str]:
        """The table, a line per loop."""
        lines = []
        for wait in self.table():
            doing = f"waits {wait.since_s:.0f} s for {wait.what}, which {wait.unblocked_by} brings"
            if wait.state == "busy":
                doing = f"busy {wait.since_s:.0f} s with {wait.what}"
            lines.append(f"  {wait.loop:<8} {doing}")
        return lines


def _owed(asks: dict[int, _Ask], now: float) -> str:
    if not asks:
        return ""
    oldest = next(iter(asks.values()))
    return f"; {len(asks)} times {oldest.what} owed by {oldest.of}, for up to {now - oldest.since:.0f} s"
