"""The version in use of an engine, and the exchange (*swap*) of weights for a commit, in each commit mode.

    begin ──▶ at once: inflight · inflight_recompute · abort_resume · abort_retry · sleep ───────────▶ swap ──▶ report
      ├─────▶ drain, batch: close the queue ──settle: no sequence runs any more──▶ open the queue ──▶ swap
      └─────▶ stream: before each step, advance exchanges one part of the parameters, until all are exchanged

In every mode, cached blocks of the old weights cannot be matched after the commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.base.clock import Clock
from headrace.base.errors import WeightsError
from headrace.base.types.versions import INITIAL, NOT_SAMPLED, mixed_version
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.native.blocks import BlockPool
from headrace.engine.native.rows import Rows
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.sequence import NO_ROW, Sequence

_WAITING_MODES = frozenset({Interrupt.DRAIN, Interrupt.BATCH})
"""The modes that wait until no sequence runs."""


class WeightReceiver(Protocol):
    """The receiving side of a weight transport: it loads new versions into memory, and points the model's parameters to
    them."""

    def stage(self, update: WeightUpdate) -> None:
        """Load the version ``update`` into memory and verify it; may be called in any thread. Raises
        :class:`~headrace.base.errors.WeightsError` if the version cannot be used."""
        ...

    def staged_tensors(self) -> Mapping[str, Tensor]:
        """Return the staged tensors that are not in use yet, by the names of the model's parameters."""
        ...

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Return an iterator that points the model's parameters to the staged version, one of ``parts`` parts each time
        it is advanced. Raises :class:`~headrace.base.errors.WeightsError` at once if the version is not staged."""
        ...


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A commit that has started and is not complete."""

    version: int
    """The version that the commit puts into use."""
    mode: Interrupt
    parts: Iterator[None]
    """An iterator that exchanges one more part of the parameters each time it is advanced."""
    began_s: float
    """The time at which the commit was ordered, on the engine's clock."""
    gap_s: float = 0.0
    """The time that the step loop has stood still for this commit, in seconds."""


@dataclass(slots=True, kw_only=True)
class _Cost:
    """The costs of a commit: the numbers of restarted sequences, wasted tokens and recomputed tokens."""

    restarted: int = 0
    """The number of sequences that lost sampled tokens and start again."""
    wasted_tokens: int = 0
    """The number of sampled tokens that the restarted sequences lost."""
    recomputed_tokens: int = 0
    """The number of tokens whose keys and values have to be computed again."""


