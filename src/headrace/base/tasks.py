"""Groups of tasks that fail with a single error, rather than with a group of errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def first_error(error: BaseException) -> BaseException:
    """Return the first error in a group of errors, which may be nested; an ``error`` that is not a group is returned
    itself.

    >>> first_error(ExceptionGroup("", [ExceptionGroup("", [OSError(1)]), OSError(2)]))
    OSError(1)
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Return a context with a task group that raises the first error of its tasks, rather than a group of errors."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def run_together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines ``jobs`` concurrently and return their results in order. If a coroutine fails, the others are
    cancelled and its error is raised."""
    async with task_group() as tasks:
        running = [tasks.create_task(job) for job in jobs]
    return [task.result() for task in running]
