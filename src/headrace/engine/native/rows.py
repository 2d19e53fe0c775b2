"""What is known of each sequence in the batch: columns of numbers, one row per sequence, no gaps between rows.

A sequence that joins takes the first row after the last; when sequences leave, the last ones move into their rows. So
every question to the batch is one operation on plain slices ``[:count]``. What is sampled is stored at its position in
the sequence, behind the prompt.

Shape legend: R rows, C columns (the longest context), B blocks of the longest context, S stop ids of one request, D
rows that have just sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.messages.controller import Chunk
from headrace.base.types.recorded import KeptSets
from headrace.base.types.sampling import Sampling
from headrace.engine.native.blocks import blocks_for
from headrace.engine.native.sequence import NO_ROW, FinishedSequence, Kept, Sequence

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NO_ID = -1
_NO_IDS = np.zeros(0, np.int32)


def gather(kept: Several[Kept]) -> KeptSets:
    """The kept-sets of some tokens, out of those of their steps."""
    return KeptSets(
        ids_E=np.concatenate([_NO_IDS, *[ids_E[start:end] for ids_E, start, end in kept]]),
        sizes_T=np.array([end - start for _, start, end in kept], np.int32),
    )


class Follower(Protocol):
    """Who keeps columns of its own over the same rows."""

    def join(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """A sequence takes ``row``, the first one not in use."""
        ...

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Rows have left: those of ``sources`` take the places of ``targets``; ``count`` are in use now."""
        ...


