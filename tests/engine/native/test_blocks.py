"""The pool of blocks: whatever is taken, shared, cached and lost, each block is in one place and holds what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine.native.blocks import BlockPool, Chain, count_blocks
from headrace.models.paged.base import BLOCK


def ids(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def computed(pool: BlockPool, ids_T: np.ndarray, salt: int = 0) -> list[int]:
    """A sequence that has joined with this prompt."""
    chain = Chain(pool.version, salt)
    table = pool.match(chain, ids_T)
    fresh = pool.allocate(count_blocks(len(ids_T)) - len(table))
    assert fresh is not None
    pool.register(chain, table + fresh, ids_T)
    return table + fresh


def test_siblings_that_join_together_share_the_full_blocks_of_their_prompt() -> None:
    pool = BlockPool(10)
    first, second = computed(pool, ids(40)), computed(pool, ids(40))
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    pool.check([first, second])


def test_last_token_of_a_prompt_is_always_computed() -> None:
    pool = BlockPool(10)
    computed(pool, ids(32))
    assert len(pool.match(Chain(0), ids(32))) == 1
    assert len(pool.match(Chain(0), ids(33))) == 2


def test_same_block_behind_another_prefix_is_not_found() -> None:
    pool = BlockPool(10)
    computed(pool, np.concatenate([ids(16, 100), ids(16)]))
    assert pool.match(Chain(0), ids(33)) == []
    assert pool.match(Chain(0), np.concatenate([ids(16, 101), ids(17)])) == []


@pytest.mark.parametrize(("version", "salt"), [(1, 0), (0, 1)])
def test_other_weights_or_another_salt_find_nothing(version: int, salt: int) -> None:
    pool = BlockPool(10)
    computed(pool, ids(40))
    assert pool.match(Chain(version, salt), ids(40)) == []


def test_after_a_commit_nothing_old_is_found_and_a_mixed_sequence_registers_nothing() -> None:
    pool = BlockPool(10)
    chain = Chain(0)
    table = pool.allocate(4)
    assert table is not None
    pool.register(chain, table, ids(20))
    pool.forget(1)
    pool.register(chain, table, ids(60))
    for version in (0, 1):
        assert pool.match(Chain(version), ids(60)) == []
    pool.check([table])


def test_sequence_that_ends_leaves_its_blocks_to_the_next_one() -> None:
    pool = BlockPool(10)
    table = computed(pool, ids(40))
    pool.release(table)
    assert pool.cached == 2
    assert pool.match(Chain(0), ids(40)) == table[:2]
    assert pool.used == 2


def test_cached_blocks_make_room_the_oldest_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4)
    pool.release(computed(pool, ids(32)))
    pool.release(computed(pool, ids(32, 1000)))
    taken = pool.allocate(1)
    assert taken is not None
    assert len(pool.match(Chain(0), ids(33))) == 1
    assert len(pool.match(Chain(0), ids(33, 1000))) == 2


def test_pool_without_room_says_so_and_changes_nothing() -> None:
    pool = BlockPool(4)
    table = computed(pool, ids(40))
    before = pool.used, pool.cached
    assert pool.allocate(2) is None
    assert (pool.used, pool.cached) == before
    pool.check([table])
    assert pool.allocate(1) is not None
    assert pool.fork(table, 40) is None
    assert pool.fork(table, 32) is not None


def test_lookup_that_is_undone_changes_nothing() -> None:
    pool = BlockPool(10)
    table = computed(pool, ids(40))
    before = pool.used, pool.cached
    chain = Chain(0)
    pool.release(pool.match(chain, ids(40)))
    assert (pool.used, pool.cached) == before
    pool.check([table])


def test_fork_shares_full_blocks_and_copies_the_one_that_grows() -> None:
    pool = BlockPool(10)
    table = computed(pool, ids(40))
    inside, at_edge = pool.fork(table, 37), pool.fork(table, 32)
    assert inside is not None
    assert at_edge is not None
    assert inside.table[:2] == at_edge.table == table[:2]
    assert inside.copy == (table[2], inside.table[2])
    assert at_edge.copy is None
    pool.check([table, inside.table, at_edge.table])


def test_fork_registers_what_it_goes_on_with() -> None:
    pool = BlockPool(10)
    table = computed(pool, ids(40))
    forked = pool.fork(table, 40)
    assert forked is not None
    grown_T = np.concatenate([ids(40), ids(10, 500)])
    pool.register(Chain(0), [*forked.table, 9], grown_T)
    assert pool.match(Chain(0), grown_T) == forked.table


def test_tainted_blocks_are_found_by_nobody_and_cleared_once_all_have_let_go() -> None:
    pool = BlockPool(10)
    table, sibling = computed(pool, ids(40)), computed(pool, ids(40))
    pool.taint(table)
    assert pool.match(Chain(0), ids(40)) == []
    pool.release(table)
    assert pool.pop_dirty() == table[2:]
    pool.release(sibling)
    assert sorted(pool.pop_dirty()) == sorted(table[:2])
    assert pool.pop_dirty() == []
    assert pool.available == 10


def test_tainted_sequence_registers_nothing_more() -> None:
    pool = BlockPool(10)
    chain = Chain(0)
    table = pool.allocate(2)
    assert table is not None
    pool.taint(table)
    pool.register(chain, table, ids(32))
    assert pool.match(Chain(0), ids(40)) == []
    pool.check([table])


@dataclass
class Sequence:
    chain: Chain
    ids_T: np.ndarray
    table: list[int] = field(default_factory=list)

    def key(self, blocks: int) -> tuple[int, bytes]:
        return self.chain.salt, self.ids_T[: blocks * BLOCK].tobytes()


class Pool(RuleBasedStateMachine):
    """Random lives of a pool beside a model that keeps whole prefixes and looks through all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.running: list[Sequence] = []
        self.cached: dict[tuple[int, bytes], int] = {}  # whole prefix -> block
        self.let_go: dict[int, int] = {}  # block -> when
        self.tainted: set[int] = set()
        self.dirty: set[int] = set()
        self.times = count()

    def held(self) -> set[int]:
        return {block for sequence in self.running for block in sequence.table}

    def took(self, fresh: list[int] | None, wanted: int) -> None:
        """Check what ``take`` gave, and evict as it must have."""
        idle = set(self.cached.values()) - self.held()
        free = set(range(12)) - self.held() - idle - self.dirty
        if fresh is None:
            assert len(free) + len(idle) < wanted
            return
        victims = sorted(idle, key=self.let_go.__getitem__)[: max(0, wanted - len(free))]
        assert len(set(fresh)) == wanted
        assert set(fresh) <= free | set(victims)
        self.cached = {key: block for key, block in self.cached.items() if block not in victims}

    def note(self, sequence: Sequence) -> None:
        if sequence.chain.version != self.pool.version:
            return
        for place in range(len(sequence.ids_T) // BLOCK):
            block = sequence.table[place]
            if block not in self.tainted and block not in self.cached.values():
                self.cached.setdefault(sequence.key(place + 1), block)

    @rule(
        parts=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        extra=st.integers(0, BLOCK - 1),
        salt=st.integers(0, 1),
    )
    def join(self, parts: list[int], extra: int, salt: int) -> None:
        ids_T = np.concatenate([ids(BLOCK, 100 * part) for part in parts])[extra:]
        sequence = Sequence(Chain(self.pool.version, salt), ids_T)
        sequence.table = self.pool.match(sequence.chain, ids_T)
        expected: list[int] = []
        while len(expected) < (len(ids_T) - 1) // BLOCK and sequence.key(len(expected) + 1) in self.cached:
            expected.append(self.cached[sequence.key(len(expected) + 1)])
        assert sequence.table == expected
        self.running.append(sequence)
        self.grow(sequence)

    def grow(self, sequence: Sequence) -> None:
        wanted = count_blocks(len(sequence.ids_T)) - len(sequence.table)
        fresh = self.pool.allocate(wanted)
        self.took(fresh, wanted)
        if fresh is None:
            self.drop(sequence)
            return
        sequence.table += fresh
        self.pool.register(sequence.chain, sequence.table, sequence.ids_T)
        self.note(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.running = [other for other in self.running if other is not sequence]
        self.pool.release(sequence.table)
        for block in reversed(sequence.table):
            if block not in self.held():
                self.let_go[block] = next(self.times)
                self.dirty |= {block} & self.tainted
                self.tainted.discard(block)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 20), value=st.integers(0, 1))
    def decode(self, data: st.DataObject, tokens: int, value: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        sequence.ids_T = np.concatenate([sequence.ids_T, ids(tokens, value)])
        self.grow(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.running))
        at = data.draw(st.integers(1, len(parent.ids_T)))
        forked = self.pool.fork(parent.table, at)
        fresh = None if forked is None else forked.table[at // BLOCK :]
        self.took(fresh, count_blocks(at) - at // BLOCK)
        if forked is None:
            return
        assert forked.table[: at // BLOCK] == parent.table[: at // BLOCK]
        assert forked.copy == ((parent.table[at // BLOCK], forked.table[-1]) if at % BLOCK else None)
        child = Sequence(Chain(parent.chain.version, parent.chain.salt), parent.ids_T[:at], forked.table)
        self.running.append(child)
        self.pool.register(child.chain, child.table, child.ids_T)
        self.note(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def taint(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.pool.taint(sequence.table)
        self.tainted |= set(sequence.table)
        self.cached = {key: block for key, block in self.cached.items() if block not in self.tainted}
        self.drop(sequence)

    @rule()
    def clear(self) -> None:
        dirty = self.pool.pop_dirty()
        assert sorted(dirty) == sorted(self.dirty)
        self.dirty.clear()

    @rule()
    def commit(self) -> None:
        self.pool.forget(self.pool.version + 1)
        self.cached.clear()

    @invariant()
    def books_balance(self) -> None:
        self.pool.check([sequence.table for sequence in self.running])
        assert self.pool.used == len(self.held())
        assert self.pool.cached == len(set(self.cached.values()) - self.held())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
