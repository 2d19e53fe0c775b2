"""The blocks of the paged cache: allocation, sharing and the prefix cache.

The pool only records the state of each block; the tensors are in :class:`~headrace.models.paged.base.PagedCache`. A
block is in one of these states:

                   allocate                  register (full blocks)
        free ───────────────▶ held (refs ≥ 1) ───────────────▶ held and cached
          ▲                     │                                 │      ▲
          │  release            │          release (last holder)  ▼      │ match
          ├─────────────────────┘                                idle ───┘
          ├────────────────── evicted, forgotten ─────────────────┘
          └──── pop_dirty ◀──── dirty ◀──── release (last holder) of a tainted block

A cached block is found by a digest (hash) of the weights' version, a salt, and all token ids up to the block's end. In
a pass, keys and values are written before attention reads them. A block may therefore be registered when it is
*scheduled*, before it is filled, so that siblings that join in one step share their prompt. A block that is registered
and then not computed must be tainted.

An engine uses the pool as follows for each sequence (``table`` is its list of blocks, ``chain`` its :class:`Chain`)::

    chain = Chain(version, salt)
    table = pool.match(chain, prompt_T)               # whole blocks another sequence has computed
    fresh = pool.allocate(count_blocks(end) - len(table))   # None: no room; pool.release(table)
    pool.register(chain, table, ids_T[:end])          # all tokens computed so far or in this pass
    pool.release(table)                               # its end, or its preemption
    cache.clear(pool.pop_dirty())                    # before every pass

Shape legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import xxhash

from headrace.base.types.columns import IntColumn
from headrace.models.paged.base import BLOCK

_BLOCK_ID_BYTES = BLOCK * 4
"""The number of bytes of a block's token ids as 32-bit integers."""


