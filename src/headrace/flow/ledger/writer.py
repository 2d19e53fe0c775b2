"""How the controller's event loop writes a ledger without ever waiting for a disk.

Operations are recorded in the order given. ``write`` returns at once; ``flush`` waits until all of it is recorded, and
raises what went wrong.
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
"""How long operations gather before they are recorded together, where nobody waits for it."""
MOST_TOGETHER = 256
"""Operations of one transaction."""
CLOSE_S = 30.0
"""How long the end waits for a disk."""


class LedgerWriter(Protocol):
    """Takes operations for a ledger."""

    def write(self, operation: Operation) -> None:
        """Record ``operation`` after all that were given before it. Raises if an earlier one could not be recorded."""
        ...

    async def flush(self, *, durable: bool = False) -> None:
        """Wait until everything given is recorded, and, if ``durable``, until it would outlast a loss of power.

        Raises :class:`~headrace.base.errors.LedgerError` if it could not be.
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
    """Writes in one thread of its own, many operations in one transaction where many come at once.

    What is queued is bounded by what the flow holds: a few operations per group in flight.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queue: deque[_Item] = deque()
        self._given = threading.Event()
        self._awaited = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def write(self, operation: Operation) -> None:
        if self._error is not None:
            raise self._error
        self._queue.append(operation)
        if isinstance(operation, Stream):  # of running turns no more may be lost than was agreed
            self._awaited.set()
        if not self._given.is_set():
            self._given.set()

    async def flush(self, *, durable: bool = False) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if durable:
            self._queue.append(_PERSIST)
        self._hurry(done)
        await done
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._hurry(None)
        self._thread.join(CLOSE_S)

    def _hurry(self, item: _Item) -> None:
        self._queue.append(item)
        self._awaited.set()
        self._given.set()

    def _run(self) -> None:
        together: list[Operation] = []
        while True:
            self._given.wait()
            self._awaited.wait(GATHER_S)
            self._given.clear()
            self._awaited.clear()
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, _Persist | asyncio.Future | None) or len(together) == MOST_TOGETHER:
                    together = self._record(together)
                if item is None:
                    return
                if isinstance(item, asyncio.Future):
                    item.get_loop().call_soon_threadsafe(_finish, item)
                elif isinstance(item, _Persist):
                    self._do(self._ledger.persist)
                else:
                    together.append(item)
            together = self._record(together)

    def _record(self, together: list[Operation]) -> list[Operation]:
        """In one transaction; nothing is left."""
        if together:
            self._do(partial(self._ledger.apply, *together))
        return []

    def _do(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: write and flush raise it
            self._error = error


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
