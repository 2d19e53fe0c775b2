"""How the controller's event loop writes a ledger without ever waiting for a disk.

Operations are recorded in the order given. ``write`` returns at once; ``flush`` waits until all of it is recorded, and
raises what went wrong.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Protocol

from headrace.flow.ledger.base import Ledger, Operation

CLOSE_S = 30.0
"""How long the end waits for a disk."""


class LedgerWriter(Protocol):
    """Takes operations for a ledger."""

    def write(self, operation: Operation) -> None:
        """Record ``operation`` after all that were given before it. Raises if an earlier one could not be recorded."""
        ...

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until everything given is recorded, and, if ``durable``, until it would outlast a loss of power.

        Raises :class:`~headrace.errors.LedgerError` if it could not be.
        """
        ...

    def close(self) -> None:
        """Record what is left and stop; a disk that hangs is not waited for without end."""
        ...


class _Persist:
    """What is recorded so far is to outlast a loss of power."""


_PERSIST = _Persist()
_Item = Operation | _Persist | asyncio.Future[None] | None


class InlineWriter:
    """Writes at once, in the caller's thread: for ledgers in memory and for virtual time."""

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
    """Writes in one thread of its own.

    What is queued is bounded by what the flow holds: a few operations per group in flight.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: deque[_Item] = deque()
        self._given = threading.Semaphore(0)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, operation: Operation) -> None:
        if self._error is not None:
            raise self._error
        self._put(operation)

    async def flush(self, *, durable: bool = False) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if durable:
            self._put(_PERSIST)
        self._put(done)
        await done
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._put(None)
        self._thread.join(CLOSE_S)

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        self._given.release()

    def _run(self) -> None:
        while True:
            self._given.acquire()
            item = self._queue.popleft()
            if item is None:
                return
            if isinstance(item, asyncio.Future):
                item.get_loop().call_soon_threadsafe(_finish, item)
            elif self._error is None:
                self._apply(item)

    def _apply(self, operation: Operation | _Persist) -> None:
        try:
            if isinstance(operation, _Persist):
                self._ledger.persist()
            else:
                self._ledger.apply(operation)
        except Exception as error:  # noqa: BLE001 - the edge of the thread: write and flush raise it
            self._error = error


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
