"""Who holds which block of the paged cache, and which blocks hold what: allocation, sharing and the prefix cache.

Pure bookkeeping: the pool knows nothing of tensors. A block is in one state:

                   take                      register (full blocks)
        free ───────────────▶ held (refs ≥ 1) ───────────────▶ held and cached
          ▲                     │                                 │      ▲
          │  release            │          release (last holder)  ▼      │ match
          ├─────────────────────┘                                idle ───┘
          ├────────────────── evicted, forgotten ─────────────────┘
          └──── take_dirty ◀──── dirty ◀──── release (last holder) of what is tainted

A cached block is found by a chain of digests: of the weights' version, a salt, and all token ids up to its end. In a
pass all writes precede all attention, so a block may be registered when it is *scheduled*, before it is filled:
siblings that join in one step share their prompt. What is registered and then not computed must be tainted.

How an engine uses it, per sequence (``table`` is its list of blocks, ``chain`` its :class:`Chain`)::

    chain = Chain(version, salt)
    table = pool.match(chain, prompt_T)               # whole blocks another sequence has computed
    fresh = pool.take(blocks_for(end) - len(table))   # None: no room; pool.release(table)
    pool.register(chain, table, ids_T[:end])          # all tokens computed so far or in this pass
    pool.release(table)                               # its end, or its preemption
    cache.clear(pool.take_dirty())                    # before every pass

Shape legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from headrace.base.types.columns import IntColumn
from headrace.models.paged.base import BLOCK

_WIDTH = BLOCK * 4
"""Bytes of a block's token ids as 32-bit integers."""


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold this many tokens.

    >>> blocks_for(16), blocks_for(17)
    (1, 2)
    """
    return -(-num_tokens // BLOCK)


@dataclass(slots=True)
class Chain:
    """How much of one sequence the prefix cache has seen: its first ``length`` blocks, and their digest.

    It belongs to the version under which all of the sequence's context is computed. After a commit that keeps a
    sequence's cache, its old chain registers nothing any more, as it must be; one whose context is computed anew
    under the new version gets a new chain.
    """

    version: int
    salt: int = 0
    """What else the cached numbers depend on, besides weights and tokens; 0 for nothing."""
    length: int = 0
    """Blocks matched or registered so far."""
    digest: bytes = field(default=b"", repr=False)
    """Of everything up to there; empty at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedBlocks:
    """The blocks of a fork."""

    table: list[int]
    """One reference each is the fork's."""
    copy: tuple[int, int] | None
    """(source, target): contents that must be copied before the next pass, the last block being filled in part."""


