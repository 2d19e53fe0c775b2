"""An engine in a thread of this process. It uses the same host and the same client as an engine in a process of its
own, connected by a channel in memory.

    event loop                              step-loop thread                       stager thread
    EngineClient ── orders in memory ────▶  EngineHost: between two steps          stage: verify an
    streams, answers ◀── one callback ────  the orders, then a step                update meanwhile

The step-loop thread owns the core: no other thread calls the core, except for :meth:`EngineCore.stage`. The thread ends
when the engine is closed or the core raises an error. Every waiting call then raises the cause as
:class:`~headrace.base.errors.ComponentDied`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Ready
from headrace.base.types.messages.engine import Abort
from headrace.engine.base import EngineCore
from headrace.launch.clients.engine import EngineClient
from headrace.launch.hosts.engine import EngineHost, EngineHostConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngineConfig:
    """The limits of an engine that runs in a thread of this process (:class:`LocalEngine`)."""

    max_requests: int = 4096
    """The largest number of requests that may wait or run at the same time. A request beyond it raises
    :class:`~headrace.base.errors.EngineFull`."""
    deadline_s: float = 600.0
    """The time limit, in seconds, of a stage, a commit, a score or another call that is answered."""


class MemoryChannel:
    """A channel between an event loop and a thread of one process. Messages are passed as Python objects. This object
    is the thread's end; :class:`MemoryOrders` is the client's end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create a channel whose client runs in the event loop ``loop``."""
        self._loop = loop
        self._orders: deque[Any] = deque()
        """The orders that the thread has not received."""
        self._arrived = threading.Event()
        """Set when an order arrives, which wakes the waiting thread."""
        self.deliver: Callable[[Any], None] | None = None
        """The function that receives the thread's messages in the event loop. It is set before the thread starts."""

    def order(self, message: Any) -> None:
        """Queue an order for the thread without waiting."""
        self._orders.append(message)
        self._arrived.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for an order, and return whether an order has arrived. The thread calls
        this."""
        if not self._orders:
            self._arrived.wait(timeout_s)
        self._arrived.clear()
        return bool(self._orders)

    def receive(self, timeout_s: float) -> list[Any]:
        """Wait up to ``timeout_s`` seconds for an order, and return all orders that have arrived, oldest first. The
        thread calls this."""
        self.wait(timeout_s)
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def send(self, message: Any) -> None:
        """Pass ``message`` to the client, in its event loop. If the loop has ended, the thread receives an order to
        end."""
        assert self.deliver is not None
        self.call(self.deliver, message)

    def send_to_self(self, message: Any) -> None:
        """Queue ``message`` as if it were an order to the thread."""
        self.order(message)

    def call(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call ``callback`` with ``arguments`` in the event loop, from any thread. If the loop has ended, the engine's
        thread receives an order to end instead."""
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            self.order(Shutdown())


class MemoryOrders:
    """The client's end of a :class:`MemoryChannel`, with the methods that a client expects of its channel
    (:class:`~headrace.launch.channel.OrdersEnd`)."""

    local_orders = ""
    """Always empty: other parts cannot send orders to an engine in a thread."""

    def __init__(self, channel: MemoryChannel) -> None:
        """Create the client's end of ``channel``."""
        self._channel = channel

    def send(self, message: Any) -> None:
        """Queue an order for the engine, without waiting."""
        self._channel.order(message)

    async def receive(self) -> list[Any]:
        """Return no messages, because the channel passes the engine's messages to the client directly."""
        return []

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class LocalEngine(EngineClient):
    """An engine that runs ``core`` in a thread of this process, with the :class:`~headrace.engine.Engine` contract, for
    use in one event loop::

        async with LocalEngine(core, clock=RealClock()) as engine:
            async for chunk in engine.generate(prompt_ids_T, Sampling(max_new_tokens=8)):
                ...
    """

    in_run = False
    deadline_setting = "LocalEngineConfig.deadline_s"

    def __init__(self, core: EngineCore, *, clock: Clock, config: LocalEngineConfig | None = None) -> None:
        """Create an engine that runs ``core``. Its thread starts when the context is entered. ``clock`` is the clock of
        the step loop, and ``config`` are the limits of the engine."""
        config = config or LocalEngineConfig()
        self._memory = MemoryChannel(asyncio.get_running_loop())
        super().__init__(
            "engine",
            MemoryOrders(self._memory),
            token="",
            on_spans=lambda _: None,
            deadline_s=config.deadline_s,
            max_requests=config.max_requests,
        )
        self._memory.deliver = self._route
        self._core = core
        self._clock = clock
        self._dead = asyncio.Event()
        """Set when the engine is closed or broken."""

    async def __aenter__(self) -> Self:
        """Start the step-loop thread and the staging thread, and return this engine."""
        self._stats = self._core.stats()
        self._route(Ready(token="", pid=0, facts={}))
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self.name}-stage")
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Make all waiting calls fail, end the step loop, and wait until both threads have ended."""
        self.end(ComponentDied(f"{self.name} was closed", remedy="keep it open while requests run"))
        self._memory.order(Shutdown())
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._stager.shutdown, cancel_futures=True)

    @property
    def death(self) -> ComponentDied | None:
        """The reason why the engine can serve no more requests; ``None`` while it can."""
        return self._closed

    async def wait_for_death(self) -> ComponentDied:
        """Wait until the engine is closed or broken, and return the reason."""
        await self._dead.wait()
        assert self._closed is not None
        return self._closed

    def end(self, death: ComponentDied) -> None:
        """Make all waiting calls and every later call fail with ``death``, and wake the callers of
        :meth:`wait_for_death`."""
        super().end(death)
        self._dead.set()

    def withdraw_all(self) -> None:
        """Abort every request. Each request keeps its sampled tokens, and its last chunk has the stop reason
        :attr:`StopReason.ABORTED`."""
        self._flush()
        self.send(Abort(request_ids=tuple(self._streams)))

    def _serve(self) -> None:
        """Run the step loop of the engine until the engine is closed. This is the body of the step-loop thread. If the
        loop fails, callers receive :class:`~headrace.base.errors.ComponentDied`."""
        try:
            EngineHost(self._core, self._memory, self._stager, EngineHostConfig(clock=self._clock)).serve()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: waiting callers must receive the error
            problem = f"{self.name} died in its step loop: {type(error).__name__}: {error}"
            death = ComponentDied(problem, remedy="start it again; if it dies again, report this")
            death.__cause__ = error
            self._memory.call(self.end, death)