class Swaps:
    """The commits of one engine, and its version in use. It is not thread-safe; all methods are called between two
    passes."""

    def __init__(
        self, receiver: WeightReceiver, scheduler: Scheduler, rows: Rows, pool: BlockPool, clock: Clock
    ) -> None:
        """Create the record of an engine without committed weights. ``receiver`` has the staged weights; the sequences
        are in ``scheduler`` and ``rows``; ``pool`` has the cached blocks; ``clock`` measures commits."""
        self._receiver = receiver
        self._scheduler = scheduler
        self._rows = rows
        self._pool = pool
        self._clock = clock
        self._pending: _Pending | None = None
        """The commit that is in progress; ``None`` if there is none."""
        self._done: list[SwapReport] = []
        """The reports of ended commits that the engine has not returned yet."""
        self.version = NOT_SAMPLED
        """The committed version."""
        self.stamp = NOT_SAMPLED
        """The version with which the next tokens are recorded: the committed version, or a mixed one during a streamed
        commit."""
        self.num_restarted = 0
        self.wasted_tokens = 0

    @property
    def streaming(self) -> bool:
        """Whether a streamed commit is in progress: some parameters have the new version, and the other parameters the
        old one."""
        return self._pending is not None and self._pending.mode is Interrupt.STREAM

    def begin(self, version: int, mode: Interrupt, stream_steps: int, paused_s: float | None = None) -> None:
        """Begin to use the staged ``version`` in ``mode``. A streamed commit is spread over ``stream_steps`` steps.
        ``paused_s`` is the time at which the engine was paused, in seconds of its clock; ``None`` if it is not paused.
        The pause counts as time that the step loop stood still. Raises :class:`~headrace.base.errors.WeightsError` if
        an earlier commit is not complete, or the version is not staged."""
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
            self._use(mixed_version(self.version), pool_version=version)
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
        """Complete a streamed commit, if one is in progress: exchange all remaining parts at once."""
        if self.streaming:
            self._swap(self._clock.now())

    def settle(self) -> None:
        """Complete the pending commit, if there is one and no sequence runs or may join; called after each step and
        each removal."""
        if self._pending is None or not self._scheduler.idle:
            return
        self._scheduler.open()
        self._swap(self._clock.now())

    def pop_reports(self) -> list[SwapReport]:
        """Remove and return the reports of the commits that have been completed, in their order."""
        done, self._done = self._done, []
        return done

    def _swap(self, stopped_s: float) -> None:
        """Complete the pending commit: exchange the remaining parameters, change the started sequences as its mode
        requires, and store its report. ``stopped_s`` is the time at which the step loop stopped for it, in seconds of
        the engine's clock."""
        pending, started_s = self._pending, self._clock.now()
        assert pending is not None
        for _ in pending.parts:
            pass
        self._pending = None
        self.version = pending.version
        self._use(pending.version, pool_version=pending.version)
        started = [sequence for sequence in self._scheduler.started_sequences() if sequence.pin is None]
        cost = self._apply_mode(pending.mode, started)
        self.num_restarted += cost.restarted
        self.wasted_tokens += cost.wasted_tokens
        self._done.append(
            SwapReport(
                version=pending.version,
                gap_s=pending.gap_s + self._clock.now() - stopped_s,
                carried_over=len(started) - cost.restarted,
                restarted=cost.restarted,
                mode=pending.mode,
                waited_s=started_s - pending.began_s,
                wasted_tokens=cost.wasted_tokens,
                recomputed_tokens=cost.recomputed_tokens,
            )
        )

    def _use(self, stamp: int, *, pool_version: int) -> None:
        """Record the next tokens with the version ``stamp``, and invalidate all cached blocks. From now on, blocks
        computed under ``pool_version`` are cached."""
        self.stamp = self._scheduler.version = stamp
        self._pool.forget(pool_version)

    def _apply_mode(self, mode: Interrupt, started: list[Sequence]) -> _Cost:
        """Recompute, requeue or restart the sequences ``started``, which have a cached context or an answer, as the
        commit ``mode`` requires. Return the costs."""
        cost = _Cost()
        if mode is Interrupt.INFLIGHT_RECOMPUTE:
            cost.recomputed_tokens = self._recompute([sequence for sequence in started if sequence.row != NO_ROW])
        elif mode in (Interrupt.ABORT_RESUME, Interrupt.SLEEP):
            cost.recomputed_tokens = self._requeue(started)
        elif mode is Interrupt.ABORT_RETRY:
            self._requeue(started)
            wasted = [sequence.restart() for sequence in started]
            cost.restarted, cost.wasted_tokens = sum(map(bool, wasted)), sum(wasted)
        return cost

    def _requeue(self, sequences: list[Sequence]) -> int:
        """Move the sequences that have a row back to the queue with their answers. Return the number of tokens whose
        cached context is freed."""
        return sum(self._scheduler.requeue(sequence) for sequence in sequences if sequence.row != NO_ROW)

    def _recompute(self, sequences: list[Sequence]) -> int:
        """Mark the contexts of ``sequences`` to be computed again with the new weights, and return the number of tokens
        to recompute. A sequence is recomputed in its own blocks, unless it shares a block with a pinned sequence, which
        needs the old contents. Such a sequence returns to the queue and gets other blocks."""
        pinned = [row for row, sequence in enumerate(self._rows.sequences) if sequence.pin is not None]
        pinned_blocks = {block for row in pinned for block in self._rows.table(row)}
        to_requeue = [sequence for sequence in sequences if pinned_blocks.intersection(self._rows.table(sequence.row))]
        to_recompute = [sequence for sequence in sequences if sequence not in to_requeue]
        return self._requeue(to_requeue) + sum(map(self._scheduler.recompute, to_recompute))


class LoadedWeights:
    """The weight receiver of a server with fixed weights. It accepts only the commit of version 0, whose weights the
    model has loaded from its directory."""

    def stage(self, update: WeightUpdate) -> None:
        """Raise :class:`~headrace.base.errors.WeightsError` for every ``update``: a server with fixed weights accepts
        no new version."""
        raise WeightsError(
            f"version {update.version} is sent to a server of fixed weights", remedy="start it with the new model"
        )

    def staged_tensors(self) -> dict[str, Tensor]:
        """Return an empty dict: no tensors are staged."""
        return {}

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Return an empty iterator for the initial version, whose weights are in the model already. Raises
        :class:`~headrace.base.errors.WeightsError` for other versions."""
        if version != INITIAL:
            raise WeightsError(
                f"commit of version {version} of fixed weights", remedy="start the server with the new model"
            )
        return iter(())