class BlockPool:
    """The blocks ``0 .. num_blocks - 1`` of one paged cache. ``secret``, of 64 bits, is in every digest: who does not
    know it cannot make up two prefixes of the same digest.

    >>> pool = BlockPool(4)
    >>> ids_T = np.arange(40, dtype=np.int32)
    >>> chain = Chain(0)
    >>> table = pool.take(3)
    >>> pool.register(chain, table, ids_T)
    >>> pool.match(Chain(0), ids_T) == table[:2]
    True
    """

    def __init__(self, num_blocks: int, version: int = 0, secret: int = 0) -> None:
        self.num_blocks = num_blocks
        self._secret = secret
        self._era = 0  # counts the calls of forget
        self._eras = [0] * num_blocks  # in which each block was registered
        self.version = version
        """The only version whose blocks are cached."""
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the next one taken
        self._idle: dict[int, None] = {}  # cached and held by none, the one to evict first first
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._tainted: set[int] = set()  # held, and not to be used again before they are cleared
        self._dirty: list[int] = []  # such blocks, held no more

    @property
    def available(self) -> int:
        """How many blocks :meth:`take` could give now."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """Fresh blocks, each with one reference; the oldest cached ones make room. ``None``, with nothing changed, if
        there are not so many."""
        if count > self.available:
            return None
        while len(self._free) < count:
            victim = next(iter(self._idle))
            del self._idle[victim]
            self._uncache(victim)
            self._free.append(victim)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a table. The last blocks are the first to be evicted: nothing that is
        kept depends on them."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is released more often than it was taken"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._digests:
                if self._eras[block] == self._era:
                    self._idle[block] = None
                    continue
                self._uncache(block)
            if block in self._tainted:
                self._tainted.remove(block)
                self._dirty.append(block)
            else:
                self._free.append(block)

    def match(self, chain: Chain, ids_T: IntColumn) -> list[int]:
        """The blocks of the longest cached prefix of ``ids_T``, one reference each now the caller's; the new ``chain``
        is moved to their end. Never all tokens: the last one must be computed, so that there are logits."""
        blocks = self._find(chain, ids_T)
        self.share(blocks)
        return blocks

    def claim(self, chain: Chain, ids_T: IntColumn, count: int) -> tuple[list[int], int] | None:
        """A table of ``count`` blocks: as :meth:`match`, then fresh ones; and how many were matched. ``None``, with
        nothing changed but the new ``chain``, if there is no room for it."""
        blocks = self._find(chain, ids_T)
        num_idle = sum(not self._refs[block] for block in blocks)
        if count - len(blocks) > self.available - num_idle:
            return None
        self.share(blocks)
        fresh = self.take(count - len(blocks))
        assert fresh is not None
        return blocks + fresh, len(blocks)

    def register(self, chain: Chain, table: Sequence[int], ids_T: IntColumn) -> None:
        """Let others find the full blocks of ``ids_T`` that the chain has not seen: the tokens of the sequence up to
        what this pass computes. Contents that are cached already stay where they are; a chain of another version
        registers nothing."""
        end = len(ids_T) // BLOCK
        if chain.version != self.version or end <= chain.length:
            return
        data, digest = _bytes(ids_T[chain.length * BLOCK : end * BLOCK]), chain.digest or self._seed(chain)
        for place, start in enumerate(range(0, len(data), _WIDTH), start=chain.length):
            digest = self._digest(digest, data[start : start + _WIDTH])
            self._note(digest, table[place])
        chain.length, chain.digest = end, digest

    def fork(self, table: Sequence[int], num_tokens: int) -> ForkedBlocks | None:
        """A second table with the first ``num_tokens`` computed tokens of ``table``: full blocks are shared, a last one
        that is filled in part gets a target of its own. ``None``, with nothing changed, if there is no room for it."""
        full = num_tokens // BLOCK
        if not num_tokens % BLOCK:
            self.share(table[:full])
            return ForkedBlocks(table=list(table[:full]), copy=None)
        fresh = self.take(1)
        if fresh is None:
            return None
        self.share(table[:full])
        return ForkedBlocks(table=[*table[:full], *fresh], copy=(table[full], fresh[0]))

    def held_once(self, block: int) -> bool:
        """Whether it has one holder: nobody else may be filling it in this pass."""
        return self._refs[block] == 1

    def taint(self, blocks: Iterable[int]) -> None:
        """Held blocks whose contents must not be used: registered but not computed, or not finite. Nobody finds them
        any more; when the last holder lets go of one, :meth:`take_dirty` names it."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is tainted but held by none"
            self._tainted.add(block)
            if block in self._digests:
                del self._by_digest[self._digests.pop(block)]

    def take_dirty(self) -> list[int]:
        """Tainted blocks that everybody has let go of: they are free from now on, and must be cleared before the next
        pass."""
        dirty, self._dirty = self._dirty, []
        self._free.extend(dirty)
        return dirty

    def forget(self, version: int) -> None:
        """Other weights are in use: nothing that is cached holds any more, and chains of another version register
        nothing. Tables keep their blocks."""
        self.version = version
        self._era += 1  # what is older is not found; the idle ones of it stand first, so that they make room first

    @property
    def used(self) -> int:
        """How many blocks at least one sequence holds."""
        return self.num_blocks - self.available - len(self._dirty)

    @property
    def cached(self) -> int:
        """How many blocks none holds that may be matched. Looks at all: for tests."""
        return sum(self._eras[block] == self._era for block in self._idle)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the books balance, ``tables`` being all that are held. For tests."""
        refs = [0] * self.num_blocks
        for table in tables:
            for block in table:
                refs[block] += 1
        held = {block for block, count in enumerate(refs) if count}
        assert refs == self._refs, "references are not those of the tables"
        assert sorted([*held, *self._free, *self._idle, *self._dirty]) == list(range(self.num_blocks)), (
            "not one state each"
        )
        assert {digest: block for block, digest in self._digests.items()} == self._by_digest
        assert self._idle.keys() <= self._digests.keys() <= held | self._idle.keys()
        assert self._tainted <= held - self._digests.keys()

    def _find(self, chain: Chain, ids_T: IntColumn) -> list[int]:
        """The blocks of the longest cached prefix; the new ``chain`` is moved to their end."""
        assert chain.length == 0
        blocks: list[int] = []
        if chain.version != self.version:
            return blocks
        data, digest = _bytes(ids_T), self._seed(chain)
        for start in range(0, (len(ids_T) - 1) // BLOCK * _WIDTH, _WIDTH):
            digest = self._digest(digest, data[start : start + _WIDTH])
            block = self._by_digest.get(digest)
            if block is None or self._eras[block] != self._era:
                break
            blocks.append(block)
            chain.digest = digest
        chain.length = len(blocks)
        return blocks

    def _note(self, digest: bytes, block: int) -> None:
        """Let others find ``block`` by ``digest``."""
        if block in self._tainted:
            return
        known = self._by_digest.get(digest)
        if known is not None and self._eras[known] == self._era:
            return
        assert self._refs[block], f"block {block} is registered but held by none"
        if block in self._digests:
            assert self._eras[block] != self._era, f"block {block} is registered with other contents"
            self._uncache(block)
        if digest in self._by_digest:  # of an earlier era
            known = self._by_digest[digest]
            self._uncache(known)
            if known in self._idle:
                del self._idle[known]
                self._free.append(known)
        self._by_digest[digest], self._digests[block], self._eras[block] = block, digest, self._era

    def _uncache(self, block: int) -> None:
        del self._by_digest[self._digests.pop(block)]

    def _seed(self, chain: Chain) -> bytes:
        return xxhash.xxh3_128_digest(b"%d %d" % (chain.version, chain.salt), seed=self._secret)

    def _digest(self, before: bytes, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(before + data, seed=self._secret)


def _bytes(ids_T: IntColumn) -> bytes:
    return np.ascontiguousarray(ids_T, np.int32).tobytes()
