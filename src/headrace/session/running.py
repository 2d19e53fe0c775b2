"""Coroutines run from plain functions, and errors told as one cause."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.errors import HeadraceError

T = TypeVar("T")


def first_cause(error: BaseException) -> BaseException:
    """The error that explains the others: the first of the project's own in a group of errors."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(part) for part in error.exceptions]
    own = [cause for cause in causes if isinstance(cause, HeadraceError)]
    return (own or causes)[0]


def in_own_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end, also from within a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="headrace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
