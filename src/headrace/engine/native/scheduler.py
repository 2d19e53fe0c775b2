"""The scheduler of the embedded engine, which decides which sequences are in the batch, which tokens each step
computes, and which cache blocks each sequence holds.

It works on numpy arrays and Python numbers only, without tensors and without a clock.

    waiting ──join──▶ rows ──▶ a step:  1. every row that decodes: one token; its next block, if it needs one
       ▲                │               2. rows whose context is not computed: pieces of it, by rank
       └──preempted─────┘               3. waiting sequences join, by rank, while rows, tokens and blocks last

The *rank* orders sequences by higher priority, then by arrival. A preempted sequence keeps its arrival number, so it is
before all sequences that arrived later. If the first sequence does not fit yet, no other sequence overtakes it, so that
no sequence starves. A sequence joins with all blocks that its tokens and one further token need. If there is no free
block for a row that decodes, the row with the last rank is preempted: it returns to the queue, and no sequence joins in
that step. The row with the first rank therefore always makes progress.

Two kinds of sequences are *deferred*, and other sequences may overtake them: a pinned sequence, while weights are
exchanged or no further copy of older weights is allowed; and, for one step, a sequence whose prompt a sibling computes
in that step.

Shape legend: R rows of the step, J rows that compute a piece of their context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from headrace.base.types.columns import IntColumn
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.native.blocks import BlockPool, Chain, count_blocks
from headrace.engine.native.rows import Flags, Index, Rows
from headrace.engine.native.sequence import NO_ROW, Sequence
from headrace.engine.native.siblings import Siblings, find_last_border
from headrace.engine.native.states import SequenceStates
from headrace.engine.native.waiting import Waiting
from headrace.models.paged.base import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The plan of one engine step: which rows compute how many new tokens, and which blocks and states are copied
    before."""

    rows_R: Index
    """The rows of the batch that compute tokens; rows with one new token first."""
    counts_R: Index
    """The number of new tokens of each row."""
    num_decode: int
    """The number of rows with one new token, which are the first of ``rows_R``."""
    copies: tuple[tuple[int, int], ...]
    """The pairs (source, target) of blocks to copy before the pass."""
    restores: tuple[tuple[int, int], ...]
    """The pairs (slot, row) of states of recurrent layers to copy before the pass."""
    joining: tuple[Sequence, ...]
    """The sequences that join the batch in this step."""
    drafts_R: Index | None = None
    """The number of drafted tokens (:mod:`.speculation`) among each row's new tokens; ``None``: there are no drafts."""

    def only(self, chosen_R: Flags) -> Schedule:
        """Return the part of the step that computes the rows for which ``chosen_R`` is true. It has no copies, restores
        and joining sequences, which the engine processes once for the whole step."""
        return Schedule(
            rows_R=self.rows_R[chosen_R],
            counts_R=self.counts_R[chosen_R],
            num_decode=int(chosen_R[: self.num_decode].sum()),
            copies=(),
            restores=(),
            joining=(),
            drafts_R=None if self.drafts_R is None else self.drafts_R[chosen_R],
        )

    def split(self, label_R: Index) -> list[tuple[int, Schedule]]:
        """Return one pair (value, part of the step) for each different value of ``label_R``; rows keep their order. The
        engine splits a step by the weights or the adapters that its rows need."""
        if (label_R == label_R[0]).all():
            return [(int(label_R[0]), self)]
        return [(label, self.only(label_R == label)) for label in np.unique(label_R).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allocation:
    """The cache blocks with which a sequence joins the batch."""

    table: list[int]
    """The blocks of the sequence, in the order of its tokens."""
    num_cached: int
    """The number of the sequence's first tokens that are in these blocks already, computed for another sequence."""
    chain: Chain
    """The sequence's prefix that the prefix cache has processed."""
    copy: tuple[int, int] | None = None
    """The pair (source, target) of a block to copy before the pass; ``None`` if there is none."""
    state: int | None = None
    """The slot of the state after the cached tokens; ``None`` without cached tokens or without recurrent layers."""


class Scheduler:
    """The scheduler of one engine. It owns the queue of waiting sequences, adds sequences to the ``rows`` of the batch
    with blocks from ``pool``, and plans each step, which computes at most ``max_step_tokens`` tokens.

    ``before_change`` is called with each sequence whose cached context will be freed or computed again, except when the
    sequence ends. ``may_pin`` returns whether a sequence can be pinned to the weights in use. ``states`` are the states
    of recurrent layers; ``None`` if the model has none.
    """

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        *,
        max_step_tokens: int,
        before_change: Callable[[Sequence], None],
        may_pin: Callable[[], bool],
        states: SequenceStates | None = None,
    ) -> None:
        """Make a scheduler with an empty queue. The arguments are described at the class."""
        self._rows = rows
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._before_change = before_change
        self._may_pin = may_pin
        self._states = states
        self._restores: list[tuple[int, int]] = []
        """The pairs (slot of a snapshot, row) of the states to restore before the pass that is being planned."""
        self._waiting = Waiting()
        self._queued_while_closed: dict[int, Sequence] | None = None
        """The sequences that must wait for :meth:`open`, by their number of arrival; ``None`` if the queue is open."""
        self._deferred: dict[int, Sequence] = {}
        """The sequences, by their number of arrival, that a step passed over: they wait for the leader of their
        siblings, or their request pins the weights and cannot be pinned now."""
        self._siblings = Siblings()
        """The leaders and followers of the step that is being planned."""
        self._last_misfit: tuple[int, int] | None = None
        """The number of arrival of the sequence that did not fit last, and the number of blocks that were available
        then; ``None`` if there is none."""
        self._decoding: frozenset[int] = frozenset()
        """The rows that decode in the step that is being planned."""
        self._dirty: list[int] = []
        """The released blocks that the engine must clear before its next pass."""
        self.version = NOT_SAMPLED
        """The version with which sequences that join now compute their context."""
        self.num_preempted = 0
        self.prompt_tokens = 0
        """The number of given tokens of all sequences that have joined."""
        self.cached_tokens = 0
        """The number of those given tokens that were in the cache."""
        self.prefill_s = 0.0
        """The time that steps spent on prompts and contexts, in seconds; see :meth:`account_time`."""
        self._context_share = 0.0
        """The share of prompt and context tokens among the tokens of the step planned last; 0 once its time is
        recorded."""

    @property
    def num_waiting(self) -> int:
        """The number of sequences that have no row, including the sequences that must not join yet."""
        return len(self._waiting) + len(self._queued_while_closed or ()) + len(self._deferred)

    @property
    def idle(self) -> bool:
        """Whether a step would compute nothing: no sequence has a row or may join the batch."""
        return not (self._rows.count or self._waiting or any(map(self._may_join, self._deferred.values())))

    def waiting_sequences(self) -> list[Sequence]:
        """Return all sequences that have no row."""
        return [*self._waiting, *self._deferred.values(), *(self._queued_while_closed or {}).values()]

    def started_sequences(self) -> list[Sequence]:
        """Return all sequences that have started: the sequences in rows, and the waiting ones that have sampled tokens
        already. A commit changes their caches and answers according to its mode."""
        return self._rows.sequences + self._waiting.started_sequences()

    def add(self, sequence: Sequence) -> None:
        """Add ``sequence`` to the queue. After :meth:`hold`, a sequence without sampled tokens waits until
        :meth:`open`."""
        if self._queued_while_closed is not None and sequence.answer is None:
            self._queued_while_closed[sequence.arrival] = sequence
        else:
            self._waiting.add(sequence)

    def hold(self, *, include_waiting: bool) -> None:
        """Close the queue until :meth:`open`: sequences that are added from now on must not join; with
        ``include_waiting``, sequences that wait now must not join either. Sequences that have sampled tokens already
        may still join. Called by a commit that waits until no sequence runs."""
        self._queued_while_closed = {}
        if include_waiting:
            waiting, self._waiting, self._deferred = self.waiting_sequences(), Waiting(), {}
            for sequence in waiting:
                self.add(sequence)

    def open(self) -> None:
        """End :meth:`hold`: every sequence may join again."""
        held, self._queued_while_closed = self._queued_while_closed or {}, None
        for sequence in held.values():
            self.add(sequence)

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Remove ``sequences`` from the rows and from every queue, because they end early."""
        leaving = list(sequences)
        self.remove([sequence.row for sequence in leaving if sequence.row != NO_ROW])
        for sequence in leaving:
            self._waiting.remove(sequence)
            self._deferred.pop(sequence.arrival, None)
            if self._queued_while_closed is not None:
                self._queued_while_closed.pop(sequence.arrival, None)

    def remove(self, rows: list[int] | Index) -> None:
        """Remove the sequences in ``rows`` from the batch and release their blocks, because they have ended or return
        to the queue. The last rows move into the gaps."""
        for row in rows:
            table = self._rows.table(row)
            if self._rows.computed_R[row] < self._rows.length_R[row] - 1:
                self._pool.taint(table)  # its logits were not checked: the blocks may hold NaN or infinity
            self._pool.release(table)
        self._dirty += self._pool.pop_dirty()
        if len(rows):
            self._rows.remove(rows)

    def pop_dirty(self) -> list[int]:
        """Remove and return the released blocks that may hold NaN or infinity, which must be cleared before the next
        pass."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def requeue(self, sequence: Sequence) -> int:
        """Move ``sequence`` with its answer from its row back to the queue. Return the number of tokens whose cached
        context is freed."""
        self._before_change(sequence)
        row = sequence.row
        lost = int(self._rows.computed_R[row])
        sequence.answer = self._rows.answer(row)
        self.remove([row])
        self._waiting.add(sequence)
        return lost

    def recompute(self, sequence: Sequence) -> int:
        """Mark the context of a running sequence to be computed again in its own blocks, in the next steps, under the
        weights now in use. Return the number of tokens whose cached context becomes invalid."""
        self._before_change(sequence)
        lost = int(self._rows.computed_R[sequence.row])
        self._rows.computed_R[sequence.row] = 0
        sequence.chain = Chain(self.version, sequence.salt)
        return lost

    def borrow(self, count: int) -> list[int]:
        """Allocate ``count`` blocks for scoring between two steps, until :meth:`return_blocks`. If blocks are missing,
        the rows with the last ranks are preempted; the pool must have at least ``count`` blocks in all."""
        while True:
            blocks = self._pool.allocate(count)
            if blocks is not None:
                return blocks
            self._preempt_last()

    def return_blocks(self, blocks: list[int]) -> None:
        """Return to the pool the blocks that :meth:`borrow` allocated, after the scoring. Their contents are undefined,
        so :meth:`pop_dirty` returns them to the engine, which clears them before its next pass."""
        self._pool.taint(blocks)
        self._pool.release(blocks)
        self._dirty += self._pool.pop_dirty()

    def _preempt_last(self) -> None:
        """Preempt the running sequence with the last rank: move it with its answer back to the queue, to free its
        blocks."""
        self.requeue(self._rows.sequences[self._rows.sort_by_rank(np.arange(self._rows.count))[-1]])
        self.num_preempted += 1

    def schedule(self) -> Schedule:
        """Return the plan of the next step, after adding sequences to the batch and allocating blocks. The plan is not
        empty if any sequence has a row or may join the batch."""
        rows = self._rows
        self._siblings = Siblings(by_snapshot=self._states is not None)
        self._restores = []
        has_preempted = self._grow()
        is_decoding = rows.decoding()
        decoding = np.flatnonzero(is_decoding)
        self._decoding = frozenset(decoding.tolist())
        self._register_decoding(decoding)
        budget = self._max_step_tokens - len(decoding)
        pieces: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        num_before = rows.count
        for row in [] if len(decoding) == num_before else rows.sort_by_rank(np.flatnonzero(~is_decoding)).tolist():
            if budget <= 0:
                break
            if not rows.computed_R[row]:
                self._match_recomputed(row)
            budget -= self._schedule_piece(row, budget, pieces)
            if self._states is not None:
                self._siblings.lead(rows.sequences[row], int(rows.computed_R[row]) + pieces[-1][1])
        self._return_deferred()
        while not has_preempted and budget > 0:
            joined = self._join_first()
            if joined is None:
                break
            row, allocation = joined
            copies += [allocation.copy] if allocation.copy is not None else []
            budget -= self._schedule_piece(row, budget, pieces)
            self._siblings.lead(rows.sequences[row], int(rows.computed_R[row]) + pieces[-1][1])
        self._context_share = 0.0
        if not pieces:
            ones = np.ones(len(decoding), np.int64)
            return Schedule(
                rows_R=decoding, counts_R=ones, num_decode=len(decoding), copies=(), restores=(), joining=()
            )  # fmt: skip
        rows_J, counts_J = np.array(pieces, np.int64).T
        self._context_share = float(counts_J.sum() / (counts_J.sum() + len(decoding)))
        return Schedule(
            rows_R=np.concatenate([decoding, rows_J]),
            counts_R=np.concatenate([np.ones(len(decoding), np.int64), counts_J]),
            num_decode=len(decoding),
            copies=tuple(copies),
            restores=tuple(self._restores),
            joining=tuple(rows.sequences[num_before:]),
        )

    def account_time(self, seconds: float) -> float:
        """Add to ``prefill_s`` the share of a step's ``seconds`` that its prompt and context tokens have among all its
        tokens. Return ``seconds``."""
        self.prefill_s += seconds * self._context_share
        self._context_share = 0.0
        return seconds

    def _grow(self) -> bool:
        """Allocate a block for every row whose newest token needs a new one, in the order of rank. Return whether a row
        was preempted to free blocks, so that no sequence may join in this step."""
        rows = self._rows
        needing_block = np.flatnonzero(rows.length_R[: rows.count] > rows.num_blocks_R[: rows.count] * BLOCK)
        if not len(needing_block):
            return False
        has_preempted = False
        for sequence in [rows.sequences[row] for row in rows.sort_by_rank(needing_block)]:
            while sequence.row != NO_ROW:
                fresh = self._pool.allocate(1)
                if fresh is not None:
                    rows.extend(sequence.row, fresh)
                    break
                self._preempt_last()
                has_preempted = True
        return has_preempted

    def _register_decoding(self, decoding: Index) -> None:
        """Register in the prefix cache the blocks that the newest tokens of the rows ``decoding`` fill in this step,
        and plan snapshots of the states there."""
        lengths = self._rows.length_R[decoding]
        for row in decoding[lengths % BLOCK == 0].tolist():
            self._register(row, int(self._rows.length_R[row]))
            self._plan_snapshot(row, int(self._rows.length_R[row]))

    def register_computed(self, rows: Index) -> None:
        """Register in the prefix cache the blocks of ``rows`` that accepted drafted tokens have filled in a pass. All
        other blocks are registered by :meth:`schedule` before the pass."""
        for row in rows.tolist():
            self._register(row, int(self._rows.computed_R[row]))

    def _register(self, row: int, end: int) -> None:
        """Register the full blocks of the row's first ``end`` tokens in the prefix cache, if the weights in use compute
        them."""
        sequence = self._rows.sequences[row]
        if sequence.chain.version == self._pool.version:
            self._pool.register(sequence.chain, self._rows.table(row), self._rows.ids_RC[row, :end])

    def _plan_snapshot(self, row: int, end: int) -> None:
        """Plan a snapshot of the states of the row's recurrent layers after this step, if its first ``end`` tokens end
        with a registered block. The step computes the tokens up to ``end``. After the given tokens, the new snapshot
        replaces the previous one of the row."""
        sequence = self._rows.sequences[row]
        chain = sequence.chain
        if self._states is None or chain.version != self._pool.version or chain.length * BLOCK != end:
            return
        snapshots = self._states.snapshots
        if end >= len(sequence.given_ids_T):
            snapshots.drop(sequence.border)
            sequence.border = chain.digest
        snapshots.plan(chain.digest, row)

    def _schedule_piece(self, row: int, budget: int, pieces: list[tuple[int, int]]) -> int:
        """Schedule the next piece of the row's context, at most ``budget`` tokens: append (row, count) to ``pieces``
        and return the count."""
        rows = self._rows
        start = int(rows.computed_R[row])
        length = int(rows.length_R[row])
        count = min(budget, length - start)
        if self._states is not None:  # end the piece at a block border, where a snapshot is possible
            border = find_last_border(min(start + count + 1, length))
            count = border - start if border > start else count
        self._register(row, start + count)
        self._plan_snapshot(row, start + count)
        pieces.append((row, count))
        return count

    def _match_recomputed(self, row: int) -> None:
        """Replace the first blocks of ``row``, whose context has to be recomputed, by cached blocks that another
        sequence has recomputed already."""
        rows, sequence = self._rows, self._rows.sequences[row]
        blocks = self._pool.match(sequence.chain, rows.get_ids(row))
        self._pool.release(rows.table(row)[: len(blocks)])
        rows.tables_RB[row, : len(blocks)] = blocks
        rows.computed_R[row] = len(blocks) * BLOCK
        if (state := self._find_snapshot(sequence.chain)) is not None:
            self._restores.append((state, row))

    def _find_snapshot(self, chain: Chain) -> int | None:
        """Return the slot of the snapshot at the end of ``chain``, which has just been matched; ``None`` if the chain
        is empty or the model has no recurrent layers."""
        return None if self._states is None or not chain.length else self._states.snapshots.find(chain.digest)

    def _return_deferred(self) -> None:
        """Move the deferred sequences that may join now back to the queue."""
        for sequence in [each for each in self._deferred.values() if self._may_join(each)]:
            del self._deferred[sequence.arrival]
            self._waiting.add(sequence)

    def _may_join(self, sequence: Sequence) -> bool:
        """Return whether ``sequence`` may join as soon as there is space: its request does not pin its weights, or it
        is pinned already, or it can be pinned to the weights in use."""
        return not sequence.request.pinned or sequence.pin is not None or self._may_pin()

    def _join_first(self) -> tuple[int, _Allocation] | None:
        """Add the first sequence of the queue that need not be deferred to the batch. Return its row and its blocks;
        ``None`` if there is no such sequence, or not enough rows or blocks."""
        while self._waiting and self._rows.count + self._siblings.num_waiting < self._rows.num_rows:
            sequence = self._waiting.first()
            if self._siblings.follow(sequence) or not self._may_join(sequence):
                self._waiting.remove(sequence)
                self._deferred[sequence.arrival] = sequence
                continue
            allocation = self._allocate(sequence)
            return None if allocation is None else (self._join(sequence, allocation), allocation)
        return None

    def _join(self, sequence: Sequence, allocation: _Allocation) -> int:
        """Move ``sequence`` from the queue to the first unused row, with the blocks of ``allocation``, and return the
        row."""
        self._waiting.remove(sequence)
        if sequence.answer is None:
            self.prompt_tokens += len(sequence.given_ids_T)
            self.cached_tokens += allocation.num_cached
        sequence.parent, sequence.parent_ids_T, sequence.required_version = None, None, None
        sequence.chain = allocation.chain
        if sequence.request.pinned and sequence.pin is None:
            sequence.pin = self.version
        self._rows.add(sequence, allocation.table, allocation.num_cached)
        if allocation.state is not None:
            self._restores.append((allocation.state, sequence.row))
        return sequence.row

    def _allocate(self, sequence: Sequence) -> _Allocation | None:
        """Allocate blocks for all tokens of ``sequence`` and one more; return ``None`` if there are not enough. A
        sequence that did not fit is tried again only when more blocks are available than at the last attempt."""
        before = self._pool.available
        if self._rows.count and self._last_misfit is not None:
            arrival, num_then = self._last_misfit
            if arrival == sequence.arrival and before <= num_then:
                return None
        allocation = self._try_allocate(sequence)
        self._last_misfit = (sequence.arrival, before) if allocation is None else None
        return allocation

    def _try_allocate(self, sequence: Sequence) -> _Allocation | None:
        """Allocate blocks for ``sequence``: blocks shared with its parent or with cached prefixes, followed by new
        ones. If there are too few, return ``None`` and allocate nothing."""
        ids_T = sequence.ids()
        needed = count_blocks(min(len(ids_T) + 1, sequence.max_length - 1))
        version = self.version if sequence.pin is None else sequence.pin
        allocation = self._share_with_parent(sequence, ids_T, version) or self._share_with_ended_parent(
            sequence, ids_T, version
        )
        if allocation is None:
            chain = Chain(version, sequence.salt)
            matched = self._pool.claim(chain, ids_T, needed)
            if matched is None:
                return None
            state = self._find_snapshot(chain)
            return _Allocation(table=matched[0], num_cached=matched[1] * BLOCK, chain=chain, state=state)
        fresh = self._pool.allocate(needed - len(allocation.table))
        if fresh is None:
            self._pool.release(allocation.table)
            return None
        allocation.table.extend(fresh)
        return allocation

    def _share_with_parent(self, sequence: Sequence, ids_T: IntColumn, version: int) -> _Allocation | None:
        """Return blocks shared with the running parent of a fork or sibling. A partly filled last block is copied.
        ``ids_T`` are the tokens of ``sequence``, and ``version`` is the version that computes it. Return ``None`` if no
        parent decodes, if the parent's cache has other weights or other tokens, or if no block is free for the copy."""
        parent, rows = sequence.parent, self._rows
        if parent is None or parent.salt != sequence.salt:
            return None
        if parent.row not in self._decoding:  # this pass may still fill its last block, after the copy
            return None
        if parent.chain.version != version and not sequence.reuses_stale:
            return None
        num_cached = min(int(rows.computed_R[parent.row]), len(ids_T) - 1)
        if not np.array_equal(rows.ids_RC[parent.row, :num_cached], ids_T[:num_cached]):
            return None  # the parent has restarted with other tokens
        if self._states is not None and num_cached != rows.computed_R[parent.row]:
            return None  # the parent's state includes more tokens
        forked = self._pool.fork(rows.table(parent.row), num_cached)
        if forked is None:
            return None
        chain = Chain(parent.chain.version, sequence.salt)
        state = None if self._states is None else int(self._states.slots_R[parent.row])
        return _Allocation(table=forked.table, num_cached=num_cached, chain=chain, copy=forked.copy, state=state)

    def _share_with_ended_parent(self, sequence: Sequence, ids_T: IntColumn, version: int) -> _Allocation | None:
        """Return blocks shared with the parent of a fork that has ended, but is still in the prefix cache. The last
        block, of which the fork uses a part, is found by the parent's tokens and copied. Return ``None`` if the fork
        uses only whole blocks, which the caller then matches like any prefix, or if the parent's blocks have been
        evicted. The arguments are the same as in :meth:`_share_with_parent`."""
        parent_ids_T, num_cached = sequence.parent_ids_T, len(ids_T) - 1
        partial = num_cached % BLOCK and self._states is None  # states exist only at the ends of blocks
        if parent_ids_T is None or not partial or version != self._pool.version:
            return None
        num_blocks, chain = count_blocks(num_cached), Chain(version, sequence.salt)
        blocks = self._pool.match(chain, parent_ids_T[: num_blocks * BLOCK + 1])
        whole = len(blocks) == num_blocks and self._pool.held_once(blocks[-1])
        forked = self._pool.fork(blocks, num_cached) if whole else None
        self._pool.release(blocks)
        if forked is None:
            return None
        chain = Chain(version, sequence.salt)
        return _Allocation(table=forked.table, num_cached=num_cached, chain=chain, copy=forked.copy)
