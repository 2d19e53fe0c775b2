"""Decides who is in the batch, what each step computes, and whose blocks are whose. Numbers only: no tensors, no time.

    waiting ──join──▶ rows ──▶ a step:  1. every row that decodes: one token; its next block, if it needs one
       ▲                │               2. rows whose context is not computed: pieces of it, by rank
       └──preempted─────┘               3. who waits joins, by rank, while rows, tokens and blocks last

By rank means: higher priority first, then order of arrival; a sequence that was preempted keeps its arrival, and so
stands before all that came after it. Nobody overtakes whom does not fit yet: nobody starves. A sequence joins with all
the blocks that its tokens and one more need. When a row that decodes finds no free block, the row of the last rank goes
back to wait, and in that step nobody joins. The row of the first rank therefore always moves on.
Two may have to step aside, and others overtake them: who is to stay under the weights it begins with, while weights are
exchanged, and while as many older ones are kept as may be; and, for one step, whose context another computes in it.

Shape legend: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from headrace.base.types.columns import IntColumn
from headrace.base.types.versions import NOT_SAMPLED
from headrace.engine.native.blocks import BlockPool, Chain, blocks_for
from headrace.engine.native.rows import Flags, Index, Rows
from headrace.engine.native.sequence import NO_ROW, Sequence
from headrace.engine.native.siblings import Siblings
from headrace.engine.native.waiting import Waiting
from headrace.models.paged.base import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What one step computes."""

    rows_R: Index
    """Rows of the batch; those with one new token first."""
    counts_R: Index
    """New tokens of each."""
    num_decode: int
    """The first rows, with one new token each."""
    copies: tuple[tuple[int, int], ...]
    """Blocks to copy before the pass: (source, target)."""
    joined: tuple[Sequence, ...]
    """Those that have just come into rows."""

    def only(self, chosen_R: Flags) -> Schedule:
        """The part of the step that these rows are."""
        return Schedule(
            rows_R=self.rows_R[chosen_R],
            counts_R=self.counts_R[chosen_R],
            num_decode=int(chosen_R[: self.num_decode].sum()),
            copies=(),
            joined=(),
        )

    def split(self, label_R: Index) -> list[tuple[int, Schedule]]:
        """The parts of the step whose rows have the same label, with it, in its order."""
        if (label_R == label_R[0]).all():
            return [(int(label_R[0]), self)]
        return [(label, self.only(label_R == label)) for label in np.unique(label_R).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What a sequence begins with."""

    table: list[int]
    num_cached: int
    chain: Chain
    copy: tuple[int, int] | None = None


class Scheduler:
    """The queue in front of the rows. ``before_change`` hears of each sequence whose cached context is about to be lost
    or computed again, unless it ends; ``may_pin`` says whether a sequence may stay under the present weights."""

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        max_step_tokens: int,
        before_change: Callable[[Sequence], None],
        may_pin: Callable[[], bool],
    ) -> None:
        self._rows = rows
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._before_change = before_change
        self._may_pin = may_pin
        self._waiting = Waiting()
        self._held: dict[int, Sequence] | None = None
        self._aside: dict[int, Sequence] = {}
        self._siblings = Siblings()
        self._stuck: tuple[int, int] | None = None  # who did not fit, and how many blocks there were
        self._decoding: Index = np.zeros(0, np.int64)
        self._dirty: list[int] = []
        self.version = NOT_SAMPLED
        """What computes the context of sequences that join now."""
        self.num_preempted = 0
        self.prompt_tokens = 0
        """Of the sequences that have joined."""
        self.cached_tokens = 0
        """Of these, how many were in the cache."""
        self.prefill_s = 0.0
        """Time of steps that went to contexts, as their tokens share it."""
        self._context_share = 0.0

    @property
    def num_waiting(self) -> int:
        """Sequences that are in no row."""
        return len(self._waiting) + len(self._held or ()) + len(self._aside)

    @property
    def idle(self) -> bool:
        """Whether nothing is in a row or may join one."""
        return not (self._rows.count or self._waiting or any(map(self._may_return, self._aside.values())))

    def waiting(self) -> list[Sequence]:
        """All sequences that are in no row."""
        return [*self._waiting, *self._aside.values(), *(self._held or {}).values()]

    def begun(self) -> list[Sequence]:
        """All sequences in rows, and those that had been."""
        return self._rows.sequences + self._waiting.begun()

    def add(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait."""
        if self._held is not None and sequence.answer is None:
            self._held[sequence.arrival] = sequence
        else:
            self._waiting.add(sequence)

    def hold(self, *, everyone: bool) -> None:
        """From now on nobody new may join until :meth:`open`; nor may, with ``everyone``, those who wait now and have
        not begun."""
        self._held = {}
        if everyone:
            waiting, self._waiting, self._aside = self.waiting(), Waiting(), {}
            for sequence in waiting:
                self.add(sequence)

    def open(self) -> None:
        """Everyone may join again."""
        held, self._held = self._held or {}, None
        for sequence in held.values():
            self.add(sequence)

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Forget these, wherever they are."""
        gone = list(sequences)
        self.leave([sequence.row for sequence in gone if sequence.row != NO_ROW])
        for sequence in gone:
            self._waiting.remove(sequence)
            self._aside.pop(sequence.arrival, None)
            if self._held is not None:
                self._held.pop(sequence.arrival, None)

    def leave(self, rows: list[int] | Index) -> None:
        """Free these rows and their blocks."""
        for row in rows:
            table = self._rows.table(row)
            if self._rows.computed_R[row] < self._rows.length_R[row] - 1:
                self._pool.taint(table)  # nobody has seen the logits: they may hold what is not finite
            self._pool.release(table)
        self._dirty += self._pool.take_dirty()
        if len(rows):
            self._rows.leave(rows)

    def take_dirty(self) -> list[int]:
        """Blocks that may hold what is not finite, and must be cleared before the next pass."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def requeue(self, sequence: Sequence) -> int:
        """Back from its row to the queue, with its answer; how many computed tokens that costs."""
        self._before_change(sequence)
        row = sequence.row
        lost = int(self._rows.computed_R[row])
        sequence.answer = self._rows.answer(row)
        self.leave([row])
        self._waiting.add(sequence)
        return lost

    def recompute(self, sequence: Sequence) -> int:
        """Have its context computed again in its own blocks; how many tokens that is."""
        self._before_change(sequence)
        lost = int(self._rows.computed_R[sequence.row])
        self._rows.computed_R[sequence.row] = 0
        sequence.chain = Chain(self.version, sequence.salt)
        return lost

    def borrow(self, count: int) -> list[int]:
        """So many blocks of the pool, which has them; the rows of the last ranks make room."""
        while True:
            blocks = self._pool.take(count)
            if blocks is not None:
                return blocks
            self._preempt_last()

    def give_back(self, blocks: list[int]) -> None:
        """They were borrowed; what is in them may be anything."""
        self._pool.taint(blocks)
        self._pool.release(blocks)
        self._dirty += self._pool.take_dirty()

    def _preempt_last(self) -> None:
        self.requeue(self._rows.sequences[self._rows.by_rank(np.arange(self._rows.count))[-1]])
        self.num_preempted += 1

    def schedule(self) -> Schedule:
        """Decide the next step. It computes something as long as anything is in a row or may join one."""
        rows = self._rows
        self._siblings = Siblings()
        crowded = self._grow()
        ready = rows.decoding()
        decoding = self._decoding = np.flatnonzero(ready)
        self._register_decoding(decoding)
        budget = self._max_step_tokens - len(decoding)
        later: list[tuple[int, int]] = []
        copies: list[tuple[int, int]] = []
        num_before = rows.count
        for row in [] if len(decoding) == num_before else rows.by_rank(np.flatnonzero(~ready)).tolist():
            if budget <= 0:
                break
            if not rows.computed_R[row]:
                self._share_again(row)
            budget -= self._piece(row, budget, later)
        self._call_back()
        while not crowded and budget > 0:
            joined = self._join_first()
            if joined is None:
                break
            row, claim = joined
            copies += [claim.copy] if claim.copy is not None else []
            budget -= self._piece(row, budget, later)
            self._siblings.lead(rows.sequences[row], int(rows.computed_R[row]) + later[-1][1])
        self._context_share = 0.0
        if not later:
            ones = np.ones(len(decoding), np.int64)
            return Schedule(rows_R=decoding, counts_R=ones, num_decode=len(decoding), copies=(), joined=())
        rows_J, counts_J = np.array(later, np.int64).T
        self._context_share = float(counts_J.sum() / (counts_J.sum() + len(decoding)))
        return Schedule(
            rows_R=np.concatenate([decoding, rows_J]),
            counts_R=np.concatenate([np.ones(len(decoding), np.int64), counts_J]),
            num_decode=len(decoding),
            copies=tuple(copies),
            joined=tuple(rows.sequences[num_before:]),
        )

    def took(self, seconds: float) -> float:
        """The step took so long, which is returned."""
        self.prefill_s += seconds * self._context_share
        self._context_share = 0.0
        return seconds

    def _grow(self) -> bool:
        """A block for every row that needs one; whether somebody had to leave for it."""
        rows = self._rows
        needy = np.flatnonzero(rows.length_R[: rows.count] > rows.held_R[: rows.count] * BLOCK)
        if not len(needy):
            return False
        crowded = False
        for sequence in [rows.sequences[row] for row in rows.by_rank(needy)]:
            while sequence.row != NO_ROW:
                fresh = self._pool.take(1)
                if fresh is not None:
                    rows.extend(sequence.row, fresh)
                    break
                self._preempt_last()
                crowded = True
        return crowded

    def _register_decoding(self, decoding: Index) -> None:
        lengths = self._rows.length_R[decoding]
        for row in decoding[lengths % BLOCK == 0].tolist():
            self._register(row, int(self._rows.length_R[row]))

    def _register(self, row: int, end: int) -> None:
        sequence = self._rows.sequences[row]
        if sequence.chain.version == self._pool.version:
            self._pool.register(sequence.chain, self._rows.table(row), self._rows.ids_RC[row, :end])

    def _piece(self, row: int, budget: int, later: list[tuple[int, int]]) -> int:
        """Schedule the next tokens of the row's context; how many."""
        rows = self._rows
        start = int(rows.computed_R[row])
        count = min(budget, int(rows.length_R[row]) - start)
        self._register(row, start + count)
        later.append((row, count))
        return count

    def _share_again(self, row: int) -> None:
        """Of a context that is computed again, somebody else may have computed a part by now."""
        rows, sequence = self._rows, self._rows.sequences[row]
        blocks = self._pool.match(sequence.chain, rows.ids_of(row))
        self._pool.release(rows.table(row)[: len(blocks)])
        rows.tables_RB[row, : len(blocks)] = blocks
        rows.computed_R[row] = len(blocks) * BLOCK

    def _call_back(self) -> None:
        """Who stepped aside may wait with the others again, if nothing speaks against it any more."""
        for sequence in [one for one in self._aside.values() if self._may_return(one)]:
            del self._aside[sequence.arrival]
            self._waiting.add(sequence)

    def _may_return(self, sequence: Sequence) -> bool:
        return not sequence.request.pinned or sequence.pin is not None or self._may_pin()

    def _join_first(self) -> tuple[int, _Claim] | None:
        """The first of the queue that need not step aside takes the next row, and this is what it begins with; ``None``
        if there is nobody, or no room."""
        while self._waiting and self._rows.count + self._siblings.num_waiting < self._rows.num_rows:
            sequence = self._waiting.first()
            if self._siblings.follow(sequence) or not self._may_return(sequence):
                self._waiting.remove(sequence)
                self._aside[sequence.arrival] = sequence
                continue
            claim = self._claim(sequence)
            return None if claim is None else (self._join(sequence, claim), claim)
        return None

    def _join(self, sequence: Sequence, claim: _Claim) -> int:
        self._waiting.remove(sequence)
        if sequence.answer is None:
            self.prompt_tokens += len(sequence.given_ids_T)
            self.cached_tokens += claim.num_cached
        sequence.parent, sequence.lineage_T, sequence.insists, sequence.chain = None, None, None, claim.chain
        if sequence.request.pinned and sequence.pin is None:
            sequence.pin = self.version
        self._rows.join(sequence, claim.table, claim.num_cached)
        return sequence.row

    def _claim(self, sequence: Sequence) -> _Claim | None:
        """Blocks for all tokens of ``sequence`` and one more; ``None`` while there are not enough."""
        before = self._pool.available
        if self._rows.count and self._stuck is not None:
            arrival, then = self._stuck
            if arrival == sequence.arrival and before <= then:
                return None
        claim = self._try_claim(sequence)
        self._stuck = (sequence.arrival, before) if claim is None else None
        return claim

    def _try_claim(self, sequence: Sequence) -> _Claim | None:
        ids_T = sequence.ids()
        needed = blocks_for(min(len(ids_T) + 1, sequence.longest - 1))
        version = self.version if sequence.pin is None else sequence.pin
        claim = self._fork(sequence, ids_T, version) or self._fork_cached(sequence, ids_T, version)
        if claim is None:
            chain = Chain(version, sequence.salt)
            claimed = self._pool.claim(chain, ids_T, needed)
            if claimed is None:
                return None
            return _Claim(table=claimed[0], num_cached=claimed[1] * BLOCK, chain=chain)
        fresh = self._pool.take(needed - len(claim.table))
        if fresh is None:
            self._pool.release(claim.table)
            return None
        claim.table.extend(fresh)
        return claim

    def _fork(self, sequence: Sequence, ids_T: IntColumn, version: int) -> _Claim | None:
        """The context of a running parent, if it may be shared; the part of a block as a copy."""
        parent, rows = sequence.parent, self._rows
        if parent is None or parent.salt != sequence.salt:
            return None
        if parent.row not in self._decoding:  # or blocks of it may be filled in this very pass: too late for a copy
            return None
        if parent.chain.version != version and not sequence.reuses:
            return None
        num_cached = min(int(rows.computed_R[parent.row]), len(ids_T) - 1)
        if not np.array_equal(rows.ids_RC[parent.row, :num_cached], ids_T[:num_cached]):
            return None  # the parent has begun again
        forked = self._pool.fork(rows.table(parent.row), num_cached)
        if forked is None:
            return None
        chain = Chain(parent.chain.version, sequence.salt)
        return _Claim(table=forked.table, num_cached=num_cached, chain=chain, copy=forked.copy)

    def _fork_cached(self, sequence: Sequence, ids_T: IntColumn, version: int) -> _Claim | None:
        """The context of a parent that runs no more, as far as it is cached whole: the block that the fork shares in
        part, which would not be found by the fork's own tokens, as a copy."""
        whole_T, num_cached = sequence.lineage_T, len(ids_T) - 1
        if whole_T is None or not num_cached % BLOCK or version != self._pool.version:
            return None
        num_blocks, chain = blocks_for(num_cached), Chain(version, sequence.salt)
        blocks = self._pool.match(chain, whole_T[: num_blocks * BLOCK + 1])
        whole = len(blocks) == num_blocks and self._pool.held_once(blocks[-1])
        forked = self._pool.fork(blocks, num_cached) if whole else None
        self._pool.release(blocks)
        if forked is None:
            return None
        chain = Chain(version, sequence.salt)
        return _Claim(table=forked.table, num_cached=num_cached, chain=chain, copy=forked.copy)
