"""A stand-in for a service of the network: a real HTTP server of this machine, in a thread with an event loop."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web


class FakeService(ABC):
    """A server that listens as soon as it is made, and until it is closed."""

    def __init__(self) -> None:
        self.silent = False
        """Whether it answers nothing at all."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=[ready], daemon=True)
        self._thread.start()
        ready.wait()

    @abstractmethod
    def routes(self) -> list[web.RouteDef]: ...

    @abstractmethod
    def refuse(self, request: web.Request) -> web.Response | None:
        """The answer to a request that may not be made."""

    def spawn(self, life: Coroutine[Any, Any, None]) -> None:
        """Run something beside the requests, until it ends or the service is closed."""
        task = self._loop.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def settle(self) -> None:
        """Wait until all that was spawned has ended."""

        async def wait() -> None:
            if self._tasks:
                await asyncio.wait(list(self._tasks), timeout=30.0)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    def do(self, action: Callable[[], None]) -> None:
        """Do something in the thread of the service, and wait for it."""

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result()

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen(ready))

    async def _listen(self, ready: threading.Event) -> None:
        self._end = asyncio.Event()

        @web.middleware
        async def check(request: web.Request, handler: Any) -> Any:
            if self.silent:
                await self._end.wait()
            return self.refuse(request) or await handler(request)

        app = web.Application(middlewares=[check], client_max_size=1 << 30)
        app.add_routes(self.routes())
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._end.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await runner.cleanup()
