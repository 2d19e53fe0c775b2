"""Plain functions of the user, called where they keep nobody else waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(executor: Executor | None, call: Callable[[], T]) -> T:
    """What ``call`` returns, from a thread of ``executor``. Whoever is cancelled meanwhile ends when the thread has
    returned, and not before: until then the thread is in use, and so is all that it works on."""
    running = asyncio.get_running_loop().run_in_executor(executor, _outcome, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # nobody waits for it
        raise


def _outcome(call: Callable[[], T]) -> T:
    try:
        return call()
    except StopIteration as error:  # a future cannot carry it
        raise RuntimeError(f"StopIteration: {error}") from error
