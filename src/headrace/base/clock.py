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

OWN_STANDSTILL_S = 2.0
"""A check of a time limit that comes more than this many seconds late shows that this process was suspended; such a
check does not count."""
NUM_CHECKS = 16
"""Number of checks into which a :class:`TimeLimit` divides its time."""


class Clock(Protocol):
    """The source of the time, which a component gets as an argument: :class:`RealClock` in a run, :class:`VirtualClock`
    in a test or a simulation."""

    def now(self) -> float:
        """Return the seconds on a clock that never goes back, with one zero for all processes of a machine."""
        ...

    def wall(self) -> float:
        """Return the seconds since 1970, for people to read."""
        ...


class RealClock:
    """The clock of the machine (``CLOCK_MONOTONIC``, which is comparable between processes)."""

    def now(self) -> float:
        """Return the seconds of ``CLOCK_MONOTONIC``, which never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the seconds since 1970."""
        return time.time()


class VirtualClock:
    """The clock of a running :class:`VirtualLoop`: both of its times are the virtual seconds since the loop began."""

    def now(self) -> float:
        """Return the virtual seconds since the running event loop began."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Return the virtual seconds since the running event loop began: virtual time has no date."""
        return asyncio.get_running_loop().time()


class VirtualDeadlock(RuntimeError):
    """The error that :func:`run_virtual` raises when every task waits and no timer is pending: in real time the program
    would hang for ever."""


class _JumpingSelector:
    """A wrapper of the event loop's selector that advances virtual time instead of sleeping. Every call but
    :meth:`select` goes to the selector that it wraps."""

    def __init__(self, real: Any, advance: Callable[[float | None], None]) -> None:
        """Wrap the selector ``real``. :meth:`select` calls ``advance`` with the number of seconds that the loop wants
        to sleep, to move virtual time on; with ``None`` where no timer is pending, so that the loop would sleep until a
        file is ready."""
        self._real = real
        self._advance = advance

    def select(self, timeout: float | None) -> Any:
        """Return the files that are ready now, without waiting. If there are none, advance virtual time by ``timeout``
        seconds; a ``timeout`` of ``None`` means that no timer is pending."""
        ready = self._real.select(0)
        if not ready and (timeout is None or timeout > 0):
            self._advance(timeout)
        return ready

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped selector, such as ``register``."""
        return getattr(self._real, name)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time, in seconds from 0, which advances only when no task can run.

    >>> async def sleep_a_day() -> float:
    ...     await asyncio.sleep(86_400)
    ...     return VirtualClock().now()
    >>> run_virtual(sleep_a_day())
    86400.0
    """

    _selector: Any

    def __init__(self) -> None:
        """Begin at time 0, with a selector that advances the time instead of sleeping."""
        super().__init__()
        self._virtual_now = 0.0
        self._selector = _JumpingSelector(self._selector, self._advance)

    def time(self) -> float:
        """Return the virtual time in seconds, by which the loop runs its timers."""
        return self._virtual_now

    def _advance(self, timeout: float | None) -> None:
        """Move virtual time on by ``timeout`` seconds; the selector calls this when no task can run. ``None`` means
        that no timer is pending: raise :class:`VirtualDeadlock`."""
        if timeout is None:
            raise VirtualDeadlock("every task waits for another and no timer is pending")
        self._virtual_now += timeout


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in virtual time, and return its result. Raises :class:`VirtualDeadlock` where real time
    would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def off_loop(blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function with these arguments in a thread, so that the event loop continues, and return its
    result. In a :class:`VirtualLoop` it is called directly, and takes no virtual time."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return blocking(*args, **kwargs)
    return await asyncio.to_thread(blocking, *args, **kwargs)


class TimeLimit:
    """Limits how long the body of ``async with`` may run, like :func:`asyncio.timeout`, but does not count time in
    which this process was suspended and so could not receive what it waits for.

    The limit is divided into :data:`NUM_CHECKS` checks; at the last one the body ends with ``TimeoutError``. A check
    that comes late because the process was suspended does not count, and neither does one at which ``held`` returns
    true.

    >>> async def wait_for_ever() -> None:
    ...     async with TimeLimit(60.0):
    ...         await asyncio.Event().wait()
    >>> run_virtual(wait_for_ever())
    Traceback (most recent call last):
    TimeoutError
    """

    def __init__(self, seconds: float | None, *, held: Callable[[], bool] = lambda: False) -> None:
        """Limit the body to ``seconds``; ``None`` sets no limit. ``held`` is called at every check: while it returns
        true, for example because the peer is known to be suspended, the time does not count."""
        self.scope = asyncio.Timeout(None)
        """The scope of the body; :meth:`asyncio.Timeout.reschedule` ends it earlier."""
        self._nap_s = None if seconds is None else seconds / NUM_CHECKS
        self._held = held
        self._checks_left = NUM_CHECKS
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        """Begin to count the time of the body."""
        await self.scope.__aenter__()
        if self._nap_s is not None:
            self._schedule_check(self._nap_s)

    async def __aexit__(self, *error: Any) -> None:
        """Stop counting. Raises ``TimeoutError`` if the limit ended the body."""
        if self._timer is not None:
            self._timer.cancel()
        await self.scope.__aexit__(*error)

    def _schedule_check(self, delay_s: float) -> None:
        """Schedule the next check ``delay_s`` seconds from now. It receives the time at which it is due, so that it can
        see whether it comes late."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        self._timer = loop.call_at(due_s, self._check, due_s, delay_s)

    def _check(self, due_s: float, delay_s: float) -> None:
        """Count one check that was due at ``due_s``, in seconds of the event loop's clock. It does not count if it came
        late, or if ``held`` returns true. End the body when no checks are left; otherwise schedule the next one
        ``delay_s`` seconds from now."""
        now_s = asyncio.get_running_loop().time()
        stood_still = now_s - due_s > OWN_STANDSTILL_S
        self._checks_left -= not (stood_still or self._held())
        if self._checks_left:
            self._schedule_check(delay_s)
        elif not self.scope.expired():  # it may have been ended earlier
            self.scope.reschedule(now_s)


def being_cancelled() -> bool:
    """Return whether the current task has been cancelled. An error that such a task raises comes from its clean-up."""
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
