"""The records of a sampled token that an exact loss needs beyond its log-probability: the vocabulary entries that could
have been drawn, and the experts that computed it. They are the largest columns of a token, so their rows may be in a
file store instead of memory (:mod:`headrace.base.types.stored`). Code that computes with stored rows reads them first.

Shape legend: T tokens of one span, E entries of all kept-sets, R tokens whose routing is known, L mixture-of-experts
layers, K experts per token and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import IntColumn
from headrace.base.types.stored import Stored, concat_rows, num_rows, slice_rows

CHECKED_TOKENS = 1 << 12
"""The number of tokens whose kept-sets are checked at once."""
Experts = npt.NDArray[np.unsignedinteger[Any]]
"""Indices of experts, as unsigned integers of any size."""


class KeptSets(msgspec.Struct, frozen=True, kw_only=True):
    """The kept-set of each of T tokens: the vocabulary entries that survived top-p, top-k and min-p and could have been
    drawn. The sets are ragged columns: the concatenated ids of all sets, and the size of each set.

    A token with an empty kept-set was drawn from the whole vocabulary, or was not drawn at all.

    >>> kept = KeptSets.concat([KeptSets.none(1), KeptSets.from_spans([[4, 7], [5]])])
    >>> len(kept), [span.tolist() for span in kept.spans()], kept[1:2].ids_E.tolist()
    (3, [[], [4, 7], [5]], [4, 7])
    """

    ids_E: IntColumn
    """The vocabulary ids of all kept-sets, token after token, ascending within a token."""
    sizes_T: IntColumn
    """The size of each token's kept-set; the sum is E."""
    stored: Stored = ()
    """The references to the E ids in a store, if they are stored; ``ids_E`` is empty then. Empty if the ids are in
    memory."""

    @classmethod
    def none(cls, count: int) -> KeptSets:
        """Return the record of ``count`` tokens without kept-sets."""
        return cls(ids_E=np.zeros(0, np.int32), sizes_T=np.zeros(count, np.int32))

    @classmethod
    def from_spans(cls, spans: Sequence[Sequence[int]]) -> KeptSets:
        """Return the record of one token per element of ``spans``, which contains the ids of the token's kept-set."""
        flat = [token for span in spans for token in span]
        return cls(ids_E=np.array(flat, np.int32), sizes_T=np.array([len(span) for span in spans], np.int32))

    @classmethod
    def concat(cls, parts: Sequence[KeptSets]) -> KeptSets:
        """Return the kept-sets of the tokens of all ``parts``, one part after the other."""
        if not parts:
            return cls.none(0)
        ids_E, stored = concat_rows([(part.ids_E, part.stored) for part in parts])
        return cls(ids_E=ids_E, sizes_T=np.concatenate([part.sizes_T for part in parts]), stored=stored)

    def spans(self) -> list[IntColumn]:
        """Return one array per token with the ids of its kept-set."""
        assert not self.stored, "the kept-sets were not read from their store"
        return np.split(self.ids_E, np.cumsum(self.sizes_T)[:-1]) if len(self) else []

    def take(self, places: npt.NDArray[np.int64]) -> KeptSets:
        """Return the kept-sets of the tokens at the indices ``places``, in that order."""
        assert not self.stored, "the kept-sets were not read from their store"
        sizes = self.sizes_T[places].astype(np.int64)
        starts = (np.cumsum(self.sizes_T) - self.sizes_T)[places]
        ends = np.cumsum(sizes)
        # the indices into ids_E: a running number, moved from the set's place in the result to its place in ids_E
        inside = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
        return KeptSets(ids_E=self.ids_E[inside], sizes_T=self.sizes_T[places])

    def problem(self, ids_T: IntColumn) -> str:
        """Return why these cannot be the kept-sets of the tokens ``ids_T``, in words: a wrong number of tokens, or a
        set without the sampled token. Empty if they can. Stored ids are not checked here: they were checked before they
        were written, and are checked again after they were read."""
        if len(self) != len(ids_T):
            return f"kept-sets of {len(self)} tokens for {len(ids_T)} tokens"
        num_ids = num_rows(self.ids_E, self.stored)
        if int(self.sizes_T.sum()) != num_ids or (self.sizes_T < 0).any():
            return f"the sizes of the kept-sets sum to {int(self.sizes_T.sum())}, but {num_ids} ids are there"
        if self.stored:
            return ""
        # in parts, since a check of all tokens at once needs several times the memory of the kept-sets
        for begin in range(0, len(self), CHECKED_TOKENS):
            at = slice(begin, begin + CHECKED_TOKENS)
            if missing := self[at]._first_missing(ids_T[at]):
                place = begin + missing[0]
                return f"the kept-set of token {place} does not hold the sampled id {ids_T[place]}"
        return ""

    def _first_missing(self, ids_T: IntColumn) -> list[int]:
        """Return the index of the first of the tokens ``ids_T`` whose kept-set has entries, but not the token; empty if
        there is none."""
        owner_E = np.repeat(np.arange(len(self)), self.sizes_T)
        found = np.zeros(len(self), bool)
        found[owner_E[self.ids_E == ids_T[owner_E]]] = True  # tokens whose kept-set contains their sampled id
        missing: list[int] = np.flatnonzero((self.sizes_T > 0) & ~found)[:1].tolist()
        return missing

    def __len__(self) -> int:
        """Return the number of tokens T."""
        return len(self.sizes_T)

    def __getitem__(self, span: slice) -> KeptSets:
        """Return the kept-sets of the tokens in the slice ``span``, which must have no step, without a copy."""
        sizes_T = self.sizes_T[span]
        first = int(self.sizes_T[: span.indices(len(self))[0]].sum())
        ids_E, stored = slice_rows(self.ids_E, self.stored, first, first + int(sizes_T.sum()))
        return KeptSets(ids_E=ids_E, sizes_T=sizes_T, stored=stored)


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a mixture-of-experts model that computed each of T tokens, as far as they were recorded. For a
    token without a record, the learner uses its own router.

    >>> routing = Routing.unknown(2, num_layers=1, top_k=2) + Routing(
    ...     known_T=np.array([True]), experts_RLK=np.array([[[3, 1]]], np.uint8))
    >>> routing.known_T.tolist(), routing[1:].experts_RLK.tolist()
    ([False, False, True], [[[3, 1]]])
    """

    known_T: npt.NDArray[np.bool_]
    """Whether the routing of each token was recorded; R of the entries are true."""
    experts_RLK: Experts
    """The experts of the known tokens only, in the order of their rank; uint8, or uint16 above 256 experts."""
    stored: Stored = ()
    """The references to the R rows in a store, if they are stored; ``experts_RLK`` has no rows then. Empty if the rows
    are in memory."""

    @classmethod
    def unknown(cls, count: int, *, num_layers: int, top_k: int, dtype: npt.DTypeLike = np.uint8) -> Routing:
        """Return the record of ``count`` tokens whose routing was not recorded, for a model with ``num_layers``
        mixture-of-experts layers and ``top_k`` experts per token, whose indices have the type ``dtype``."""
        return cls(known_T=np.zeros(count, bool), experts_RLK=np.zeros((0, num_layers, top_k), dtype))

    @classmethod
    def concat(cls, parts: Sequence[Routing]) -> Routing:
        """Return the routing of the tokens of all ``parts``, one part after the other; there is at least one part."""
        experts_RLK, stored = concat_rows([(part.experts_RLK, part.stored) for part in parts])
        return cls(
            known_T=np.concatenate([part.known_T for part in parts]), experts_RLK=experts_RLK, stored=stored
        )  # fmt: skip

    def take(self, places: npt.NDArray[np.int64]) -> Routing:
        """Return the routing of the tokens at the indices ``places``, in that order."""
        assert not self.stored, "the experts were not read from their store"
        known = self.known_T[places]
        rows = (np.cumsum(self.known_T) - 1)[places[known]]  # rows of experts_RLK exist for known tokens only
        return Routing(known_T=known, experts_RLK=self.experts_RLK[rows])

    def problem(self, count: int) -> str:
        """Return why this cannot be the routing of ``count`` tokens, in words; empty if it can."""
        if len(self) != count:
            return f"routing of {len(self)} tokens for {count} tokens"
        if self.experts_RLK.ndim != 3 or int(self.known_T.sum()) != num_rows(self.experts_RLK, self.stored):
            shape = [num_rows(self.experts_RLK, self.stored), *self.experts_RLK.shape[1:]]
            return f"routing rows of shape {tuple(shape)} for {int(self.known_T.sum())} known tokens"
        return ""

    def __len__(self) -> int:
        """Return the number of tokens T, known or not."""
        return len(self.known_T)

    def __getitem__(self, span: slice) -> Routing:
        """Return the routing of the tokens in the slice ``span``, which must have no step, without a copy."""
        known_T = self.known_T[span]
        first = int(np.count_nonzero(self.known_T[: span.indices(len(self))[0]]))
        last = first + int(np.count_nonzero(known_T))
        experts_RLK, stored = slice_rows(self.experts_RLK, self.stored, first, last)
        return Routing(known_T=known_T, experts_RLK=experts_RLK, stored=stored)

    def __add__(self, other: Routing) -> Routing:
        """Return the routing of these tokens followed by those of ``other``."""
        return Routing.concat([self, other])
