"""Run coroutines from plain functions, with Ctrl-C, and find the cause in a group of errors."""

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
    """Return the error that explains the others in a group: the first of the project's own classes, or else the
    first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(part) for part in error.exceptions]
    own = [cause for cause in causes if isinstance(cause, HeadraceError)]
    return (own or causes)[0]


class Interrupts:
    """Passes Ctrl-C on to an event loop in another thread, where it calls ``handler`` or, without one, cancels the
    task."""

    def __init__(self) -> None:
        self.handler: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main``; :meth:`pass_on` interrupts it from now on."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await main

    def pass_on(self) -> None:
        """Interrupt the coroutine, because Ctrl-C was pressed. This is called from another thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the coroutine has ended
                self._loop.call_soon_threadsafe(self._interrupted)

    def _interrupted(self) -> None:
        """Pass an interrupt on: to the handler if there is one, otherwise cancel the task."""
        if self.handler is not None:
            self.handler()
        elif self._task is not None:
            self._task.cancel()


def run_watched(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop that measures how much of the time it works."""
    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        return runner.run(main)


def in_own_loop(main: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end and return its result. Where an event loop is running already (in a notebook), it
    runs in a thread, which is waited for."""
    interrupts = Interrupts()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_watched(main(interrupts))
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        """Run the coroutine in an event loop of this thread, and keep its result or its error."""
        try:
            results.append(run_watched(interrupts.run(main(interrupts))))
        except asyncio.CancelledError:
            errors.append(KeyboardInterrupt())
        except BaseException as error:  # noqa: BLE001 - passed on to the thread that waits
            errors.append(error)
        finally:
            ended.set()

    fresh = [threading.Thread(target=run, name="headrace")]
    while not ended.is_set():
        try:
            if fresh:
                fresh.pop().start()  # start() waits for the thread, and Ctrl-C may interrupt it
            ended.wait()  # not join(): after an interrupted join() Python takes the thread for ended
        except KeyboardInterrupt:
            interrupts.pass_on()
    if errors:
        raise errors[0]
    return results[0]
