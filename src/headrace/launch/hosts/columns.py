"""The store for heavy columns (kept-sets, experts) in the process of an engine. The engine writes these columns into
the store and sends references to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.base.errors import SequenceFailed, StoreError
from headrace.base.store import ColumnStore, StoreReader
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.engine import ScoreTokens
from headrace.base.types.tokens import NO_TOKENS
from headrace.launch.starts import StoreStart


class EngineColumns:
    """The engine's access to the store of columns. Without a store, the columns stay in the messages."""

    def __init__(self, start: StoreStart | None = None) -> None:
        """Open the store that ``start`` describes; ``None`` means that there is no store. Raises
        :class:`~headrace.base.errors.StoreError` if its directory cannot be created."""
        self._directory = None if start is None else Path(start.directory)
        """The directory of the store; ``None`` without a store."""
        self._store: ColumnStore | None = None
        """The store for writing; ``None`` if this engine does not write."""
        if start is not None and start.writer:
            self._store = ColumnStore(Path(start.directory), start.writer, limit_bytes=start.limit_bytes)

    def store(self, chunks: list[TokenChunk], abort: Callable[[Sequence[int]], list[TokenChunk]]) -> list[TokenChunk]:
        """Write the kept-sets and experts of ``chunks`` into the store, and return the chunks with references in their
        place. If the store has no space for a sequence, the sequence fails: it is withdrawn with ``abort``, which
        returns chunks that have to be sent, and its last tokens are dropped."""
        if self._store is None:
            return chunks
        sent: list[TokenChunk] = []
        failed: set[int] = set()
        pending = deque(chunks)
        while pending:
            chunk = pending.popleft()
            if chunk.request_id in failed:
                continue
            try:
                sent.append(self._store.chunk(chunk))
            except StoreError as error:
                failed.add(chunk.request_id)
                reason = SequenceFailed(error.problem, remedy=error.remedy)
                empty = TokenChunk(request_id=chunk.request_id, tokens=NO_TOKENS, lost=chunk.lost)
                sent.append(empty.with_error(reason))
                pending.extend(abort([chunk.request_id]))
        return sent

    def read(self, message: ScoreTokens) -> ScoreTokens:
        """Return a copy of ``message``, an order to score tokens, with the kept-sets and experts in memory. Raises
        :class:`~headrace.base.errors.StoreError` if they cannot be read."""
        kept, routing = message.kept, message.routing
        if self._directory is None or not ((kept and kept.stored) or (routing and routing.stored)):
            return message
        reader = StoreReader(self._directory)
        return msgspec.structs.replace(
            message, kept=kept and reader.kept(kept), routing=routing and reader.routing(routing)
        )  # fmt: skip
