"""A warm pool: sessions that are started before they are asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from headrace.base.errors import ConfigError
from headrace.wings.sandboxes.base import SandboxDriver, SandboxSession, SandboxSnapshot, SandboxSpec, SessionEnded


class SessionPool:
    """A pool of sessions that all begin alike, as a description says or as a snapshot holds. It keeps some of them
    ready; ``async with`` opens it, and ends those that were not used.

    The time of a session (``life_s``) counts from its start, so a ready one has less of it left.
    """

    def __init__(self, driver: SandboxDriver, origin: SandboxSpec | SandboxSnapshot, *, ready: int) -> None:
        """Keep ``ready`` sessions that begin as ``origin`` says."""
        if ready < 1:
            raise ConfigError(f"ready={ready} keeps no session ready", remedy="set ready >= 1")
        self._driver = driver
        self._origin = origin
        self._size = ready
        self._ready: deque[SandboxSession] = deque()
        self._changed = asyncio.Condition()
        self._tasks = asyncio.TaskGroup()
        self._refilling: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def take(self) -> SandboxSession:
        """Return a session that is ready; if there is none, wait for the next. A session that has ended meanwhile is
        replaced. Raises the error of its start where sessions cannot start."""
        while True:
            async with self._changed:
                while (session := self._pop()) is None:
                    await self._changed.wait()
            if await _answers(session):
                return session

    def _pop(self) -> SandboxSession | None:
        """Return a session that is ready; ``None`` if there is none. Raises the error of the last start."""
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
        """Wait until as many sessions are ready as the pool keeps, or one could not start."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready) >= self._size or self._failure is not None)

    async def _refill(self) -> None:
        """Start sessions for ever, as soon as fewer are ready than the pool keeps. After a failure the next one is
        started when a caller has got the error."""
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
        """Start one session from the origin."""
        if isinstance(self._origin, SandboxSnapshot):
            return await self._driver.fork(self._origin)
        return await self._driver.start(self._origin)

    async def __aenter__(self) -> Self:
        """Begin to start sessions."""
        await self._tasks.__aenter__()
        self._refilling = self._tasks.create_task(self._refill())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Start no more sessions, and end those that are ready."""
        assert self._refilling is not None
        self._refilling.cancel()
        await self._tasks.__aexit__(kind, error, trace)
        for session in self._ready:
            await session.stop()


async def _answers(session: SandboxSession) -> bool:
    """Return whether a session still runs: only a call finds out that its time is over, or that it was killed."""
    try:
        await session.count_background()
    except SessionEnded:
        return False
    return True
