"""The version in use, and the exchange of weights.

    begin ──▶ at once: inflight · inflight_recompute · abort_resume · abort_retry · sleep ───────────▶ swap ──▶ report
      ├─────▶ drain, batch: hold new sequences back ──settle: nothing runs any more──▶ let them in ──▶ swap
      └─────▶ stream: before each step advance by one part of the parameters, until all are exchanged

Whatever the mode, cached blocks of the old weights cannot be matched from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.base.clock import Clock
from headrace.base.errors import WeightsError
from headrace.base.types.versions import INITIAL, NOT_SAMPLED, mixed
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.rows import Rows
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.sequence import NO_ROW, Sequence

_WAITING_MODES = frozenset({Interrupt.DRAIN, Interrupt.BATCH})
"""The modes that wait until no sequence runs."""


class WeightReceiver(Protocol):
    """The receiving side of a transport, where new weights come from."""

    def stage(self, update: WeightUpdate) -> None:
        """Verify ``update``, in any thread. Raises :class:`~headrace.base.errors.WeightsError` if it cannot be used."""
        ...

    def staged(self) -> Mapping[str, Tensor]:
        """Return the staged tensors that are not in use yet, by the names of the model's parameters."""
        ...

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Point the model's parameters to the staged version, one part each time the iterator is advanced. Raises
        :class:`~headrace.base.errors.WeightsError` at once if the version is not staged."""
        ...


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A commit that has begun."""

    version: int
    mode: Interrupt
    parts: Iterator[None]
    began_s: float
    gap_s: float = 0.0
    """How long the step loop has stood still for it."""


@dataclass(slots=True, kw_only=True)
class _Cost:
    """The tokens and sequences that a commit discarded."""

    restarted: int = 0
    wasted_tokens: int = 0
    recomputed_tokens: int = 0


class Swaps:
    """The owner of the version in use. It is not thread-safe; all calls happen between two passes."""

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
        """The committed version."""
        self.stamp = NOT_SAMPLED
        """The version that the next tokens carry: the committed one, or mixed."""
        self.num_restarted = 0
        self.wasted_tokens = 0

    @property
    def streaming(self) -> bool:
        """Whether parameters are being exchanged step by step."""
        return self._pending is not None and self._pending.mode is Interrupt.STREAM

    def begin(self, version: int, mode: Interrupt, stream_steps: int, paused_s: float | None = None) -> None:
        """Begin to use the staged ``version``. ``paused_s`` is the time at which the engine was paused, if it is."""
        began_s = self._clock.now()
        if self._pending is not None:
            raise WeightsError(
                f"commit of version {version}, but the commit of version {self._pending.version} "
                f"({self._pending.mode}) has not ended",
                remedy="wait for its report",
            )
        parts = self._receiver.commit_parts(version, stream_steps if mode is Interrupt.STREAM else 1)
        self._pending = _Pending(version=version, mode=mode, parts=parts, began_s=began_s)
        if mode in _WAITING_MODES:
            self._scheduler.hold(include_waiting=mode is Interrupt.DRAIN)
            self.settle()
        elif mode is Interrupt.STREAM:
            self._use(mixed(self.version), pool_version=version)
            self._pending.gap_s = self._clock.now() - began_s
            self.settle()
        else:
            self._swap(began_s if paused_s is None else paused_s)

    def advance(self) -> None:
        """Exchange the next part of a streamed commit; called before each step."""
        if not self.streaming:
            return
        assert self._pending is not None
        started_s = self._clock.now()
        if next(self._pending.parts, False) is False:
            self._swap(started_s)
        else:
            self._pending.gap_s += self._clock.now() - started_s

    def finish(self) -> None:
        """Exchange at once the parts that are left of a streamed commit."""
        if self.streaming:
            self._swap(self._clock.now())

    def settle(self) -> None:
        """Complete a commit that waited until no sequence runs; called after each step and each removal."""
        if self._pending is None or not self._scheduler.idle:
            return
        self._scheduler.open()
        self._swap(self._clock.now())

    def pop_reports(self) -> list[SwapReport]:
        """Remove and return the reports of the completed commits."""
        done, self._done = self._done, []
        return done

    def _swap(self, stood_since_s: float) -> None:
        """Exchange the parameters that are left, then treat the sequences that have begun as the mode requires."""
        pending, started_s = self._pending, self._clock.now()
        assert pending is not None
        for _ in pending.parts:
            pass
        self._pending = None
        self.version = pending.version
        self._use(pending.version, pool_version=pending.version)
        begun = [sequence for sequence in self._scheduler.started() if sequence.pin is None]
        cost = self._apply_mode(pending.mode, begun)
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

    def _apply_mode(self, mode: Interrupt, begun: list[Sequence]) -> _Cost:
        """Treat the sequences that have begun as ``mode`` requires, and return what that costs."""
        cost = _Cost()
        if mode is Interrupt.INFLIGHT_RECOMPUTE:
            cost.recomputed_tokens = self._recompute([sequence for sequence in begun if sequence.row != NO_ROW])
        elif mode in (Interrupt.ABORT_RESUME, Interrupt.SLEEP):
            cost.recomputed_tokens = self._requeue(begun)
        elif mode is Interrupt.ABORT_RETRY:
            self._requeue(begun)
            wasted = [sequence.restart() for sequence in begun]
            cost.restarted, cost.wasted_tokens = sum(map(bool, wasted)), sum(wasted)
        return cost

    def _requeue(self, sequences: list[Sequence]) -> int:
        return sum(self._scheduler.requeue(sequence) for sequence in sequences if sequence.row != NO_ROW)

    def _recompute(self, sequences: list[Sequence]) -> int:
        """Let the contexts of ``sequences`` be computed again with the new weights, and return the number of tokens
        that this concerns. A sequence is recomputed in place, in its own blocks, unless it shares a block with a pinned
        sequence, which needs the old contents: then it goes back to the queue and gets other blocks."""
        pinned = [row for row, sequence in enumerate(self._rows.sequences) if sequence.pin is not None]
        needed = {block for row in pinned for block in self._rows.table(row)}
        away = [sequence for sequence in sequences if needed.intersection(self._rows.table(sequence.row))]
        here = [sequence for sequence in sequences if sequence not in away]
        return self._requeue(away) + sum(map(self._scheduler.recompute, here))


class LoadedWeights:
    """The weight receiver of an engine that keeps the weights of its model directory, which the model has loaded
    already."""

    def stage(self, update: WeightUpdate) -> None:
        """Raise :class:`~headrace.base.errors.WeightsError`: no version can be staged."""
        raise WeightsError(
            f"version {update.version} is sent to a server of fixed weights", remedy="start it with the new model"
        )

    def staged(self) -> dict[str, Tensor]:
        """Return no tensors."""
        return {}

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Accept the initial version, with nothing to exchange; raise :class:`~headrace.base.errors.WeightsError` for
        others."""
        if version != INITIAL:
            raise WeightsError(
                f"commit of version {version} of fixed weights", remedy="start the server with the new model"
            )
        return iter(())
