"""Functions that run a coroutine from a plain function, with Ctrl-C passed on to it, and that find the cause in an
exception group.

``train`` and ``evaluate`` are plain functions whose work is a coroutine. If an event loop is running already, as in a
notebook, the coroutine runs in another thread, which Ctrl-C does not reach by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from headrace.base.errors import HeadraceError
from headrace.run.observe import WatchedLoop

T = TypeVar("T")


def first_cause(error: BaseException) -> BaseException:
    """Return the error that explains the others in an exception group, which a task group raises: the first
    :class:`~headrace.base.errors.HeadraceError` in it, or else the first error. An ``error`` that is not a group is
    returned itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(part) for part in error.exceptions]
    own = [cause for cause in causes if isinstance(cause, HeadraceError)]
    return (own or causes)[0]


class Interrupts:
    """The link by which Ctrl-C interrupts a coroutine in the event loop of another thread, since Python raises
    ``KeyboardInterrupt`` in the main thread alone. An interrupt calls :attr:`handler` in the loop's thread, or without
    a handler cancels the coroutine's task."""

    def __init__(self) -> None:
        """Start without a coroutine: an interrupt before :meth:`run` has no effect."""
        self.handler: Callable[[], None] | None = None
        """The function that handles an interrupt in the loop's thread; ``None``: an interrupt cancels the task."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the coroutine; ``None`` before :meth:`run`."""
        self._task: asyncio.Task[Any] | None = None
        """The task of the coroutine; ``None`` before :meth:`run`."""

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine ``main`` in the running event loop, and return its result. While it runs, :meth:`interrupt`
        interrupts it."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await main

    def interrupt(self) -> None:
        """Interrupt the coroutine, because Ctrl-C was pressed. The main thread calls this method, which does nothing
        before the coroutine runs, or after its end."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the coroutine has ended
                self._loop.call_soon_threadsafe(self._handle_interrupt)

    def _handle_interrupt(self) -> None:
        """Handle an interrupt in the thread of the event loop: call the handler if there is one, otherwise cancel the
        coroutine's task."""
        if self.handler is not None:
            self.handler()
        elif self._task is not None:
            self._task.cancel()


def run_in_watched_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine ``main`` to its end in a new event loop, and return the result of the coroutine. The loop
    records when it runs and when it waits (:class:`~headrace.run.observe.looptime.WatchedLoop`)."""
    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        return runner.run(main)


def run_in_own_loop(main: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that ``main`` returns to its end, in an event loop of its own, and return its result or raise
    its error.

    If an event loop is running already (in a notebook), the coroutine runs in a new thread, and the caller waits for
    it; the :class:`Interrupts` that ``main`` receives pass Ctrl-C on to the coroutine.
    """
    interrupts = Interrupts()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_in_watched_loop(main(interrupts))
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        """Run the coroutine in an event loop of this thread, and store its result or its error for the caller."""
        try:
            results.append(run_in_watched_loop(interrupts.run(main(interrupts))))
        except asyncio.CancelledError:
            errors.append(KeyboardInterrupt())
        except BaseException as error:  # noqa: BLE001 - passed on to the thread that waits
            errors.append(error)
        finally:
            ended.set()

    unstarted = [threading.Thread(target=run, name="headrace")]
    while not ended.is_set():
        try:
            if unstarted:
                unstarted.pop().start()  # start() waits for the thread, and Ctrl-C may interrupt it
            ended.wait()  # not join(): after an interrupted join() Python considers the thread as ended
        except KeyboardInterrupt:
            interrupts.interrupt()
    if errors:
        raise errors[0]
    return results[0]
