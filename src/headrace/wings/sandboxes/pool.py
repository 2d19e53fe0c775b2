"""A pool of started sessions, from which a caller receives a session without waiting for its start."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from headrace.base.errors import ConfigError
from headrace.wings.sandboxes.base import SandboxDriver, SandboxSession, SandboxSnapshot, SandboxSpec, SessionEnded


class SessionPool:
    """A pool that keeps a number of sessions ready, all started from the same spec or snapshot. ``async with`` starts
    filling it, and its end stops the sessions that were not taken.

    The lifetime of a session (``life_s``) counts from its start, so a session that waited in the pool has less of it
    left.
    """

    def __init__(self, driver: SandboxDriver, origin: SandboxSpec | SandboxSnapshot, *, ready: int) -> None:
        """Create a pool that keeps ``ready`` sessions, started by ``driver`` from the spec or snapshot ``origin``.
        Raises :class:`~headrace.base.errors.ConfigError` for ``ready`` below 1."""
        if ready < 1:
            raise ConfigError(f"ready={ready} keeps no session ready", remedy="set ready >= 1")
        self._driver = driver
        self._origin = origin
        self._size = ready
        self._ready: deque[SandboxSession] = deque()
        """The sessions that were started and not taken."""
        self._changed = asyncio.Condition()
        """Notified when a session is ready, a session is taken, or a start fails."""
        self._tasks = asyncio.TaskGroup()
        """Runs the task that fills the pool."""
        self._refilling: asyncio.Task[None] | None = None
        """The task that fills the pool; ``None`` outside ``async with``."""
        self._failure: BaseException | None = None
        """The error of the last start, until :meth:`take` raises it."""

    async def take(self) -> SandboxSession:
        """Return a ready session; if there is none, wait for the next. Sessions that have ended in the pool are
        skipped. Raises the error of the last start if it failed."""
        while True:
            async with self._changed:
                while (session := self._pop()) is None:
                    await self._changed.wait()
            if await _is_running(session):
                return session

    def _pop(self) -> SandboxSession | None:
        """Return a ready session; ``None`` if there is none. Raises the error of the last start if it failed."""
        self._changed.notify_all()
        while self._ready:
            session = self._ready.popleft()
            if not session.ended:
                return session
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return None

    async def fill(self) -> None:
        """Wait until the pool is full, or until a session could not start."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) >= self._size or self._failure is not None)

    async def _refill(self) -> None:
        """Start sessions whenever the pool is not full, until cancelled. After a failed start, wait until :meth:`take`
        has raised its error."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._ready) < self._size and self._failure is None)
            try:
                session = await self._start()
            except Exception as error:  # noqa: BLE001 - a boundary: the caller that waits for the session gets it
                async with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                continue
            async with self._changed:
                self._ready.append(session)
                self._changed.notify_all()

    async def _start(self) -> SandboxSession:
        """Start one session from the spec or the snapshot."""
        if isinstance(self._origin, SandboxSnapshot):
            return await self._driver.fork(self._origin)
        return await self._driver.start(self._origin)

    async def __aenter__(self) -> Self:
        """Begin to fill the pool."""
        await self._tasks.__aenter__()
        self._refilling = self._tasks.create_task(self._refill())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Start no more sessions, and stop the ready sessions."""
        assert self._refilling is not None
        self._refilling.cancel()
        await self._tasks.__aexit__(kind, error, trace)
        for session in self._ready:
            await session.stop()


async def _is_running(session: SandboxSession) -> bool:
    """Return whether a session still runs. Only a call to the session detects the end of its lifetime or its death."""
    try:
        await session.count_background()
    except SessionEnded:
        return False
    return True