def count_blocks(num_tokens: int) -> int:
    """Return the number of blocks that ``num_tokens`` tokens need.

    >>> count_blocks(16), count_blocks(17)
    (1, 2)
    """
    return -(-num_tokens // BLOCK)


class KnownStates(Protocol):
    """The digests of the prefixes for which the states of recurrent layers are kept, so that a sequence can begin at
    their end (:class:`headrace.engine.native.states.Snapshots`)."""

    def __contains__(self, digest: bytes) -> bool: ...

    def clear(self) -> None:
        """Forget all digests, because the weights have changed."""
        ...


@dataclass(slots=True)
class Chain:
    """The part of a sequence that the prefix cache has processed: its first ``length`` blocks, and their digest. Each
    sequence has one chain, which :class:`BlockPool` advances.

    A chain belongs to one version, which computes the sequence's whole context. After a commit that keeps a sequence's
    cache, its old chain registers no more blocks. A sequence whose context is recomputed under the new version gets a
    new chain.
    """

    version: int
    salt: int = 0
    """A number that identifies all other conditions on which the cached values depend, besides weights and tokens; 0 if
    there are none."""
    length: int = 0
    """The number of blocks matched or registered so far."""
    digest: bytes = field(default=b"", repr=False)
    """The digest of the version, the salt and the tokens of the first ``length`` blocks; empty at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedBlocks:
    """The blocks of a fork: a sequence that continues another one from an earlier token, and shares its cache."""

    table: list[int]
    """The blocks of the fork, which owns one reference to each."""
    copy: tuple[int, int] | None
    """The pair (source, target) of a partly filled last block, which must be copied before the next pass; ``None`` if
    there is none."""


class BlockPool:
    """The allocation of the blocks ``0 .. num_blocks - 1`` of one paged key-value cache: which blocks are free, held by
    sequences, or cached for later sequences with the same beginning. A block stores the keys and values of ``BLOCK``
    tokens. ``version`` is the version of the weights in use.

    A held block becomes *tainted* when its contents turn out to be unusable. When its last holder releases it, it
    becomes *dirty*: the caller must clear it before it is allocated again.

    ``secret``, of 64 bits, is the seed of every digest, so that no caller can construct two prefixes with the same
    digest. ``states`` contains the prefixes for which the states of recurrent layers are kept: only such a prefix can
    be matched. ``None``: the model has no recurrent layers.

    >>> pool = BlockPool(4)
    >>> ids_T = np.arange(40, dtype=np.int32)
    >>> chain = Chain(0)
    >>> table = pool.allocate(3)
    >>> pool.register(chain, table, ids_T)
    >>> pool.match(Chain(0), ids_T) == table[:2]
    True
    """

    def __init__(self, num_blocks: int, version: int = 0, secret: int = 0, states: KnownStates | None = None) -> None:
        """Make a pool in which every block is free. The arguments are described at the class."""
        self.num_blocks = num_blocks
        self._states = states
        self._secret = secret
        self._era = 0
        """The number of calls of :meth:`forget`. Blocks of older eras cannot be matched."""
        self._eras = [0] * num_blocks
        """The era in which each block was registered last."""
        self.version = version
        """The only version whose blocks are cached."""
        self._refs = [0] * num_blocks
        """The number of sequences that hold each block."""
        self._free = list(range(num_blocks - 1, -1, -1))
        """The free blocks, as a stack: the block that was freed last is allocated first."""
        self._idle: dict[int, None] = {}
        """The cached blocks without a holder, in the order of eviction."""
        self._by_digest: dict[bytes, int] = {}
        """The cached block for each digest of a prefix."""
        self._digests: dict[int, bytes] = {}
        """The digest of each cached block; the inverse of ``_by_digest``."""
        self._tainted: set[int] = set()
        """The held blocks with unusable contents."""
        self._dirty: list[int] = []
        """The blocks that were tainted when their last holder released them."""

    @property
    def available(self) -> int:
        """The number of blocks that :meth:`allocate` could allocate now."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks, each with one reference, and return them; the oldest cached blocks are evicted if
        needed. If there are not enough blocks, return ``None`` and change nothing."""
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
        """Add one reference to each block, because one more sequence uses it."""
        for block in blocks:
            if not self._refs[block]:
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each block of a sequence's table, because it ends or is preempted. A block without
        references stays cached if it can be matched, and is free otherwise. The last blocks of the table are evicted
        first, since no other cached block depends on them."""
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
        """Return the blocks of the longest cached prefix of ``ids_T``, and add a reference to each. The new ``chain``
        is advanced to their end. The last token is never matched, because it has to be computed to get logits."""
        blocks = self._find_prefix(chain, ids_T)
        self.share(blocks)
        return blocks

    def claim(self, chain: Chain, ids_T: IntColumn, count: int) -> tuple[list[int], int] | None:
        """Return a table of ``count`` blocks for a sequence with the tokens ``ids_T``, and the number of matched
        blocks: the table begins with the cached blocks that :meth:`match` would return, followed by newly allocated
        ones. If there are not enough blocks, return ``None`` and change nothing but the new ``chain``."""
        blocks = self._find_prefix(chain, ids_T)
        num_idle = sum(not self._refs[block] for block in blocks)
        if count - len(blocks) > self.available - num_idle:
            return None
        self.share(blocks)
        fresh = self.allocate(count - len(blocks))
        assert fresh is not None
        return blocks + fresh, len(blocks)

    def register(self, chain: Chain, table: Sequence[int], ids_T: IntColumn) -> None:
        """Make the full blocks of ``ids_T`` that the chain has not registered yet available for matching. ``table`` are
        the sequence's blocks, and ``ids_T`` are the sequence's tokens up to the end of this pass. If another block with
        the same contents is cached already, that block stays the cached one. A chain of another version registers
        nothing."""
        end = len(ids_T) // BLOCK
        if chain.version != self.version or end <= chain.length:
            return
        data, digest = _bytes(ids_T[chain.length * BLOCK : end * BLOCK]), chain.digest or self._root_digest(chain)
        for place, start in enumerate(range(0, len(data), _BLOCK_ID_BYTES), start=chain.length):
            digest = self._extend_digest(digest, data[start : start + _BLOCK_ID_BYTES])
            self._cache_block(digest, table[place])
        chain.length, chain.digest = end, digest

    def fork(self, table: Sequence[int], num_tokens: int) -> ForkedBlocks | None:
        """Return a second table for the first ``num_tokens`` computed tokens of ``table``. Full blocks are shared. For
        a partly filled last block, a new block is allocated, to which the caller must copy it. If no block is
        available, return ``None`` and change nothing."""
        full = num_tokens // BLOCK
        if not num_tokens % BLOCK:
            self.share(table[:full])
            return ForkedBlocks(table=list(table[:full]), copy=None)
        fresh = self.allocate(1)
        if fresh is None:
            return None
        self.share(table[:full])
        return ForkedBlocks(table=[*table[:full], *fresh], copy=(table[full], fresh[0]))

    def held_once(self, block: int) -> bool:
        """Return whether exactly one sequence holds ``block``, so that no other sequence can be filling it in this
        pass."""
        return self._refs[block] == 1

    def taint(self, blocks: Iterable[int]) -> None:
        """Mark held blocks whose contents must not be used, because they were not computed or are not finite. A tainted
        block cannot be matched. After its last holder has released it, :meth:`pop_dirty` returns it."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is tainted but held by none"
            self._tainted.add(block)
            if block in self._digests:
                del self._by_digest[self._digests.pop(block)]

    def pop_dirty(self) -> list[int]:
        """Return the tainted blocks that have been released. They are free from now on, and the caller must clear them
        before the next pass."""
        dirty, self._dirty = self._dirty, []
        self._free.extend(dirty)
        return dirty

    def forget(self, version: int) -> None:
        """Invalidate all cached blocks, because weights of ``version`` are in use. Chains of other versions register
        nothing any more. Tables keep their blocks."""
        self.version = version
        if self._states is not None:
            self._states.clear()
        self._era += 1  # blocks of older eras no longer match; the idle ones among them are evicted first

    @property
    def used(self) -> int:
        """The number of blocks that at least one sequence holds."""
        return self.num_blocks - self.available - len(self._dirty)

    @property
    def cached(self) -> int:
        """The number of blocks without a holder that can be matched. Used by tests, because it scans all blocks."""
        return sum(self._eras[block] == self._era for block in self._idle)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the pool's records agree with each other and with ``tables``, the tables of all sequences. For
        tests."""
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

    def _find_prefix(self, chain: Chain, ids_T: IntColumn) -> list[int]:
        """Return the blocks of the longest cached prefix of ``ids_T``, without adding references, and advance the new
        ``chain`` to their end."""
        assert chain.length == 0
        blocks: list[int] = []
        digests: list[bytes] = []
        if chain.version != self.version:
            return blocks
        data, digest = _bytes(ids_T), self._root_digest(chain)
        for start in range(0, (len(ids_T) - 1) // BLOCK * _BLOCK_ID_BYTES, _BLOCK_ID_BYTES):
            digest = self._extend_digest(digest, data[start : start + _BLOCK_ID_BYTES])
            block = self._by_digest.get(digest)
            if block is None or self._eras[block] != self._era:
                break
            blocks.append(block)
            digests.append(digest)
        while self._states is not None and digests and digests[-1] not in self._states:
            del blocks[-1], digests[-1]
        chain.length, chain.digest = len(blocks), digests[-1] if digests else b""
        return blocks

    def _cache_block(self, digest: bytes, block: int) -> None:
        """Make ``block``, which a sequence holds, available for matching under ``digest``, unless it is tainted or
        another block with these contents is cached already."""
        if block in self._tainted:
            return
        known = self._by_digest.get(digest)
        if known is not None and self._eras[known] == self._era:
            return
        assert self._refs[block], f"block {block} is registered but held by none"
        if block in self._digests:
            assert self._eras[block] != self._era, f"block {block} is registered with other contents"
            self._uncache(block)
        if digest in self._by_digest:  # cached in an earlier era
            known = self._by_digest[digest]
            self._uncache(known)
            if known in self._idle:
                del self._idle[known]
                self._free.append(known)
        self._by_digest[digest], self._digests[block], self._eras[block] = block, digest, self._era

    def _uncache(self, block: int) -> None:
        """Remove a cached block from the prefix cache, so that it can no longer be matched."""
        del self._by_digest[self._digests.pop(block)]

    def _root_digest(self, chain: Chain) -> bytes:
        """Return the digest before the first block, which is computed from the chain's version and salt."""
        return xxhash.xxh3_128_digest(b"%d %d" % (chain.version, chain.salt), seed=self._secret)

    def _extend_digest(self, before: bytes, data: bytes) -> bytes:
        """Return the digest of a prefix that is one block longer: from ``before``, the digest of the shorter prefix,
        and ``data``, the token ids of the block as bytes."""
        return xxhash.xxh3_128_digest(before + data, seed=self._secret)


def _bytes(ids_T: IntColumn) -> bytes:
    """Return the token ids as the bytes of 32-bit integers, for hashing."""
    return np.ascontiguousarray(ids_T, np.int32).tobytes()
