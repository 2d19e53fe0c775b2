"""Real and virtual time.

Code asks its :class:`Clock` for the time and sleeps with ``asyncio.sleep``. Under :func:`run_virtual` the event loop
itself keeps virtual time: when every task waits, it jumps to the next timer instead of sleeping, so the controller
that serves a cluster also runs a simulated day in seconds, and a test of a deadline takes no time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Clock(Protocol):
    """Where the time comes from."""

    def now(self) -> float:
        """Seconds on a clock that never goes back, with one zero for all processes of a machine."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for people to read."""
        ...


class RealClock:
    """The machine's clock (``CLOCK_MONOTONIC``: comparable between processes)."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """The time of the running virtual event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return asyncio.get_running_loop().time()


class VirtualDeadlock(RuntimeError):
    """Every task waits and no timer is pending: in real time this program would hang for ever."""


class _JumpingSelector:
    """Stands where the loop's selector stands; where that would sleep, virtual time moves on."""

    def __init__(self, real: Any, advance: Callable[[float | None], None]) -> None:
        self._real = real
        self._advance = advance

    def select(self, timeout: float | None) -> Any:
        ready = self._real.select(0)
        if not ready and (timeout is None or timeout > 0):
            self._advance(timeout)
        return ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time moves only when nothing else can.

    >>> async def sleep_a_day() -> float:
    ...     await asyncio.sleep(86_400)
    ...     return VirtualClock().now()
    >>> run_virtual(sleep_a_day())
    86400.0
    """

    _selector: Any

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._selector = _JumpingSelector(self._selector, self._advance)

    def time(self) -> float:
        return self._virtual_now

    def _advance(self, timeout: float | None) -> None:
        if timeout is None:
            raise VirtualDeadlock("every task waits for another and no timer is pending")
        self._virtual_now += timeout


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in virtual time; raises :class:`VirtualDeadlock` where real time would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def off_loop(blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in a thread, so that the event loop goes on; in virtual time it takes no time at all."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return blocking(*args, **kwargs)
    return await asyncio.to_thread(blocking, *args, **kwargs)


def being_cancelled() -> bool:
    """Whether the task that runs was cancelled: what it raises from then on is the failure of its clean-up."""
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
