"""Writers: the objects with which the controller's event loop records operations in the ledger without waiting for the
disk.

Operations are recorded in the order of the calls. ``write`` returns at once; ``flush`` waits until all earlier
operations are recorded, and raises the error of an operation that could not be recorded.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.flow.ledger.base import EndEpisode, Ledger, Operation, Stream

GATHER_S = 0.025
"""Seconds for which operations are collected before they are recorded in one transaction, unless a flush waits for
them."""
MOST_PER_TRANSACTION = 256
"""Greatest number of operations in one transaction."""
MOST_TOKENS_PER_TRANSACTION = 1 << 18
"""Number of tokens of ended episodes at which a transaction is full, since they stay in memory until it has ended."""
CLOSE_S = 30.0
"""Greatest number of seconds that :meth:`ThreadedWriter.close` waits for the thread."""


class LedgerWriter(Protocol):
    """The contract of a writer, which receives operations and records them in a ledger."""

    def write(self, operation: Operation) -> None:
        """Record ``operation`` after all operations of earlier calls, without waiting. Raises the error of an earlier
        operation that could not be recorded."""

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until the operations of all earlier calls are recorded, so that they survive the end of this process. If
        ``durable``, also wait until they are synced to the disk, so that they survive a power failure.

        Raises :class:`~headrace.base.errors.LedgerError` if an operation could not be recorded.
        """

    def close(self) -> None:
        """Record the remaining operations and stop. The wait for a disk that hangs has a time limit."""


class _Persist:
    """A marker in the queue that requests a sync of all earlier operations to the disk."""


_PERSIST = _Persist()
_Item = Operation | _Persist | asyncio.Future[None] | None


class InlineWriter:
    """A writer that records at once, in the caller's thread, for ledgers in memory and for virtual time."""

    def __init__(self, ledger: Ledger) -> None:
        """Create the writer. ``ledger`` is the ledger in which operations are recorded. :meth:`close` leaves it
        open."""
        self._ledger = ledger

    def write(self, operation: Operation) -> None:
        """Record ``operation`` before returning."""
        self._ledger.apply(operation)

    async def flush(self, *, durable: bool = False) -> None:
        """If ``durable``, sync the recorded operations to the disk; otherwise do nothing, because ``write`` has
        recorded them."""
        if durable:
            self._ledger.persist()

    def close(self) -> None:
        """Do nothing, because all operations are recorded. The ledger stays open."""
        return


class ThreadedWriter:
    """A writer that records operations in its own thread, in transactions of up to :data:`MOST_PER_TRANSACTION`
    operations.

    The queue has no explicit bound. Its length is bounded because each group in flight adds only a few operations.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Start the thread that records in ``ledger``."""
        self._ledger = ledger
        self._queue: deque[_Item] = deque()
        """The operations that the thread has not taken yet, in order; ``None`` ends the thread."""
        self._pending = threading.Event()
        """The event that is set while the queue has items."""
        self._urgent = threading.Event()
        """The event that makes the thread record at once, without waiting for more operations."""
        self._error: Exception | None = None
        """The error with which the thread failed; ``None`` if there is none."""
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, operation: Operation) -> None:
        """Queue ``operation`` for the thread. Raises the error of an earlier operation that could not be recorded."""
        if self._error is not None:
            raise self._error
        self._queue.append(operation)
        if isinstance(operation, Stream):
            self._urgent.set()  # recorded at once: flow.record_tokens limits how many tokens a crash may lose
        if not self._pending.is_set():
            self._pending.set()

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until all queued operations are recorded and, if ``durable``, synced to the disk. Raises the error of an
        operation that could not be recorded."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if durable:
            self._queue.append(_PERSIST)
        self._enqueue_urgent(done)
        await done
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Record the queued operations and end the thread. Wait for at most :data:`CLOSE_S` seconds."""
        self._enqueue_urgent(None)
        self._thread.join(CLOSE_S)

    def _enqueue_urgent(self, item: _Item) -> None:
        """Append ``item`` to the queue and wake the thread, which then does not wait for more operations. The thread
        resolves a future when all earlier items are recorded; ``None`` ends the thread."""
        self._queue.append(item)
        self._urgent.set()
        self._pending.set()

    def _run(self) -> None:
        """Record the queued operations in order, several in one transaction, until ``None`` is in the queue: the body
        of the thread."""
        gathered: list[Operation] = []
        num_tokens = 0
        while True:
            self._pending.wait()
            self._urgent.wait(GATHER_S)
            self._pending.clear()
            self._urgent.clear()
            while self._queue:
                item = self._queue.popleft()
                full = len(gathered) == MOST_PER_TRANSACTION or num_tokens >= MOST_TOKENS_PER_TRANSACTION
                if full or isinstance(item, _Persist | asyncio.Future | None):
                    gathered, num_tokens = self._record(gathered), 0
                if item is None:
                    return
                if isinstance(item, asyncio.Future):
                    item.get_loop().call_soon_threadsafe(_resolve, item)
                elif isinstance(item, _Persist):
                    self._call_ledger(self._ledger.persist)
                else:
                    gathered.append(item)
                    num_tokens += _num_tokens(item)
            gathered, num_tokens = self._record(gathered), 0

    def _record(self, gathered: list[Operation]) -> list[Operation]:
        """Record the operations ``gathered`` in one transaction. Return a new empty list for the following
        operations."""
        if gathered:
            self._call_ledger(partial(self._ledger.apply, *gathered))
        return []

    def _call_ledger(self, call: Callable[[], None]) -> None:
        """Call ``call``, a method of the ledger, unless an earlier call has failed. If it raises, store the error,
        which ``write`` and ``flush`` then raise in the event loop."""
        if self._error is not None:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: write and flush raise it
            self._error = error


def _num_tokens(operation: Operation) -> int:
    """Return the number of tokens that ``operation`` records, where it is an episode; else 0."""
    if not isinstance(operation, EndEpisode):
        return 0
    return sum([len(turn.tokens.ids_T) for turn in operation.episode.turns])


def _resolve(future: asyncio.Future[None]) -> None:
    """Resolve the future of a flush, unless the flush was cancelled. The thread of the writer schedules this call in
    the event loop."""
    if not future.done():
        future.set_result(None)
