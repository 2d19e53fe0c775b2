"""Writers, through which the controller's event loop records operations without waiting for a disk.

Operations are recorded in the order given. ``write`` returns at once; ``flush`` waits until all of them are recorded,
and raises the error of one that could not be.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from headrace.flow.ledger.base import Ledger, Operation, Stream

GATHER_S = 0.025
"""Seconds that operations are gathered before they are recorded together, unless a flush waits for them."""
MOST_PER_TRANSACTION = 256
"""Greatest number of operations in one transaction."""
CLOSE_S = 30.0
"""Seconds that :meth:`ThreadedWriter.close` waits for the disk."""


class LedgerWriter(Protocol):
    """The contract of a writer: it takes operations and records them in a ledger."""

    def write(self, operation: Operation) -> None:
        """Record ``operation`` after all operations given before. Raises if an earlier one could not be recorded."""
        ...

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until all operations given before are recorded, so that they survive the end of this process. If
        ``durable``, wait until they have reached the disk, so that they survive a power failure, too.

        Raises :class:`~headrace.base.errors.LedgerError` if one of them could not be recorded.
        """
        ...

    def close(self) -> None:
        """Record the remaining operations and stop. The wait for a disk that hangs is bounded."""
        ...


class _Persist:
    """A marker in the queue: make everything recorded so far survive a power failure."""


_PERSIST = _Persist()
_Item = Operation | _Persist | asyncio.Future[None] | None


class InlineWriter:
    """A writer that records at once, in the caller's thread: for ledgers in memory and for virtual time."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def write(self, operation: Operation) -> None:
        self._ledger.apply(operation)

    async def flush(self, *, durable: bool = False) -> None:
        if durable:
            self._ledger.persist()

    def close(self) -> None:
        return


class ThreadedWriter:
    """A writer that records in a thread of its own, many operations in one transaction if many come at once.

    The queue needs no bound of its own: it holds a few operations for each group in flight.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: deque[_Item] = deque()
        self._pending = threading.Event()
        self._urgent = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, operation: Operation) -> None:
        """Queue an operation for the thread that writes the ledger. Raises the error of an earlier one that could not
        be written."""
        if self._error is not None:
            raise self._error
        self._queue.append(operation)
        if isinstance(operation, Stream):
            self._urgent.set()  # not held back: flow.record_tokens limits how many tokens a crash may lose
        if not self._pending.is_set():
            self._pending.set()

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until all queued operations are written; with ``durable``, until they would survive a power failure."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if durable:
            self._queue.append(_PERSIST)
        self._enqueue_urgent(done)
        await done
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._enqueue_urgent(None)
        self._thread.join(CLOSE_S)

    def _enqueue_urgent(self, item: _Item) -> None:
        self._queue.append(item)
        self._urgent.set()
        self._pending.set()

    def _run(self) -> None:
        """Record the queued operations in order, several in one transaction, until the queue yields ``None``."""
        gathered: list[Operation] = []
        while True:
            self._pending.wait()
            self._urgent.wait(GATHER_S)
            self._pending.clear()
            self._urgent.clear()
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, _Persist | asyncio.Future | None) or len(gathered) == MOST_PER_TRANSACTION:
                    gathered = self._record(gathered)
                if item is None:
                    return
                if isinstance(item, asyncio.Future):
                    item.get_loop().call_soon_threadsafe(_finish, item)
                elif isinstance(item, _Persist):
                    self._attempt(self._ledger.persist)
                else:
                    gathered.append(item)
            gathered = self._record(gathered)

    def _record(self, gathered: list[Operation]) -> list[Operation]:
        """Record the gathered operations in one transaction, and return an empty list."""
        if gathered:
            self._attempt(partial(self._ledger.apply, *gathered))
        return []

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do ``work``, unless an earlier call has failed. Keep its error, which ``write`` and ``flush`` then raise."""
        if self._error is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: write and flush raise it
            self._error = error


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
