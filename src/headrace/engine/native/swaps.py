"""Which weights are in use, and how others come into use.

    begin ──▶ at once: inflight · inflight_recompute · abort_resume · abort_retry · sleep ───────────▶ swap ──▶ report
      ├─────▶ drain, batch: hold new sequences back ──settle: nothing runs any more──▶ let them in ──▶ swap
      └─────▶ stream: before each step advance by one part of the parameters, until all are exchanged

Whatever the mode, blocks of the old weights are found by nobody from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.base.clock import Clock
from headrace.base.errors import WeightsError
from headrace.base.types.versions import NOT_SAMPLED, mixed
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.rows import Rows
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.sequence import NO_ROW, Sequence

_PATIENT = frozenset({Interrupt.DRAIN, Interrupt.BATCH})
"""Modes that wait until nothing runs."""


class WeightReceiver(Protocol):
    """Where new weights come from: the receiving side of a transport."""

    def stage(self, update: WeightUpdate) -> None:
        """Verify ``update``, in any thread; raises :class:`~headrace.base.errors.WeightsError`."""
        ...

    def staged(self) -> Mapping[str, Tensor]:
        """What is staged and not in use yet, by the names of the model's parameters."""
        ...

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Point the model's parameters at the staged version, a part each time the iterator is advanced; refused at
        once if it is not staged."""
        ...


@dataclass(slots=True, kw_only=True)
class _Pending:
    version: int
    mode: Interrupt
    parts: Iterator[None]
    began_s: float
    gap_s: float = 0.0
    """How long the step loop has stood still for it."""


@dataclass(slots=True, kw_only=True)
class _Cost:
    restarted: int = 0
    wasted_tokens: int = 0
    recomputed_tokens: int = 0


class Swaps:
    """Owns the version. Not thread-safe; everything happens between two passes."""

    def __init__(
        self, receiver: WeightReceiver, scheduler: Scheduler, rows: Rows, pool: BlockPool, clock: Clock
    ) -> None:
        self._receiver = receiver
        self._scheduler = scheduler
        self._rows = rows
        self._pool = pool
        self._clock = clock
        self._pending: _Pending | None = None
        self._done: list[SwapReport] = []
        self.version = NOT_SAMPLED
        """The committed one."""
        self.stamp = NOT_SAMPLED
        """What the next tokens carry: the version, or mixed."""
        self.num_restarted = 0
        self.wasted_tokens = 0

    @property
    def streaming(self) -> bool:
        """Whether parameters are being exchanged."""
        return self._pending is not None and self._pending.mode is Interrupt.STREAM

    def begin(self, version: int, mode: Interrupt, stream_steps: int, paused_s: float | None = None) -> None:
        """Bring the staged ``version`` into use; ``paused_s`` says since when the engine stands still, if it does."""
        began_s = self._clock.now()
        if self._pending is not None:
            raise WeightsError(
                f"commit of version {version}, but the commit of version {self._pending.version} "
                f"({self._pending.mode}) has not ended",
                remedy="wait for its report",
            )
        parts = self._receiver.commit_parts(version, stream_steps if mode is Interrupt.STREAM else 1)
        self._pending = _Pending(version=version, mode=mode, parts=parts, began_s=began_s)
        if mode in _PATIENT:
            self._scheduler.hold(everyone=mode is Interrupt.DRAIN)
            self.settle()
        elif mode is Interrupt.STREAM:
            self._use(mixed(self.version), pool_version=version)
            self._pending.gap_s = self._clock.now() - began_s
            self.settle()
        else:
            self._swap(began_s if paused_s is None else paused_s)

    def advance(self) -> None:
        """A step is about to run: exchange the next part."""
        if not self.streaming:
            return
        assert self._pending is not None
        started_s = self._clock.now()
        if next(self._pending.parts, False) is False:
            self._swap(started_s)
        else:
            self._pending.gap_s += self._clock.now() - started_s

    def finish(self) -> None:
        """Exchange at once what is still to be exchanged."""
        if self.streaming:
            self._swap(self._clock.now())

    def settle(self) -> None:
        """A step has run, or something has left: what waited for that may happen now."""
        if self._pending is None or not self._scheduler.idle:
            return
        self._scheduler.open()
        self._swap(self._clock.now())

    def take(self) -> list[SwapReport]:
        """The reports of the commits completed since the last call."""
        done, self._done = self._done, []
        return done

    def _swap(self, stood_since_s: float) -> None:
        """Exchange what is not exchanged yet; then ``mode`` says what becomes of the sequences that have begun."""
        pending, started_s = self._pending, self._clock.now()
        assert pending is not None
        for _ in pending.parts:
            pass
        self._pending = None
        self.version = pending.version
        self._use(pending.version, pool_version=pending.version)
        begun = [sequence for sequence in self._scheduler.begun() if sequence.pin is None]
        cost = self._treat(pending.mode, begun)
        self.num_restarted += cost.restarted
        self.wasted_tokens += cost.wasted_tokens
        self._done.append(
            SwapReport(
                version=pending.version,
                gap_s=pending.gap_s + self._clock.now() - stood_since_s,
                carried_over=len(begun) - cost.restarted,
                restarted=cost.restarted,
                mode=pending.mode,
                waited_s=started_s - pending.began_s,
                wasted_tokens=cost.wasted_tokens,
                recomputed_tokens=cost.recomputed_tokens,
            )
        )

    def _use(self, stamp: int, *, pool_version: int) -> None:
        self.stamp = self._scheduler.version = stamp
        self._pool.forget(pool_version)

    def _treat(self, mode: Interrupt, begun: list[Sequence]) -> _Cost:
        cost = _Cost()
        if mode is Interrupt.INFLIGHT_RECOMPUTE:
            cost.recomputed_tokens = self._recompute([sequence for sequence in begun if sequence.row != NO_ROW])
        elif mode in (Interrupt.ABORT_RESUME, Interrupt.SLEEP):
            cost.recomputed_tokens = self._requeue(begun)
        elif mode is Interrupt.ABORT_RETRY:
            self._requeue(begun)
            wasted = [sequence.begin_again() for sequence in begun]
            cost.restarted, cost.wasted_tokens = sum(map(bool, wasted)), sum(wasted)
        return cost

    def _requeue(self, sequences: list[Sequence]) -> int:
        return sum(self._scheduler.requeue(sequence) for sequence in sequences if sequence.row != NO_ROW)

    def _recompute(self, sequences: list[Sequence]) -> int:
        """In the blocks they have, but for those that share some with a sequence that needs the old contents."""
        pinned = [row for row, sequence in enumerate(self._rows.sequences) if sequence.pin is not None]
        needed = {block for row in pinned for block in self._rows.table(row)}
        away = [sequence for sequence in sequences if needed.intersection(self._rows.table(sequence.row))]
        here = [sequence for sequence in sequences if sequence not in away]
        return self._requeue(away) + sum(map(self._scheduler.recompute, here))
