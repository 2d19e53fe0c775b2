"""The version in use, and the exchange (*swap*) of weights: what an engine does for a commit, by its mode.

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
    """The receiving side of a weight transport: it brings new versions into memory and puts them into the model."""

    def stage(self, update: WeightUpdate) -> None:
        """Bring the version ``update`` into memory and verify it, in any thread. Raises
        :class:`~headrace.base.errors.WeightsError` if it cannot be used."""
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
    """A commit that has begun and is not complete."""

    version: int
    """The version that comes into use."""
    mode: Interrupt
    parts: Iterator[None]
    """Exchanges one more part of the parameters each time it is advanced."""
    began_s: float
    """The time at which the commit was ordered, on the engine's clock."""
    gap_s: float = 0.0
    """How long the step loop has stood still for it, in seconds."""


@dataclass(slots=True, kw_only=True)
class _Cost:
    """The number of sequences and tokens that lose something by a commit."""

    restarted: int = 0
    """The number of sequences that lost sampled tokens and begin again."""
    wasted_tokens: int = 0
    """The number of those sampled tokens."""
    recomputed_tokens: int = 0
    """The number of tokens whose keys and values have to be computed again."""


class Swaps:
    """The owner of the version in use: it carries out the commits of one engine. It is not thread-safe; all calls
    happen between two passes."""

    def __init__(
        self, receiver: WeightReceiver, scheduler: Scheduler, rows: Rows, pool: BlockPool, clock: Clock
    ) -> None:
        """Make the owner of an engine that has no weights yet. ``receiver`` has the staged weights; the sequences are
        in ``scheduler`` and ``rows``, and ``pool`` has the cached blocks."""
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
        """Whether a streamed commit is under way: some parameters have the new version, the others the old one."""
        return self._pending is not None and self._pending.mode is Interrupt.STREAM

    def begin(self, version: int, mode: Interrupt, stream_steps: int, paused_s: float | None = None) -> None:
        """Begin to use the staged ``version`` in ``mode``. A streamed commit is spread over ``stream_steps`` steps.
        ``paused_s`` is the time at which the engine was paused, ``None`` if it is not: the pause counts as time that
        the step loop stood still. Raises :class:`~headrace.base.errors.WeightsError` if an earlier commit is not
        complete, or the version is not staged."""
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
        """Complete a streamed commit, if one is under way: exchange the parts that are left at once."""
        if self.streaming:
            self._swap(self._clock.now())

    def settle(self) -> None:
        """Complete a commit that has begun, if no sequence runs or may join any more; called after each step and each
        removal."""
        if self._pending is None or not self._scheduler.idle:
            return
        self._scheduler.open()
        self._swap(self._clock.now())

    def pop_reports(self) -> list[SwapReport]:
        """Remove and return the reports of the commits that have been completed, in their order."""
        done, self._done = self._done, []
        return done

    def _swap(self, stood_since_s: float) -> None:
        """Complete the pending commit: exchange the parameters that are left, treat the sequences that have begun as
        its mode requires, and store its report. ``stood_since_s`` is the time since which the step loop stands still,
        on the engine's clock."""
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
        """Let the next tokens carry ``stamp`` as their version, and invalidate all cached blocks; blocks of
        ``pool_version`` are cached from now on."""
        self.stamp = self._scheduler.version = stamp
        self._pool.forget(pool_version)

    def _apply_mode(self, mode: Interrupt, begun: list[Sequence]) -> _Cost:
        """Treat ``begun``, the sequences with a cached context or an answer, as the commit mode requires, and return
        what they lose by it."""
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
        """Move those of ``sequences`` that are in rows back to the queue with their answers. Return how many computed
        tokens that discards."""
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
    """The weight receiver of a server with fixed weights: it accepts only the commit of version 0, the weights that the
    model has loaded from its directory already."""

    def stage(self, update: WeightUpdate) -> None:
        """Raise :class:`~headrace.base.errors.WeightsError`: a server of fixed weights takes no new version."""
        raise WeightsError(
            f"version {update.version} is sent to a server of fixed weights", remedy="start it with the new model"
        )

    def staged(self) -> dict[str, Tensor]:
        """Return an empty dict: no tensors are staged."""
        return {}

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Accept the initial version, with nothing to exchange; raise :class:`~headrace.base.errors.WeightsError` for
        others."""
        if version != INITIAL:
            raise WeightsError(
                f"commit of version {version} of fixed weights", remedy="start the server with the new model"
            )
        return iter(())
