"""The index from which an engine drafts tokens: which token followed a run of tokens, in earlier answers and in a
sequence's own text.

    ring of tokens:  … | context | answer | end | context | answer | end | …       the newest ``num_tokens`` tokens
    table of places:  hash of (prompt, last tokens) ──▶ the place in the ring of the token that followed

A *draft* is a guess of the next tokens of a sequence. It only decides which tokens a pass computes in advance; each
token is drawn as it would be without a draft. Wrong entries of the index therefore cost time and never change an
answer. The memory is bounded, because new answers overwrite old ones in both arrays. A *place* is an index into the
ring.

Shape legend: A tokens of an answer, C tokens of context, L kinds of look-up, D sequences, K tokens of a draft, P places
of the ring, S slots, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.engine.native.history_store import END, open_store
from headrace.engine.native.rows import Flags, Index, Rows
from headrace.engine.native.sampler import splitmix

Keys = npt.NDArray[np.uint64]
CONTEXT = 8
"""The number of tokens before an answer that are stored with it. It is also the most tokens that a look-up compares."""
OWN_CONTEXT = 5
"""The number of last tokens that a look-up in a sequence's own text compares."""
_SLOTS_PER_TOKEN = 8
"""The least number of table slots for each token of the ring. A token needs one slot for each kind of look-up. A newer
token with the same slot overwrites it; about one in seven entries is lost in this way."""
_PROMPT_BITS = 16
"""The binary logarithm of the number of slots for the prompts that have answers in the index."""
_OWN_BITS = 11
"""The binary logarithm of the number of slots for the own text of each row."""
_POWERS = splitmix(np.arange(CONTEXT, dtype=np.uint64)) | np.uint64(1)
"""The factors of the hash of a run of tokens, one for each token of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """One kind of look-up in earlier answers."""

    num_tokens: int
    """The number of last tokens that must be equal; at most :data:`CONTEXT`."""
    same_prompt: bool
    """Whether only answers to the same prompt are searched."""


LOOK_UPS = (
    LookUp(num_tokens=CONTEXT, same_prompt=True),
    LookUp(num_tokens=CONTEXT, same_prompt=False),
    LookUp(num_tokens=3, same_prompt=True),
)
"""The kinds of look-up, in the order of the index L."""
_COMPARED_LC = np.arange(CONTEXT) >= CONTEXT - np.array([[each.num_tokens] for each in LOOK_UPS])
"""Whether each kind of look-up compares each of the last tokens."""
_LENGTHS = {each.num_tokens for each in LOOK_UPS}
_SALTS_L1 = np.arange(1, len(LOOK_UPS) + 1, dtype=np.uint64)[:, None]
"""A number that makes the hashes of each kind of look-up differ from the others."""
_BY_PROMPT_L1 = np.array([[each.same_prompt] for each in LOOK_UPS])
"""Whether the prompt is part of the hash of each kind of look-up."""


class HistoryIndex:
    """An index over the newest answers, of ``num_tokens`` tokens in all. It returns drafts for sequences with the same
    last tokens as an earlier answer.

    >>> index, keys = HistoryIndex(64), np.zeros(1, np.uint64)
    >>> index.add(keys[0], np.array([7, 8, 9]), np.array([4, 5, 6]), np.array([0.5, 0.25, 1.0]))
    >>> ids_LDK, chances_LDK = index.find(keys, extract_contexts(np.array([[7, 8, 9, 4]])), 3)
    >>> ids_LDK[0].tolist(), chances_LDK[0].tolist()
    ([[5, 6, -1]], [[0.25, 1.0, 0.0]])
    """

    def __init__(self, num_tokens: int, file: Path | None = None, vocab_size: int = 2**31) -> None:
        """Make an empty index of ``num_tokens`` tokens in memory or, with ``file``, open the index that is stored in
        this file. Entries of the file with token ids of ``vocab_size`` or more count as damaged. Raises ``OSError`` if
        the file cannot be created."""
        self._bits = (_SLOTS_PER_TOKEN * num_tokens - 1).bit_length()
        """The number of bits of a slot's index: the table has 2 to this power slots."""
        self.store = open_store(
            file, num_tokens=num_tokens, num_slots=1 << self._bits, num_keys=1 << _PROMPT_BITS, vocab_size=vocab_size
        )
        """The arrays of the index."""
        self._head_1, self._keys = self.store.head_1, self.store.keys_K
        """The next place of the ring to be written (one number), and the hash of the prompt recorded last in each
        slot."""
        self._ids_P, self._chances_P, self._places_S = self.store.ids_P, self.store.chances_P, self.store.places_S
        """The ring of tokens with the probabilities with which they were drawn, and the place in it to which each slot
        points."""

    def knows(self, key: np.uint64) -> bool:
        """Return whether an answer to the prompt with the hash ``key`` has been added. Of several prompts that share a
        slot, only the last one is recorded."""
        return bool(self._keys[key >> np.uint64(64 - _PROMPT_BITS)] == key)

    def add(self, key: np.uint64, context_C: IntColumn, ids_A: IntColumn, chances_A: FloatColumn) -> None:
        """Add an answer to the prompt with the hash ``key``: its tokens ``ids_A``, the probabilities ``chances_A`` with
        which they were drawn, and the tokens ``context_C`` before it, of which the last :data:`CONTEXT` are stored. Of
        an answer that is longer than the ring, only the end is stored."""
        max_answer = len(self._ids_P) - CONTEXT - 1
        num_dropped = max(0, len(ids_A) - max_answer)
        before_C = extract_contexts(np.concatenate([context_C[-CONTEXT:], ids_A[:num_dropped]])[None])[0]
        line = np.concatenate([before_C, ids_A[num_dropped:], [END]]).astype(np.int32)
        places = (self._head_1[0] + np.arange(len(line))) % len(self._ids_P)
        self._ids_P[places], self._chances_P[places] = line, 0.0
        self._chances_P[places[CONTEXT:-1]] = chances_A[num_dropped:]
        contexts_AC = np.lib.stride_tricks.sliding_window_view(line[:-2], CONTEXT)
        self._places_S[self._slots(np.full(len(contexts_AC), key), contexts_AC)] = places[CONTEXT:-1]
        self._keys[key >> np.uint64(64 - _PROMPT_BITS)] = key
        self._head_1[0] = (places[-1] + 1) % len(self._ids_P)

    def find(self, keys_D: Keys, contexts_DC: IntColumn, num: int) -> tuple[IntColumn, FloatColumn]:
        """Return drafts of ``num`` tokens for sequences with the prompts ``keys_D`` (hashes) and the last tokens
        ``contexts_DC``, one for each kind of look-up (:data:`LOOK_UPS`): the ids, and the probability with which each
        token was drawn in the earlier answer. The probability is 0 after the end of a draft; a draft that was not found
        has only zeros."""
        size = len(self._ids_P)
        places_LD1 = self._places_S[self._slots(keys_D, contexts_DC)][:, :, None].astype(np.int64)
        before_LDC = self._ids_P[(places_LD1 + np.arange(-CONTEXT, 0)) % size]
        same_LD1 = ((before_LDC == contexts_DC) | ~_COMPARED_LC[:, None]).all(axis=2, keepdims=True)
        places_LDK = (places_LD1 + np.arange(num)) % size
        return self._ids_P[places_LDK], np.where(same_LD1, self._chances_P[places_LDK], np.float32(0))

    def _slots(self, keys_D: Keys, contexts_DC: IntColumn) -> Index:
        """Return the slot of each sequence in the table, for each kind of look-up; shape LD."""
        parts_DC = contexts_DC.astype(np.uint64) * _POWERS
        sums = {num: parts_DC[:, -num:].sum(axis=1, dtype=np.uint64) for num in _LENGTHS}
        sums_LD = np.stack([sums[each.num_tokens] for each in LOOK_UPS])
        return _compute_slots(splitmix(sums_LD + _SALTS_L1) + keys_D * _BY_PROMPT_L1, self._bits)


