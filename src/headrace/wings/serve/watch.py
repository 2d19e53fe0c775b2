"""Work for a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message

A = TypeVar("A")
Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The client has left; nobody reads an answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, A]) -> A:
    """What ``work`` returns or raises; it is cancelled, and :class:`ClientGone` raised, when the client leaves."""
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        working.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work)
            watching = group.create_task(watch())
            working.add_done_callback(lambda _: watching.cancel())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if working.cancelled():
        raise ClientGone if is_gone else asyncio.CancelledError
    return working.result()
