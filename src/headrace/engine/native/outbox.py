"""What leaves the engine: the tokens of each sequence since its last chunk, with all that was recorded of them.

There is one list of chunks, in the order in which they were made: nothing overtakes anything.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.base.errors import RequestError
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import Chunk
from headrace.engine.native.routes import RoutingStore
from headrace.engine.native.rows import Rows, gather
from headrace.engine.native.sequence import NO_ROW, Sequence


class ChunkBuilder:
    """Makes the chunks."""

    def __init__(self, rows: Rows, routes: RoutingStore) -> None:
        self._rows = rows
        self._routes = routes
        self._due: list[Chunk] = []

    @property
    def any(self) -> bool:
        """Whether there are chunks that nobody has taken yet."""
        return bool(self._due)

    def take(self) -> list[Chunk]:
        """The chunks that nobody has taken yet."""
        due, self._due = self._due, []
        return due

    def next(self, row: int) -> None:
        """A chunk of a sequence that goes on; of one that records its routing without the newest token, whose routing
        is known only when it has been fed."""
        self._due.append(self._flush(row, all_of_it=False))

    def end(self, sequence: Sequence, reason: StopReason | None, error: RequestError | None = None) -> None:
        """The chunk that ends a sequence, with a reason or an error."""
        chunk = self._waiting(sequence) if sequence.row == NO_ROW else self._flush(sequence.row, all_of_it=True)
        if error is None:
            chunk = msgspec.structs.replace(chunk, stop_reason=reason)
        else:
            words = f"{error.problem}; {error.remedy}"
            chunk = msgspec.structs.replace(chunk, error=words, error_kind=type(error).__name__)
        self._due.append(chunk)

    def before_change(self, sequence: Sequence) -> None:
        """The cached context of ``sequence``, which is in a row, is about to be lost or computed again: the routing
        that stands beside it leaves now."""
        row, rows = sequence.row, self._rows
        if not rows.routed_R[row] or not rows.num_sampled(row):
            return
        span = rows.unsent(row, all_of_it=False)
        if (span.stop > span.start or sequence.silent) and rows.computed_R[row] >= span.stop:
            self._due.append(self._flush(row, all_of_it=False))

    def _waiting(self, sequence: Sequence) -> Chunk:
        """Of one that is in no row: what it has sampled and not sent, if it had begun."""
        answer = sequence.answer
        start = 0 if answer is None else answer.num_flushed
        none = np.zeros(0, np.int32)
        return Chunk(
            request_id=sequence.request.request_id,
            ids_T=none if answer is None else answer.ids_T[start:],
            logprobs_T=none.astype(np.float32) if answer is None else answer.logprobs_T[start:],
            versions_T=none if answer is None else answer.versions_T[start:],
            kept=gather(sequence.kept) if sequence.request.sampling.record_kept else None,
            entropies_T=(none.astype(np.float32) if answer is None else answer.entropies_T[start:])
            if sequence.request.sampling.record_entropy
            else None,
            restarted=sequence.restarted,
        )

    def _flush(self, row: int, *, all_of_it: bool) -> Chunk:
        rows, sequence = self._rows, self._rows.sequences[row]
        span = rows.unsent(row, all_of_it=all_of_it)
        chunk = rows.flush(row, span)
        changes: dict[str, object] = {}
        if sequence.restarted:
            changes["restarted"] = True
        if sequence.request.sampling.record_routing:
            table, num_computed = rows.table(row), int(rows.computed_R[row])
            changes["routing"] = self._routes.read(table, span, num_computed)
            given = slice(0, len(sequence.given_ids_T))
            if sequence.silent and num_computed >= given.stop:
                changes["prompt_routing"] = self._routes.read(table, given, num_computed)
        sequence.silent = sequence.restarted = False
        return msgspec.structs.replace(chunk, **changes) if changes else chunk