class OwnText:
    """An index over the prompt and answer of each running sequence: the position after each short run of tokens. Text
    that repeats can so be drafted from the sequence itself."""

    def __init__(self, rows: Rows) -> None:
        """Allocate an empty index for the sequences in ``rows``."""
        self._rows = rows
        self._positions_RS = np.zeros((rows.num_rows, 1 << _OWN_BITS), np.int32)
        """The position after the run of tokens that was indexed last in each slot; 0 for an unused slot."""
        self._num_indexed_R = np.zeros(rows.num_rows, np.int64)
        """The number of tokens of each row that are in the index."""

    def add(self, row: int) -> None:
        """Clear the index of ``row``, because another sequence begins there."""
        self._positions_RS[row], self._num_indexed_R[row] = 0, 0

    def move(self, sources: Index, targets: Index) -> None:
        """Move the rows ``sources`` to the places ``targets``."""
        self._positions_RS[targets], self._num_indexed_R[targets] = (
            self._positions_RS[sources],
            self._num_indexed_R[sources],
        )

    def read(self, rows_D: Index) -> None:
        """Add to the index the tokens of ``rows_D`` that are new since the last call."""
        start_D = np.maximum(self._num_indexed_R[rows_D], OWN_CONTEXT)
        self._num_indexed_R[rows_D] = self._rows.length_R[rows_D]
        counts_D = np.maximum(self._num_indexed_R[rows_D] - start_D, 0)
        rows_N, at_N = np.repeat(rows_D, counts_D), np.repeat(start_D - (np.cumsum(counts_D) - counts_D), counts_D)
        positions_N = at_N + np.arange(len(at_N))
        self._positions_RS[rows_N, self._slots(rows_N, positions_N)] = positions_N

    def find(self, rows_D: Index, num: int) -> tuple[IntColumn, Flags]:
        """Return a draft of ``num`` tokens for each of ``rows_D``, and for each row whether a draft was found: the
        tokens that followed an earlier occurrence of its last tokens. A draft longer than the repeated period starts
        the period again."""
        length_D = self._rows.length_R[rows_D]
        position_D1 = self._positions_RS[rows_D, self._slots(rows_D, length_D)].astype(np.int64)[:, None]
        inside_D = (position_D1[:, 0] >= OWN_CONTEXT) & (position_D1[:, 0] < length_D)
        steps_C = np.arange(OWN_CONTEXT) - OWN_CONTEXT
        then_DC, now_DC = (
            self._rows.ids_RC[rows_D[:, None], np.maximum(end_D1 + steps_C, 0)]
            for end_D1 in (position_D1, length_D[:, None])
        )
        same_D = inside_D & (then_DC == now_DC).all(axis=1)
        period_D1 = np.where(same_D, length_D - position_D1[:, 0], 1)[:, None]
        ids_DK = self._rows.ids_RC[rows_D[:, None], position_D1 + np.arange(num) % period_D1]
        return ids_DK, same_D

    def _slots(self, rows_N: Index, ends_N: Index) -> Index:
        """Return the slot of the :data:`OWN_CONTEXT` tokens before each of the positions ``ends_N`` in ``rows_N``."""
        places_NC = np.maximum(ends_N[:, None] - OWN_CONTEXT + np.arange(OWN_CONTEXT), 0)
        last_NC = self._rows.ids_RC[rows_N[:, None], places_NC].astype(np.uint64)
        return _compute_slots((last_NC * _POWERS[:OWN_CONTEXT]).sum(axis=1, dtype=np.uint64), _OWN_BITS)


def extract_contexts(ids_DC: IntColumn) -> IntColumn:
    """Return the last :data:`CONTEXT` tokens of each sequence in ``ids_DC``; shorter sequences are padded with
    :data:`END` in front."""
    last_DC = ids_DC[:, -CONTEXT:]
    return np.pad(last_DC, ((0, 0), (CONTEXT - last_DC.shape[1], 0)), constant_values=END)


def _compute_slots(hashes: Keys, bits: int) -> Index:
    """Return the slot of each hash in a table of 2 to the power ``bits`` slots."""
    slots: Index = (splitmix(hashes) >> np.uint64(64 - bits)).astype(np.int64)
    return slots
