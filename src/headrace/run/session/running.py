"""Coroutines run from plain functions, and errors told as one cause."""

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
    """The error that explains the others: the first of the project's own in a group of errors."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(part) for part in error.exceptions]
    own = [cause for cause in causes if isinstance(cause, HeadraceError)]
    return (own or causes)[0]


class Interrupts:
    """Passes Ctrl-C on to a loop in another thread. What runs there may say what it means; else it is cancelled."""

    def __init__(self) -> None:
        self.handler: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    async def attend(self, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main``, which :meth:`pass_on` interrupts from now on."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await main

    def pass_on(self) -> None:
        """Ctrl-C was pressed. Called from another thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: it is over
                self._loop.call_soon_threadsafe(self._interrupted)

    def _interrupted(self) -> None:
        if self.handler is not None:
            self.handler()
        elif self._task is not None:
            self._task.cancel()


def run_watched(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end in an event loop that knows how much of the time it works."""
    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        return runner.run(main)


def in_own_loop(main: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run to the end, also from within a running loop (a notebook): in a thread then, which is always waited for."""
    interrupts = Interrupts()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_watched(main(interrupts))
    results: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            results.append(run_watched(interrupts.attend(main(interrupts))))
        except asyncio.CancelledError:
            errors.append(KeyboardInterrupt())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            errors.append(error)
        finally:
            over.set()

    fresh = [threading.Thread(target=run, name="headrace")]
    while not over.is_set():
        try:
            if fresh:
                fresh.pop().start()  # waits too, and can be interrupted
            over.wait()  # not join: an interrupted join takes the thread for ended
        except KeyboardInterrupt:
            interrupts.pass_on()
    if errors:
        raise errors[0]
    return results[0]
