"""The loop of every worker process, which runs user code (a reward or an environment). It reports that the worker is
ready, handles orders until the order to shut down, and then kills its own process with all processes that it has
started.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Never

from headrace.base.environ import forget_token, run_token
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Ready
from headrace.launch.channel import PartChannel

WAIT_S = 60.0
"""The longest time of one wait for orders, in seconds."""


async def serve(
    channel: PartChannel,
    handle: Callable[[Any, asyncio.TaskGroup], None],
    *,
    facts: dict[str, str | int | float] | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Report over ``channel`` that this worker is ready, with its ``facts``. Then call ``handle`` for every order, with
    a task group for the task that executes the order. The order to shut down ends the process. ``on_ready`` is called
    after the report and before the first order; no other message may be sent before the report."""
    channel.send(Ready(token=run_token(), pid=os.getpid(), facts=facts or {}))
    forget_token()
    on_ready()
    async with asyncio.TaskGroup() as calls:
        async for order in _receive_orders(channel):
            if isinstance(order, Shutdown):
                kill_now()
            handle(order, calls)


async def _receive_orders(channel: PartChannel) -> AsyncIterator[Any]:
    """Yield the controller's orders as they arrive. A thread waits for them, so that the event loop is not blocked."""
    receiver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orders")
    while True:
        for order in await asyncio.get_running_loop().run_in_executor(receiver, channel.receive, WAIT_S):
            yield order


class CallThreads(ThreadPoolExecutor):
    """The threads in which a worker calls plain functions of the user. If the system refuses to start a thread, because
    user code has started as many threads or processes as allowed, the worker ends. All its calls are then repeated, and
    the call that is the cause is found when it runs alone. If only the call that needs the thread failed, the wrong
    call would be blamed."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn`` with the arguments in one of the threads, and return the future of its result. If no thread can
        be started, end this process."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            sys.stderr.write(f"this worker ends, for it can make no more calls: {error}\n")
            kill_now()


def kill_now() -> Never:
    """Kill this process and all processes that it has started, at once. User code that never returns cannot prevent
    this."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("a killed process continues")
