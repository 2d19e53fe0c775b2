"""The state of the running sequences, stored as arrays with one row per sequence, and the chunks that the engine
returns: the new tokens of a sequence with their logprobs, versions and other records.

A sequence that joins the batch gets the first unused row. When sequences leave, the last rows move into the gaps, so
the rows in use are always ``[:count]``. A sampled token is stored at its position in the sequence, after the prompt. To
*flush* tokens is to put them into a chunk; flushed tokens count as *sent*.

Shape legend: R rows, C columns (the longest context), B blocks of the longest context, S stop ids of one request, D
rows that have just sampled, T tokens of one sequence, E entries of the kept-sets of several tokens.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.base.errors import RequestError
from headrace.base.types.columns import FloatColumn, IntColumn
from headrace.base.types.episode import RESTARTED, StopReason, TokenChunk
from headrace.base.types.recorded import KeptSets
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens
from headrace.engine.native.blocks import count_blocks
from headrace.engine.native.routes import RoutingStore
from headrace.engine.native.sequence import NO_ROW, FinishedSequence, Kept, Sequence

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NO_ID = -1
_NO_IDS = np.zeros(0, np.int32)


def gather(kept: abc.Sequence[Kept]) -> KeptSets:
    """Return the kept-sets of several tokens (for each, the vocabulary entries that survived truncation) as one record.
    ``kept`` has for each token the kept ids of all rows of its step, and the start and end of the token's own ids among
    them."""
    return KeptSets(
        ids_E=np.concatenate([_NO_IDS, *[ids_E[start:end] for ids_E, start, end in kept]]),
        sizes_T=np.array([end - start for _, start, end in kept], np.int32),
    )


class Follower(Protocol):
    """An object that has arrays of its own for the same rows, such as sampling parameters. :class:`Rows` notifies it
    when sequences join or move."""

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Set up ``row``, the first unused one, for a sequence that joins the batch, with the parameters ``sampling``
        and the prompt ``prompt_ids_T``. ``answer_ids_T`` are the tokens that it has sampled already, if it is a fork or
        was preempted; otherwise empty."""
        ...

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Move the rows ``sources`` to the indices ``targets``, after other rows have left; ``count`` rows are in use
        now."""
        ...


class Rows:
    """The state of the batch: the arrays for at most ``num_rows`` sequences of at most ``num_columns`` tokens, of which
    the first ``count`` rows are in use. ``followers`` are notified of every change of the rows."""

    def __init__(self, num_rows: int, num_columns: int, followers: abc.Sequence[Follower] = ()) -> None:
        """Allocate the arrays for ``num_rows`` sequences of at most ``num_columns`` tokens; no row is in use yet.
        ``followers`` are described at the class."""
        self._followers = list(followers)
        self.num_rows = num_rows
        self.sequences: list[Sequence] = []
        """The sequences in the rows in use, in order."""
        self.ids_RC = np.zeros((num_rows, num_columns), np.int32)
        """The ids of the tokens of each row, given and sampled."""
        self._logprobs_RC = np.zeros((num_rows, num_columns), np.float32)
        """The logprobs of the sampled tokens, at their positions in the sequence."""
        self._versions_RC = np.zeros((num_rows, num_columns), np.int32)
        """The versions that sampled them."""
        self._entropies_RC = np.zeros((num_rows, num_columns), np.float32)
        """Their entropies in nats, in rows that record them."""
        self.tables_RB = np.zeros((num_rows, count_blocks(num_columns)), np.int32)
        """The blocks of the cache of each row, in the order of its tokens."""
        self.num_blocks_R = np.zeros(num_rows, np.int64)
        """The number of blocks in each row's table."""
        self.length_R = np.zeros(num_rows, np.int64)
        """The number of tokens of each sequence, given and sampled."""
        self.computed_R = np.zeros(num_rows, np.int64)
        """The number of these tokens whose keys and values are in the cache; all but the newest while a row decodes."""
        self.priority_R = np.zeros(num_rows, np.int64)
        """The priority of each request; a larger one joins earlier and is preempted later."""
        self.arrival_R = np.zeros(num_rows, np.int64)
        """The number of arrival of each sequence."""
        self.records_routing_R = np.zeros(num_rows, bool)
        """Whether each row records its routing."""
        self.has_stop_strings_R = np.zeros(num_rows, bool)
        """Whether each row has stop strings."""
        self.pin_R = np.full(num_rows, NO_ROW, np.int64)
        """The version that each row is pinned to; negative for none."""
        self.adapter_R = np.zeros(num_rows, np.int64)
        """The index of the adapter that computes each row."""
        self._records_kept_R = np.zeros(num_rows, bool)
        """Whether each row records its kept-sets."""
        self._records_entropy_R = np.zeros(num_rows, bool)
        """Whether each row records the entropy at its tokens."""
        self._flushed_R = np.zeros(num_rows, np.int64)
        """The number of tokens of each row, given ones included, that are sent or need not be sent."""
        self._max_length_R = np.zeros(num_rows, np.int64)
        """The number of tokens, given and sampled, at which each sequence ends."""
        self._stops_RS = np.full((num_rows, 1), _NO_ID, np.int64)
        """The stop ids of each row, filled up with ``_NO_ID``."""

    @property
    def count(self) -> int:
        """The number of rows in use."""
        return len(self.sequences)

    def add_follower(self, follower: Follower) -> None:
        """Notify ``follower`` of every change of the rows from now on. No row may be in use yet."""
        self._followers.append(follower)

    def add(self, sequence: Sequence, table: abc.Sequence[int], num_cached: int) -> None:
        """Add ``sequence`` to the batch in the first unused row, with ``table`` as its blocks. Its first ``num_cached``
        tokens are in the cache. If it was preempted, the tokens that it had sampled are restored from its answer."""
        row, sampling, answer = self.count, sequence.request.sampling, sequence.answer
        given, num_given = sequence.given_ids_T, len(sequence.given_ids_T)
        self.sequences.append(sequence)
        sequence.row, sequence.answer = row, None
        self.ids_RC[row, :num_given] = given
        self.length_R[row] = self._flushed_R[row] = num_given
        if answer is not None:
            tokens = answer.tokens
            span = slice(num_given, num_given + len(tokens))
            self.ids_RC[row, span], self._logprobs_RC[row, span] = tokens.ids_T, tokens.logprobs_T
            self._versions_RC[row, span] = tokens.versions_T
            self._entropies_RC[row, span] = 0 if tokens.entropies_T is None else tokens.entropies_T
            self.length_R[row], self._flushed_R[row] = span.stop, num_given + answer.num_flushed
        self.num_blocks_R[row], self.computed_R[row] = 0, num_cached
        self.extend(row, table)
        self.priority_R[row], self.arrival_R[row] = sequence.request.priority, sequence.arrival
        self.records_routing_R[row], self._records_kept_R[row] = sampling.record_routing, sampling.record_kept
        self._records_entropy_R[row] = sampling.record_entropy
        self.has_stop_strings_R[row] = bool(sampling.stop)
        self.pin_R[row] = NO_ROW if sequence.pin is None else sequence.pin
        self.adapter_R[row] = sequence.adapter
        self._max_length_R[row] = sequence.max_length
        self._set_stops(row, sampling.stop_ids)
        sampled_T = self.ids_RC[row, sequence.num_prompt : self.length_R[row]]
        for follower in self._followers:
            follower.add(row, sampling, given[: sequence.num_prompt], sampled_T)

    def remove(self, leaving: abc.Sequence[int] | Index) -> None:
        """Remove the sequences in the rows ``leaving`` from the batch; the last rows move into the gaps."""
        num_left = self.count - len(leaving)
        staying = np.ones(self.count, bool)
        staying[leaving] = False
        targets = np.flatnonzero(~staying[:num_left])
        sources = num_left + np.flatnonzero(staying[num_left:])
        longest = int(self.length_R[sources].max(initial=0))
        entropies = [self._entropies_RC] if self._records_entropy_R[sources].any() else []
        for wide in (self.ids_RC, self._logprobs_RC, self._versions_RC, *entropies):
            wide[targets, :longest] = wide[sources, :longest]
        for column in self._columns():
            column[targets] = column[sources]
        for row in np.asarray(leaving).tolist():
            self.sequences[row].row = NO_ROW
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.sequences[target] = self.sequences[source]
            self.sequences[target].row = target
        del self.sequences[num_left:]
        for follower in self._followers:
            follower.move(sources, targets, num_left)

    def extend(self, row: int, blocks: abc.Sequence[int]) -> None:
        """Add cache blocks at the end of a row's table."""
        num_blocks = int(self.num_blocks_R[row])
        self.tables_RB[row, num_blocks : num_blocks + len(blocks)] = blocks
        self.num_blocks_R[row] += len(blocks)

    def table(self, row: int) -> list[int]:
        """Return the row's blocks of the key-value cache, in the order of its tokens."""
        blocks: list[int] = self.tables_RB[row, : self.num_blocks_R[row]].tolist()
        return blocks

    def decoding(self) -> Flags:
        """Return for each row in use whether it decodes, that is, all its tokens but the newest are in the cache. The
        other rows still compute their context."""
        ready: Flags = self.computed_R[: self.count] == self.length_R[: self.count] - 1
        return ready

    def sort_by_rank(self, rows: Index) -> Index:
        """Return these rows ordered by rank: higher priority first, then order of arrival. The last one is preempted
        first."""
        return rows[np.lexsort((self.arrival_R[rows], -self.priority_R[rows]))]

    def record(
        self,
        rows_D: Index,
        ids_D: Index,
        logprobs_D: FloatColumn,
        version: int | Index,
        entropies_D: FloatColumn | None = None,
        *,
        offsets_D: Index | int = 0,
    ) -> None:
        """Append one sampled token to each of ``rows_D``: its id, its logprob, the version that sampled it (one number
        for all rows, or one for each) and its entropy in nats (``None`` if no row records entropies). A row that gets
        several tokens occurs in ``rows_D`` once for each token, in their order, and ``offsets_D`` numbers these tokens
        from 0."""
        column_D = self.length_R[rows_D] + offsets_D
        self.ids_RC[rows_D, column_D] = ids_D
        self._logprobs_RC[rows_D, column_D] = logprobs_D
        self._versions_RC[rows_D, column_D] = version
        if entropies_D is not None:
            self._entropies_RC[rows_D, column_D] = entropies_D
        # numpy keeps the last value that is assigned to a row, which is its new length
        self.length_R[rows_D] = column_D + 1

    def record_kept(self, rows_D: Index, kept: KeptSets | None) -> None:
        """Store the kept-sets of the newest tokens of ``rows_D``, for the rows that record them; a row with several
        tokens occurs several times. ``None`` means that no row was truncated: each kept-set is the whole vocabulary,
        which is stored as an empty set."""
        places = np.flatnonzero(self._records_kept_R[rows_D]).tolist()
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

    def record_top(self, rows_D: Index, top: TopScores | None) -> None:
        """Store the likeliest entries at the newest tokens of ``rows_D``, as many as the request of each row sets.
        ``top`` is ``None`` if no row records any."""
        if top is None:
            return
        for place, row in enumerate(rows_D.tolist()):
            if num := self.sequences[row].request.sampling.record_top:
                here = top[place : place + 1]
                self.sequences[row].top.append(
                    TopScores(logprobs_T=here.logprobs_T, ids_TK=here.ids_TK[:, :num], logs_TK=here.logs_TK[:, :num])
                )

    def stopped(self, rows_D: Index) -> Flags:
        """Return for each of ``rows_D`` whether its newest token is one of its stop ids."""
        return self.are_stops(rows_D, self.ids_RC[rows_D, self.length_R[rows_D] - 1])

    def are_stops(self, rows_D: Index, ids_D: Index | IntColumn) -> Flags:
        """Return for each of ``rows_D`` whether its token in ``ids_D`` is one of its stop ids."""
        found: Flags = (ids_D[:, None] == self._stops_RS[rows_D]).any(axis=1)
        return found

    def draftable(self, rows_D: Index) -> Index:
        """Return for each of ``rows_D`` how many tokens a pass may draft for it: the tokens up to its limit, except the
        one that every pass samples."""
        num_tokens: Index = self._max_length_R[rows_D] - self.length_R[rows_D] - 1
        return num_tokens

    def chances(self, row: int, start: int) -> FloatColumn:
        """Return the probability with which each token of ``row`` was drawn, from position ``start`` to the end."""
        drawn: FloatColumn = np.exp(self._logprobs_RC[row, start : self.length_R[row]])
        return drawn

    def full(self, rows_D: Index) -> Flags:
        """Return for each of ``rows_D`` whether it has as many tokens as its request allows."""
        return self.length_R[rows_D] >= self._max_length_R[rows_D]

    def due(self, rows_D: Index, flush_tokens: int) -> Flags:
        """Return for each of ``rows_D`` whether it has at least ``flush_tokens`` unsent tokens. In a row that records
        its routing, the newest token does not count, because its routing is computed in the next pass."""
        ready_D = self.length_R[rows_D] - self._flushed_R[rows_D] - self.records_routing_R[rows_D]
        return ready_D >= flush_tokens

    def remove_last(self, row: int) -> None:
        """Remove the newest token of ``row`` with its kept-set and likeliest entries, because its logits were
        invalid."""
        self.length_R[row] -= 1
        if self._records_kept_R[row]:
            self.sequences[row].kept.pop()
        if self.sequences[row].request.sampling.record_top:
            self.sequences[row].top.pop()

    def num_sampled(self, row: int) -> int:
        """Return the number of tokens of the row after its given tokens, with which its sequence began."""
        return int(self.length_R[row]) - len(self.sequences[row].given_ids_T)

    def get_ids(self, row: int) -> IntColumn:
        """Return the ids of all tokens of the row, given and sampled, as a view that is valid until the rows change."""
        return self.ids_RC[row, : self.length_R[row]]

    def answer(self, row: int) -> FinishedSequence:
        """Return a copy of the sampled tokens of the row, and the number of sent ones among them. The scheduler keeps
        this record when the sequence leaves its row and waits."""
        start = len(self.sequences[row].given_ids_T)
        span = slice(start, int(self.length_R[row]))
        return FinishedSequence(tokens=self._tokens(row, span), num_flushed=int(self._flushed_R[row]) - start)

    def unsent(self, row: int, *, final: bool) -> slice:
        """Return the positions of the unsent tokens that can be sent now. In a row that records its routing, the newest
        token is included only in the ``final`` chunk."""
        num_delayed = 0 if final else int(self.records_routing_R[row])
        return slice(int(self._flushed_R[row]), int(self.length_R[row]) - num_delayed)

    def flush(self, row: int, span: slice) -> TokenChunk:
        """Return a chunk with the tokens at the positions ``span`` of ``row`` and their records, and count them as
        sent."""
        sequence = self.sequences[row]
        self._flushed_R[row] = span.stop
        count = span.stop - span.start
        kept = gather(sequence.kept[:count]) if self._records_kept_R[row] else None
        del sequence.kept[:count]
        top = TopScores.concat(sequence.top[:count]) if sequence.top[:count] else None
        del sequence.top[:count]
        return TokenChunk(request_id=sequence.request.request_id, tokens=self._tokens(row, span, kept), top=top)

    def _tokens(self, row: int, span: slice, kept: KeptSets | None = None) -> Tokens:
        """Return a copy of the tokens at the positions ``span`` of ``row``, with their logprobs, versions and
        entropies, and with ``kept`` as their kept-sets. The copy stays valid when the row is reused."""
        return Tokens(
            ids_T=self.ids_RC[row, span].copy(),
            logprobs_T=self._logprobs_RC[row, span].copy(),
            versions_T=self._versions_RC[row, span].copy(),
            kept=kept,
            entropies_T=self._entropies_RC[row, span].copy() if self._records_entropy_R[row] else None,
        )

    def _columns(self) -> list[npt.NDArray[np.generic]]:
        """Return the arrays, of one or two dimensions, whose entries move with the rows."""
        return [
            self.tables_RB, self.num_blocks_R, self.length_R, self.computed_R, self.priority_R, self.arrival_R,
            self.records_routing_R, self.has_stop_strings_R, self.pin_R, self.adapter_R, self._records_kept_R,
            self._records_entropy_R, self._flushed_R, self._max_length_R, self._stops_RS,
        ]  # fmt: skip

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        """Set the token ids that end the answer in ``row``; the array is widened if it has too few columns."""
        missing = len(stop_ids) - self._stops_RS.shape[1]
        if missing > 0:
            self._stops_RS = np.pad(self._stops_RS, ((0, 0), (0, missing)), constant_values=_NO_ID)
        self._stops_RS[row] = _NO_ID
        self._stops_RS[row, : len(stop_ids)] = stop_ids


