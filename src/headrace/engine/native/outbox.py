"""What leaves the engine: the tokens of each sequence since its last chunk, with all that was recorded of them."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.engine.native.routes import Routes
from headrace.engine.native.rows import Rows
from headrace.engine.native.sequence import Sequence
from headrace.errors import RequestError
from headrace.types.episode import StopReason
from headrace.types.messages.controller import Chunk
from headrace.types.recorded import KeptSets


class Outbox:
    """Makes the chunks."""

    def __init__(self, rows: Rows, routes: Routes) -> None:
        self._rows = rows
        self._routes = routes
        self.due: list[Chunk] = []
        """Chunks that nobody has taken yet."""

    def take(self) -> list[Chunk]:
        """Those that are due."""
        due, self.due = self.due, []
        return due

    def next(self, row: int) -> Chunk:
        """A chunk of a sequence that goes on; of one that records its routing without the newest token, whose routing
        is known only when it has been fed."""
        return self._flush(row, all_of_it=False)

    def last(self, row: int, reason: StopReason | None) -> Chunk:
        """The chunk that ends a sequence."""
        return msgspec.structs.replace(self._flush(row, all_of_it=True), stop_reason=reason)

    def waiting(self, sequence: Sequence, reason: StopReason | None) -> Chunk:
        """The last chunk of one that is in no row: what it has sampled and not sent, if it had begun."""
        answer, sampling = sequence.answer, sequence.request.sampling
        start = 0 if answer is None else answer.num_flushed
        none = np.zeros(0, np.int32)
        return Chunk(
            request_id=sequence.request.request_id,
            ids_T=none if answer is None else answer.ids_T[start:],
            logprobs_T=none.astype(np.float32) if answer is None else answer.logprobs_T[start:],
            versions_T=none if answer is None else answer.versions_T[start:],
            kept=KeptSets.concat(sequence.kept) if sampling.record_kept else None,
            restarted=sequence.restarted,
            stop_reason=reason,
        )

    def before_requeue(self, sequence: Sequence) -> None:
        """A sequence is about to lose its blocks: the routing that stands beside them leaves now."""
        if not sequence.request.sampling.record_routing:
            return
        row = sequence.row
        span = self._rows.unsent(row, all_of_it=False)
        if span.stop > span.start and self._rows.computed_R[row] >= span.stop:
            self.due.append(self._flush(row, all_of_it=False))

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


def failed(chunk: Chunk, problem: str, *, kind: type[RequestError]) -> Chunk:
    """The last chunk of a sequence that was not to be."""
    return msgspec.structs.replace(chunk, error=problem, error_kind=kind.__name__)
