"""The chunks that leave the engine: the tokens of each sequence since its last chunk, with everything recorded of them.

All chunks are in one list, in the order in which they were made, so that none overtakes another.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.base.errors import RequestError
from headrace.base.types.episode import RESTARTED, StopReason, TokenChunk
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens
from headrace.engine.native.routes import RoutingStore
from headrace.engine.native.rows import Rows, gather
from headrace.engine.native.sequence import NO_ROW, Sequence


class ChunkBuilder:
    """A builder of chunks."""

    def __init__(self, rows: Rows, routes: RoutingStore) -> None:
        self._rows = rows
        self._routes = routes
        self._due: list[TokenChunk] = []

    @property
    def any(self) -> bool:
        """Whether there are chunks that have not been taken yet."""
        return bool(self._due)

    def pop(self) -> list[TokenChunk]:
        """Remove and return the chunks."""
        due, self._due = self._due, []
        return due

    def next(self, row: int) -> None:
        """Add a chunk of a sequence that continues. If it records its routing, the newest token is left out: its
        routing is known only after it has been the input of a pass."""
        self._due.append(self._flush(row, final=False))

    def end(self, sequence: Sequence, reason: StopReason | None, error: RequestError | None = None) -> None:
        """Add the chunk that ends a sequence, with a stop reason or an error."""
        chunk = self._waiting(sequence) if sequence.row == NO_ROW else self._flush(sequence.row, final=True)
        self._due.append(msgspec.structs.replace(chunk, stop_reason=reason) if error is None else chunk.failed(error))

    def before_change(self, sequence: Sequence) -> None:
        """Send the recorded routing of ``sequence``, which is in a row, before its cached context is lost or computed
        again."""
        row, rows = sequence.row, self._rows
        if not rows.records_routing_R[row] or not rows.num_sampled(row):
            return
        span = rows.unsent(row, final=False)
        if (span.stop > span.start or sequence.unreported) and rows.computed_R[row] >= span.stop:
            self._due.append(self._flush(row, final=False))

    def _waiting(self, sequence: Sequence) -> TokenChunk:
        """Return the last chunk of a sequence that is in no row: the tokens that it had sampled and not sent."""
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
        """Return the chunk of a row's tokens that have not been sent, with their routing if it is recorded. ``final``
        says that the row has ended."""
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