class ChunkBuilder:
    """A builder of the chunks that the engine returns, with the routing from ``routes`` if a request records it. All
    chunks are appended to one list, so that the chunks of a sequence are returned in order."""

    def __init__(self, rows: Rows, routes: RoutingStore) -> None:
        """Start without a chunk. ``rows`` are the sequences of the batch, and ``routes`` has the experts of their
        tokens."""
        self._rows = rows
        self._routes = routes
        self._due: list[TokenChunk] = []
        """The chunks that the engine has not returned yet."""

    @property
    def any(self) -> bool:
        """Whether there are chunks that :meth:`pop` has not returned yet."""
        return bool(self._due)

    def pop(self) -> list[TokenChunk]:
        """Remove and return all chunks, in the order in which they were made."""
        due, self._due = self._due, []
        return due

    def next(self, row: int) -> None:
        """Add a chunk with the unsent tokens of ``row``, whose sequence continues. If it records its routing, the
        newest token is not included, because its routing is computed in the next pass."""
        self._due.append(self._flush(row, final=False))

    def end(self, sequence: Sequence, reason: StopReason | None, error: RequestError | None = None) -> None:
        """Add the last chunk of a sequence, whether it runs or waits, with its unsent tokens and either a stop
        ``reason`` or an ``error``; the other one is ``None``."""
        chunk = self._flush_waiting(sequence) if sequence.row == NO_ROW else self._flush(sequence.row, final=True)
        ended = msgspec.structs.replace(chunk, stop_reason=reason) if error is None else chunk.with_error(error)
        self._due.append(ended)

    def before_change(self, sequence: Sequence) -> None:
        """If ``sequence`` records its routing, add a chunk with the tokens whose routing is stored. It is called before
        the cached context of the sequence is freed or computed again, because the routing is stored with the cache."""
        row, rows = sequence.row, self._rows
        if not rows.records_routing_R[row] or not rows.num_sampled(row):
            return
        span = rows.unsent(row, final=False)
        if (span.stop > span.start or sequence.unreported) and rows.computed_R[row] >= span.stop:
            self._due.append(self._flush(row, final=False))

    def _flush_waiting(self, sequence: Sequence) -> TokenChunk:
        """Return the last chunk of a sequence that waits and has no row: its sampled tokens that were not sent."""
        answer = sequence.answer
        tokens = Tokens.observed([]) if answer is None else answer.tokens[answer.num_flushed :]
        sampling = sequence.request.sampling
        if sampling.record_kept:
            tokens = msgspec.structs.replace(tokens, kept=gather(sequence.kept))
        if sampling.record_entropy and tokens.entropies_T is None:
            tokens = msgspec.structs.replace(tokens, entropies_T=np.zeros(len(tokens), np.float32))
        top = TopScores.concat(sequence.top) if sequence.top else None
        lost = RESTARTED if sequence.restarted else ""
        return TokenChunk(request_id=sequence.request.request_id, tokens=tokens, top=top, lost=lost)

    def _flush(self, row: int, *, final: bool) -> TokenChunk:
        """Return a chunk with the unsent tokens of ``row``, with their routing if it is recorded. ``final`` means that
        the row has ended."""
        rows, sequence = self._rows, self._rows.sequences[row]
        span = rows.unsent(row, final=final)
        chunk = rows.flush(row, span)
        changes: dict[str, object] = {}
        if sequence.restarted:
            changes["lost"] = RESTARTED
        if sequence.request.sampling.record_routing:
            table, num_computed = rows.table(row), int(rows.computed_R[row])
            changes["tokens"] = msgspec.structs.replace(
                chunk.tokens, routing=self._routes.read(table, span, num_computed)
            )
            given = slice(0, len(sequence.given_ids_T))
            if sequence.unreported and num_computed >= given.stop:
                changes["prompt_routing"] = self._routes.read(table, given, num_computed)
        sequence.unreported = sequence.restarted = False
        return msgspec.structs.replace(chunk, **changes) if changes else chunk
