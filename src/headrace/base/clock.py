"""Real and virtual time.

A component receives a :class:`Clock`, reads the time from it and sleeps with ``asyncio.sleep``. A run uses
:class:`RealClock`. A test or a simulation runs under :func:`run_virtual`, where the event loop keeps virtual time: when
every task waits, the loop advances the time to the next timer instead of sleeping. A simulated day then takes seconds,
and a test of a deadline takes no time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

OWN_STANDSTILL_S = 2.0
"""The lateness of a :class:`TimeLimit` check, in seconds, from which this process is assumed to have been suspended. A
check that is later than this does not count."""
NUM_CHECKS = 16
"""Number of checks into which a :class:`TimeLimit` divides its time."""


class Clock(Protocol):
    """The interface through which a component reads the time: :class:`RealClock` in a run, :class:`VirtualClock` in a
    test or a simulation."""

    def now(self) -> float:
        """Return the time in seconds of a clock that never goes backwards and that all processes of a machine share."""
        ...

    def wall(self) -> float:
        """Return the seconds since 1970, for timestamps that people read."""
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
    """The clock of a running :class:`VirtualLoop`. Both methods return the virtual seconds since the loop started."""

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
    """A wrapper of the event loop's selector that advances virtual time instead of sleeping. Every method but
    :meth:`select` is forwarded to the wrapped selector."""

    def __init__(self, real: Any, advance: Callable[[float | None], None]) -> None:
        """Wrap the selector ``real``. :meth:`select` calls ``advance`` with the number of seconds for which the event
        loop would sleep, or with ``None`` if no timer is pending and the loop would sleep until a file is ready."""
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
        """Return an attribute of the wrapped selector, such as ``register``."""
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
        """Start at time 0, with a selector that advances the time instead of sleeping."""
        super().__init__()
        self._virtual_now = 0.0
        """The virtual time in seconds."""
        self._selector = _JumpingSelector(self._selector, self._advance)

    def time(self) -> float:
        """Return the virtual time in seconds, by which the loop runs its timers."""
        return self._virtual_now

    def _advance(self, timeout: float | None) -> None:
        """Advance virtual time by ``timeout`` seconds; the selector calls this when no task can run. Raises
        :class:`VirtualDeadlock` if ``timeout`` is ``None``: then no timer is pending."""
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
    result. Under a :class:`VirtualLoop` the function is called directly and takes no virtual time."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return blocking(*args, **kwargs)
    return await asyncio.to_thread(blocking, *args, **kwargs)


class TimeLimit:
    """An asynchronous context manager that limits how long its body may run, like :func:`asyncio.timeout`. Time in
    which this process was suspended does not count, since the process could not receive anything then.

    The limit is divided into :data:`NUM_CHECKS` equal intervals, with a check after each. The last check ends the body
    with ``TimeoutError``. A check does not count if it is late because the process was suspended, or if ``is_paused``
    returns true.

    >>> async def wait_for_ever() -> None:
    ...     async with TimeLimit(60.0):
    ...         await asyncio.Event().wait()
    >>> run_virtual(wait_for_ever())
    Traceback (most recent call last):
    TimeoutError
    """

    def __init__(self, seconds: float | None, *, is_paused: Callable[[], bool] = lambda: False) -> None:
        """Limit the body to ``seconds``; ``None`` sets no limit. Every check calls ``is_paused``: while it returns
        true, for example because the peer is suspended, the time does not count."""
        self.scope = asyncio.Timeout(None)
        """The cancel scope of the body; :meth:`asyncio.Timeout.reschedule` ends it earlier."""
        self._check_interval_s = None if seconds is None else seconds / NUM_CHECKS
        """The time between two checks in seconds; ``None`` without a limit."""
        self._is_paused = is_paused
        self._checks_left = NUM_CHECKS
        """The number of checks after which the time is up."""
        self._timer: asyncio.TimerHandle | None = None
        """The timer of the next check; ``None`` if none is set."""

    async def __aenter__(self) -> None:
        """Start to count the time of the body."""
        await self.scope.__aenter__()
        if self._check_interval_s is not None:
            self._schedule_check(self._check_interval_s)

    async def __aexit__(self, *error: Any) -> None:
        """Stop counting. Raises ``TimeoutError`` if the limit ended the body."""
        if self._timer is not None:
            self._timer.cancel()
        await self.scope.__aexit__(*error)

    def _schedule_check(self, delay_s: float) -> None:
        """Schedule the next check ``delay_s`` seconds from now. The check receives its due time, so that it can detect
        that it is late."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        self._timer = loop.call_at(due_s, self._check, due_s, delay_s)

    def _check(self, due_s: float, delay_s: float) -> None:
        """Count the check that was due at ``due_s``, in seconds of the event loop's clock, unless it is late or
        ``is_paused`` returns true. End the body when no checks are left; otherwise schedule the next check ``delay_s``
        seconds from now."""
        now_s = asyncio.get_running_loop().time()
        was_suspended = now_s - due_s > OWN_STANDSTILL_S
        self._checks_left -= not (was_suspended or self._is_paused())
        if self._checks_left:
            self._schedule_check(delay_s)
        elif not self.scope.expired():  # the body may have been ended earlier
            self.scope.reschedule(now_s)


def being_cancelled() -> bool:
    """Return whether the current task has been cancelled. An error that a cancelled task raises comes from its
    clean-up."""
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