class Rows:
    """The columns. ``count`` rows are in use."""

    def __init__(self, num_rows: int, num_columns: int, followers: Several[Follower] = ()) -> None:
        self._followers = tuple(followers)
        self.num_rows = num_rows
        self.sequences: list[Sequence] = []
        self.ids_RC = np.zeros((num_rows, num_columns), np.int32)
        self._logprobs_RC = np.zeros((num_rows, num_columns), np.float32)
        self._versions_RC = np.zeros((num_rows, num_columns), np.int32)
        self._entropies_RC = np.zeros((num_rows, num_columns), np.float32)
        self.tables_RB = np.zeros((num_rows, blocks_for(num_columns)), np.int32)
        self.held_R = np.zeros(num_rows, np.int64)
        """Blocks of each row's table."""
        self.length_R = np.zeros(num_rows, np.int64)
        """Tokens of each, given and sampled."""
        self.computed_R = np.zeros(num_rows, np.int64)
        """Of these, how many are in the cache; all but the newest while a row decodes."""
        self.priority_R = np.zeros(num_rows, np.int64)
        self.arrival_R = np.zeros(num_rows, np.int64)
        self.routed_R = np.zeros(num_rows, bool)
        """Which record their routing."""
        self.strings_R = np.zeros(num_rows, bool)
        """Which end with a string."""
        self.pin_R = np.full(num_rows, NO_ROW, np.int64)
        """The version that each is pinned to; negative for none."""
        self.adapter_R = np.zeros(num_rows, np.int64)
        """The adapter that samples each."""
        self._recorded_R = np.zeros(num_rows, bool)
        self._entropic_R = np.zeros(num_rows, bool)
        self._flushed_R = np.zeros(num_rows, np.int64)
        self._longest_R = np.zeros(num_rows, np.int64)
        self._stops_RS = np.full((num_rows, 1), _NO_ID, np.int64)

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self.sequences)

    def join(self, sequence: Sequence, table: Several[int], num_cached: int) -> None:
        """Give ``sequence`` the next row, and ``table`` with its first tokens in the cache."""
        row, sampling, answer = self.count, sequence.request.sampling, sequence.answer
        given, num_given = sequence.given_ids_T, len(sequence.given_ids_T)
        self.sequences.append(sequence)
        sequence.row, sequence.answer = row, None
        self.ids_RC[row, :num_given] = given
        self.length_R[row] = self._flushed_R[row] = num_given
        if answer is not None:
            span = slice(num_given, num_given + len(answer.ids_T))
            self.ids_RC[row, span], self._logprobs_RC[row, span] = answer.ids_T, answer.logprobs_T
            self._versions_RC[row, span], self._entropies_RC[row, span] = answer.versions_T, answer.entropies_T
            self.length_R[row], self._flushed_R[row] = span.stop, num_given + answer.num_flushed
        self.held_R[row], self.computed_R[row] = 0, num_cached
        self.extend(row, table)
        self.priority_R[row], self.arrival_R[row] = sequence.request.priority, sequence.arrival
        self.routed_R[row], self._recorded_R[row] = sampling.record_routing, sampling.record_kept
        self._entropic_R[row] = sampling.record_entropy
        self.strings_R[row] = bool(sampling.stop)
        self.pin_R[row] = NO_ROW if sequence.pin is None else sequence.pin
        self.adapter_R[row] = sequence.adapter
        self._longest_R[row] = sequence.longest
        self._set_stops(row, sampling.stop_ids)
        sampled_T = self.ids_RC[row, sequence.num_prompt : self.length_R[row]]
        for follower in self._followers:
            follower.join(row, sampling, given[: sequence.num_prompt], sampled_T)

    def leave(self, leaving: Several[int] | Index) -> None:
        """Free these rows; the last rows move into the gaps."""
        left = self.count - len(leaving)
        stays = np.ones(self.count, bool)
        stays[leaving] = False
        targets = np.flatnonzero(~stays[:left])
        sources = left + np.flatnonzero(stays[left:])
        longest = int(self.length_R[sources].max(initial=0))
        entropies = [self._entropies_RC] if self._entropic_R[sources].any() else []
        for wide in (self.ids_RC, self._logprobs_RC, self._versions_RC, *entropies):
            wide[targets, :longest] = wide[sources, :longest]
        for column in self._columns():
            column[targets] = column[sources]
        for row in np.asarray(leaving).tolist():
            self.sequences[row].row = NO_ROW
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.sequences[target] = self.sequences[source]
            self.sequences[target].row = target
        del self.sequences[left:]
        for follower in self._followers:
            follower.move(sources, targets, left)

    def extend(self, row: int, blocks: Several[int]) -> None:
        """Add blocks to a row's table."""
        held = int(self.held_R[row])
        self.tables_RB[row, held : held + len(blocks)] = blocks
        self.held_R[row] += len(blocks)

    def table(self, row: int) -> list[int]:
        """The row's blocks."""
        blocks: list[int] = self.tables_RB[row, : self.held_R[row]].tolist()
        return blocks

    def decoding(self) -> Flags:
        """Rows of which all but the newest token are in the cache."""
        ready: Flags = self.computed_R[: self.count] == self.length_R[: self.count] - 1
        return ready

    def by_rank(self, rows: Index) -> Index:
        """These rows, those that are preempted last first."""
        return rows[np.lexsort((self.arrival_R[rows], -self.priority_R[rows]))]

    def record(
        self, rows_D: Index, ids_D: Index, logprobs_D: FloatColumn, version: int, entropies_D: FloatColumn | None = None
    ) -> None:
        """Append one sampled token to each of these rows; with its entropy, where a row records it."""
        column_D = self.length_R[rows_D]
        self.ids_RC[rows_D, column_D] = ids_D
        self._logprobs_RC[rows_D, column_D] = logprobs_D
        self._versions_RC[rows_D, column_D] = version
        if entropies_D is not None:
            self._entropies_RC[rows_D, column_D] = entropies_D
        self.length_R[rows_D] += 1

    def record_kept(self, rows_D: Index, kept: KeptSets | None) -> None:
        """What the newest tokens of these rows were drawn from; ``None`` for the whole vocabulary."""
        places = np.flatnonzero(self._recorded_R[rows_D]).tolist()
        if not places:
            return
        if kept is None:
            ids_E, ends = _NO_IDS, [0] * len(rows_D)
            starts = ends
        else:
            ends_D = np.cumsum(kept.sizes_T)
            ids_E, ends, starts = kept.ids_E, ends_D.tolist(), (ends_D - kept.sizes_T).tolist()
        for place, row in zip(places, rows_D[places].tolist(), strict=True):
            self.sequences[row].kept.append((ids_E, starts[place], ends[place]))

    def stopped(self, rows_D: Index) -> Flags:
        """Which of these rows' newest tokens end them."""
        newest_D = self.ids_RC[rows_D, self.length_R[rows_D] - 1]
        ended: Flags = (newest_D[:, None] == self._stops_RS[rows_D]).any(axis=1)
        return ended

    def full(self, rows_D: Index) -> Flags:
        """Which of these rows may grow no further."""
        return self.length_R[rows_D] >= self._longest_R[rows_D]

    def due(self, rows_D: Index, flush_tokens: int) -> Flags:
        """Which of these rows hold so many tokens that have not left; the newest of one that records its routing cannot
        leave before its routing is known."""
        ready_D = self.length_R[rows_D] - self._flushed_R[rows_D] - self.routed_R[rows_D]
        return ready_D >= flush_tokens

    def forget_last(self, row: int) -> None:
        """Take back the newest token of ``row``."""
        self.length_R[row] -= 1
        if self._recorded_R[row]:
            self.sequences[row].kept.pop()

    def num_sampled(self, row: int) -> int:
        """Tokens of the row's answer."""
        return int(self.length_R[row]) - len(self.sequences[row].given_ids_T)

    def ids_of(self, row: int) -> IntColumn:
        """All tokens of the row, as a view."""
        return self.ids_RC[row, : self.length_R[row]]

    def answer(self, row: int) -> FinishedSequence:
        """What the row has sampled, to be kept while its sequence waits."""
        start = len(self.sequences[row].given_ids_T)
        span = slice(start, int(self.length_R[row]))
        return FinishedSequence(
            ids_T=self.ids_RC[row, span].copy(),
            logprobs_T=self._logprobs_RC[row, span].copy(),
            versions_T=self._versions_RC[row, span].copy(),
            entropies_T=self._entropies_RC[row, span].copy(),
            num_flushed=int(self._flushed_R[row]) - start,
        )

    def unsent(self, row: int, *, all_of_it: bool) -> slice:
        """Where the tokens stand that can leave now; of one that records its routing ``all_of_it`` only at its end."""
        held_back = 0 if all_of_it else int(self.routed_R[row])
        return slice(int(self._flushed_R[row]), int(self.length_R[row]) - held_back)

    def flush(self, row: int, span: slice) -> Chunk:
        """The tokens of ``span``, which leave now."""
        sequence = self.sequences[row]
        self._flushed_R[row] = span.stop
        count = span.stop - span.start
        kept = gather(sequence.kept[:count]) if self._recorded_R[row] else None
        del sequence.kept[:count]
        return Chunk(
            request_id=sequence.request.request_id,
            ids_T=self.ids_RC[row, span].copy(),
            logprobs_T=self._logprobs_RC[row, span].copy(),
            versions_T=self._versions_RC[row, span].copy(),
            kept=kept,
            entropies_T=self._entropies_RC[row, span].copy() if self._entropic_R[row] else None,
        )

    def _columns(self) -> list[npt.NDArray[np.generic]]:
        return [
            self.tables_RB, self.held_R, self.length_R, self.computed_R, self.priority_R, self.arrival_R, self.routed_R,
            self.strings_R, self.pin_R, self.adapter_R, self._recorded_R, self._entropic_R, self._flushed_R,
            self._longest_R, self._stops_RS,
        ]  # fmt: skip

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stops_RS.shape[1]
        if missing > 0:
            self._stops_RS = np.pad(self._stops_RS, ((0, 0), (0, missing)), constant_values=_NO_ID)
        self._stops_RS[row] = _NO_ID
        self._stops_RS[row, : len(stop_ids)] = stop_ids
